"""A tiny MobileNet-V5 with weights that do not depend on torch's random numbers."""

import numpy as np
import torch
from torch import Tensor

from quire.attention.torch_sdpa import TorchSDPA
from quire.checkpoint.multimodal.gemma3n import Gemma3nVisionFacts
from quire.layers.scope import Scope
from quire.models.towers.mobilenet import MobileNet

SIDE, TOKENS, HIDDEN, FACTOR = 192, 16, 32, 0.05
"""Image side in pixels, soft tokens of an image, output channels, and factor on the channels of the published
model."""
FACTS = Gemma3nVisionFacts(
    image=SIDE,
    side=4,
    stem=64,
    widths=(8, 16, 32, 64),
    hidden=HIDDEN,
    norm_eps=1e-6,
    vocab=8,
    first=0,
    size_out=32,
    image_id=0,
    start_id=0,
    end_id=0,
)


def make() -> tuple[MobileNet, dict[str, Tensor]]:
    """Return the model, and its tensors by timm's names."""
    scope = Scope(
        dtype=torch.float32,
        device=torch.device("cpu"),
        backend=TorchSDPA(),
        max_len=64,
        is_stored=lambda name: True,
    )
    net = MobileNet(FACTS, scope)
    targets = [
        target for module in net.modules() if hasattr(module, "targets") for target in module.targets()
    ]
    tensors: dict[str, Tensor] = {target.name: target.tensor for target in targets}
    random = np.random.default_rng(0)
    for name in sorted(tensors):
        tensor, noise = tensors[name], random.standard_normal(tensors[name].shape).astype(np.float32)
        is_matrix = tensor.ndim > 1
        scaled = noise * (float(tensor[0].numel()) ** -0.5 if is_matrix else 0.5)
        tensor.copy_(torch.from_numpy(scaled + (0 if is_matrix or "gamma" in name else 1)))
    return net, tensors


def squares(count: int) -> Tensor:
    """Return random images."""
    pixels = np.random.default_rng(1).random((count, 3, SIDE, SIDE), dtype=np.float32)
    return torch.from_numpy(pixels)
