"""The experts that transformers chooses."""

from typing import Any

import numpy as np
import torch


def experts_of(hf_model: Any, token_ids: list[int]) -> Any:
    """Return the experts that the routers of a transformers model choose, [tokens, MoE layers, experts per
    token]."""
    by_layer: list[Any] = []
    routers = [module for module in hf_model.modules() if type(module).__name__.endswith("Router")]
    hooks = [
        router.register_forward_hook(lambda module, inputs, out: by_layer.append(out[-1]))
        for router in routers
    ]
    with torch.inference_mode():
        hf_model(torch.tensor([token_ids]))
    for hook in hooks:
        hook.remove()
    return np.stack([experts.reshape(len(token_ids), -1).numpy() for experts in by_layer], 1)
