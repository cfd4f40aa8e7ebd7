"""Step-3.5 built from transformers' Step-3.7 decoder, stored as StepFun does."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Settings = dict[str, Any]
_NAMES = {
    ".mlp.shared_experts.": ".share_expert.",
    ".mlp.gate.weight": ".moe.gate.weight",
    ".mlp.gate.e_score_correction_bias": ".moe.router_bias",
    ".mlp.experts.down_proj": ".moe.down_proj.weight",
}
"""Names of the parts in transformers and in StepFun's checkpoints."""


def stored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by StepFun's names, with separate gate and up of experts."""
    out = {}
    for name, item in tensors.items():
        for old, new in _NAMES.items():
            name = name.replace(old, new)
        if ".mlp.experts.gate_up_proj" in name:
            for part, half in zip(("gate", "up"), item.chunk(2, 1), strict=True):
                out[name.replace(".mlp.experts.gate_up_proj", f".moe.{part}_proj.weight")] = half.contiguous()
        else:
            out[name] = item.clone()
    return out


def step35(settings: Settings) -> Any:
    """Build the model with `settings` as the checkpoint's config.json."""
    from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
    from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel

    class Step(Step3p7PreTrainedModel):  # type: ignore[misc]
        config_class = Step3p7TextConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = Step3p7TextModel(config)
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()
            if config.tie_word_embeddings:
                self.lm_head.weight = self.model.embed_tokens.weight

        def forward(self, input_ids: Tensor, **_: Any) -> Any:
            return SimpleNamespace(logits=self.lm_head(self.model(input_ids).last_hidden_state))

        def save_pretrained(self, path: Path, **_: Any) -> None:
            path.mkdir(parents=True, exist_ok=True)
            save_file(stored(self.state_dict()), path / "model.safetensors")
            (path / "config.json").write_text(json.dumps(settings | {"model_type": "step3p5"}))

    return Step(Step3p7TextConfig(**(copy.deepcopy(settings) | {"pad_token_id": 0})))
