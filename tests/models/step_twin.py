"""Step-3.5 built from transformers' Step-3.7 decoder, and Step3 in plain torch, stored as StepFun does."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

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


class Step3Attention(nn.Module):
    """One key and value head; queries come from a normed vector of `share_q_dim` numbers."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        self.number, self.size, rank = number, config.head_dim, config.share_q_dim
        queries = config.num_attention_heads * self.size
        self.q_proj = nn.Linear(config.hidden_size, rank, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.size, bias=False)
        self.inter_norm = LlamaRMSNorm(rank, config.rms_norm_eps)
        self.wq = nn.Linear(rank, queries, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, position_embeddings: Any, **options: Any) -> tuple[Tensor, None]:
        def rotate(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return x * cos + torch.cat((-second, first), -1) * sin

        x, (cos, sin) = hidden_states, position_embeddings
        q = self.wq(self.inter_norm(self.q_proj(x))).unflatten(-1, (-1, self.size)).transpose(1, 2)
        q, k, v = rotate(q), rotate(self.k_proj(x))[:, None], self.v_proj(x)[:, None]
        if (cache := options.get("past_key_values")) is not None:
            k, v = cache.update(k, v, self.number)
        places = torch.arange(k.shape[2])
        is_later = places > places[-q.shape[2] :, None]
        scores = (q @ k.transpose(2, 3) / self.size**0.5).masked_fill(is_later, -torch.inf)
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), None


class Step3MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Step3Experts(nn.ModuleList):
    """Softmax over all experts and the top k of them, scaled to a sum of 1 if `norm_expert_weight`."""

    def __init__(self, config: Any) -> None:
        size, inner = config.hidden_size, config.moe_intermediate_size
        super().__init__(Step3MLP(size, inner) for _ in range(config.moe_num_experts))
        self.gate = nn.Linear(size, config.moe_num_experts, bias=False)
        self.top, self.is_normed = config.moe_top_k, config.norm_expert_weight

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        best, ids = scores.topk(self.top, -1)
        best = best / best.sum(-1, keepdim=True) if self.is_normed else best
        weights = torch.zeros_like(scores).scatter(-1, ids, best)
        return sum(weights[..., i, None] * self[i](x) for i in range(scores.shape[-1]))


class Step3SparseLayer(LlamaDecoderLayer):  # type: ignore[misc]
    def mlp(self, x: Tensor) -> Tensor:
        return self.moe(x) + self.share_expert(x)  # type: ignore[no-any-return]


class Step3(LlamaForCausalLM):  # type: ignore[misc]
    """Step3 as published, which transformers does not have: Llama with another attention, and experts."""

    def __init__(self, settings: Settings) -> None:
        defaults = {"norm_expert_weight": False, "num_key_value_heads": 1, "rms_norm_eps": 1e-5}
        super().__init__(LlamaConfig(**(copy.deepcopy(settings) | defaults | settings)))
        self.settings, sparse = settings, settings["moe_layers_enum"].split(",")
        for number, layer in enumerate(self.model.layers):
            layer.self_attn = Step3Attention(self.config, number)
            if str(number) in sparse:
                del layer.mlp
                layer.moe = Step3Experts(self.config)
                layer.share_expert = Step3MLP(self.config.hidden_size, self.config.share_expert_dim)
                layer.__class__ = Step3SparseLayer
        self.post_init()

    def stored(self) -> dict[str, Tensor]:
        """Return the tensors by StepFun's names: one tensor for all experts of a layer."""
        out, experts = dict[str, Tensor](), dict[str, list[Tensor]]()
        for name, item in self.state_dict().items():
            layer, _, part = name.partition(".moe.")
            number, _, kind = part.partition(".")
            if number.isdigit():
                experts.setdefault(f"{layer}.moe.{kind}", []).append(item)
            else:
                out[name] = item.clone()
        return out | {name: torch.stack(items) for name, items in experts.items()}

    def save_pretrained(self, path: Path, **_: Any) -> None:
        path.mkdir(parents=True, exist_ok=True)
        save_file(self.stored(), path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(self.settings))


def step3(settings: Settings) -> Any:
    return Step3(settings | {"model_type": "step3_text"})
