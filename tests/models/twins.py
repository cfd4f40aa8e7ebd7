"""Models that transformers has under another name, stored as their makers store them; and ALiBi by hand."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaMLP

Settings = dict[str, Any]
Tensors = dict[str, Tensor]


class Twin(nn.Module):
    """A transformers model, the transformation of its tensors for a file, and the bias of its attention
    scores.
    """

    def __init__(
        self,
        model: Any,
        settings: Settings,
        stored: Callable[[Tensors], Tensors],
        bias: Callable[[int], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.model, self.settings, self.stored, self.bias = model, settings, stored, bias

    def forward(self, input_ids: Tensor) -> Any:
        mask = None if self.bias is None else self.bias(input_ids.shape[1])
        logits = self.model(input_ids, attention_mask=mask).logits
        return SimpleNamespace(logits=logits * self.settings.get("mup_width_scale", 1.0))

    def save_pretrained(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        tensors = {name: item.contiguous() for name, item in self.stored(self.model.state_dict()).items()}
        save_file({name: item.clone() for name, item in tensors.items()}, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(self.settings))


def called(**names: str) -> Callable[[Tensors], Tensors]:
    """Rename the parts of each name by this mapping; "__" is a dot."""
    if not names:
        return lambda tensors: tensors
    known = {old.replace("__", "."): new for old, new in names.items()}
    parts = re.compile("|".join(rf"\b{re.escape(old)}\b" for old in known))
    return lambda tensors: {parts.sub(lambda m: known[m[0]], name): item for name, item in tensors.items()}


def fuse_parts(tensors: Tensors, parts: tuple[str, ...], name: str, *, heads: int = 0) -> Tensors:
    """Concatenate the parts of each layer, or of each of this many heads."""
    out = dict(tensors)
    for first in [tensor for tensor in tensors if f".{parts[0]}." in tensor]:
        fused = [out.pop(first.replace(parts[0], part)) for part in parts]
        if heads:
            fused = [tensor.unflatten(0, (heads, -1)) for tensor in fused]
        both = torch.cat(fused, 1 if heads else 0)
        out[first.replace(parts[0], name)] = both.flatten(0, 1) if heads else both
    return out


QKV = ("q_proj", "k_proj", "v_proj")


def llama(settings: Settings, **more: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(settings | more)))


def alibi_slopes(heads: int) -> Tensor:
    """Return the slopes of the ALiBi paper: a geometric series for the largest power of 2, then every second
    of the next.
    """
    near = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 / near * (i + 1)) for i in range(near)]
    return torch.tensor(first + [2 ** (-4 / near * (2 * i + 1)) for i in range(heads - near)])


def add_alibi(heads: int) -> Callable[[int], Tensor]:
    """Add the ALiBi bias to the attention scores of a sequence."""

    def bias(length: int) -> Tensor:
        place = torch.arange(length)
        behind = (place[:, None] - place).float()
        scores = -alibi_slopes(heads)[:, None, None] * behind
        return scores.masked_fill(behind < 0, torch.finfo(torch.float32).min)[None]

    return bias


def baichuan(settings: Settings, turns: bool = False) -> Any:
    """Build Baichuan; the 13B model has ALiBi, and the second version a normalized head."""
    model = llama(settings, num_key_value_heads=settings["num_attention_heads"])
    if not turns:
        rotary = model.model.rotary_emb
        rotary.forward = lambda x, position_ids: (
            torch.ones(1, x.shape[1], settings["head_dim"]),
            torch.zeros(1, x.shape[1], settings["head_dim"]),
        )
    if settings["vocab_size"] > 1000:
        model.lm_head.forward = lambda x: F.linear(x, F.normalize(model.lm_head.weight))
    bias = None if turns else add_alibi(settings["num_attention_heads"])
    return Twin(model, settings, lambda tensors: fuse_parts(tensors, QKV, "W_pack"), bias)


def baichuan_7b(settings: Settings) -> Any:
    return baichuan(settings, turns=True)


def jais(settings: Settings) -> Any:
    """Build GPT-2 with ALiBi, gated MLP and scaling factors."""
    known = {key: value for key, value in settings.items() if key != "activation_function"}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**known))
    body = model.transformer
    del body.wpe
    body.wpe = NoPositions()
    for block in body.h:
        block.mlp = JaisMLP(settings["hidden_size"], settings["n_inner"])
        block.attn.scaling = 1 / block.attn.head_dim
    embed = body.wte.forward
    body.wte.forward = lambda ids: embed(ids) * settings["mup_embeddings_scale"]
    bias = add_alibi(settings["num_attention_heads"])

    return Twin(model, settings, called(), bias)


class NoPositions(nn.Module):
    """Position embeddings of zeros."""

    def forward(self, positions: Tensor) -> Tensor:
        return torch.zeros(*positions.shape, 1)


class JaisMLP(nn.Module):
    """An MLP gated by its second matmul, with inputs before outputs, as GPT-2 stores them."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        of = transformers.pytorch_utils.Conv1D
        self.c_fc, self.c_fc2, self.c_proj = of(inner, hidden), of(inner, hidden), of(hidden, inner)
        for part in self.children():
            nn.init.normal_(part.weight, std=0.2)

    def forward(self, x: Tensor) -> Any:
        return self.c_proj(self.c_fc(x) * F.silu(self.c_fc2(x)))


def internlm(settings: Settings) -> Any:
    return Twin(llama(settings, attention_bias=settings["bias"]), settings, called())


def internlm2(settings: Settings) -> Any:
    names = called(
        self_attn__wqkv="attention.wqkv",
        self_attn__o_proj="attention.wo",
        input_layernorm="attention_norm",
        post_attention_layernorm="ffn_norm",
        mlp__gate_proj="feed_forward.w1",
        mlp__up_proj="feed_forward.w3",
        mlp__down_proj="feed_forward.w2",
        embed_tokens="tok_embeddings",
        lm_head="output",
    )
    heads = settings["num_key_value_heads"]
    return Twin(llama(settings), settings, lambda t: names(fuse_parts(t, QKV, "wqkv", heads=heads)))


def exaone(settings: Settings) -> Any:
    names = called(
        model="transformer",
        layers="h",
        self_attn="attn.attention",
        o_proj="out_proj",
        input_layernorm="ln_1",
        post_attention_layernorm="ln_2",
        gate_proj="c_fc_0",
        up_proj="c_fc_1",
        down_proj="c_proj",
        embed_tokens="wte",
        norm="ln_f",
    )
    eps = settings["layer_norm_epsilon"]
    return Twin(llama(settings, num_hidden_layers=settings["num_layers"], rms_norm_eps=eps), settings, names)


def chatglm(settings: Settings) -> Any:
    config = transformers.GlmConfig(
        **settings
        | {
            "num_hidden_layers": settings["num_layers"],
            "num_key_value_heads": settings["multi_query_group_num"],
            "intermediate_size": settings["ffn_hidden_size"],
            "rms_norm_eps": settings["layernorm_epsilon"],
            "attention_bias": settings["add_qkv_bias"],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0 * settings["rope_ratio"],
                "partial_rotary_factor": 0.5,
            },
        }
    )
    names = called(
        model__embed_tokens="transformer.embedding.word_embeddings",
        model__layers="transformer.encoder.layers",
        model__norm="transformer.encoder.final_layernorm",
        self_attn="self_attention",
        o_proj="dense",
        gate_up_proj="dense_h_to_4h",
        down_proj="dense_4h_to_h",
        lm_head="transformer.output_layer",
    )
    model = transformers.GlmForCausalLM(config)
    return Twin(model, settings, lambda t: names(fuse_parts(t, QKV, "query_key_value")))


def qwen(settings: Settings) -> Any:
    config = transformers.Qwen2Config(
        **settings
        | {
            "num_key_value_heads": settings["num_attention_heads"],
            "intermediate_size": settings["intermediate_size"] // 2,
            "rms_norm_eps": settings["layer_norm_epsilon"],
        }
    )
    names = called(
        model="transformer",
        layers="h",
        self_attn="attn",
        o_proj="c_proj",
        input_layernorm="ln_1",
        post_attention_layernorm="ln_2",
        gate_proj="w2",
        up_proj="w1",
        down_proj="c_proj",
        embed_tokens="wte",
        norm="ln_f",
    )
    return Twin(
        transformers.Qwen2ForCausalLM(config), settings, lambda t: names(fuse_parts(t, QKV, "c_attn"))
    )


def mimo(settings: Settings) -> Any:
    config = transformers.Qwen2Config(**settings)

    def stored(tensors: Tensors) -> Tensors:
        return tensors | {"model.mtp_layers.0.input_proj.weight": torch.zeros(4)}

    return Twin(transformers.Qwen2ForCausalLM(config), settings, stored)


def orion(settings: Settings) -> Any:
    """Build Llama with layer norms."""
    model = llama(settings)
    for layer in model.model.layers:
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(layer, name, nn.LayerNorm(settings["hidden_size"], eps=settings["rms_norm_eps"]))
    model.model.norm = nn.LayerNorm(settings["hidden_size"], eps=settings["rms_norm_eps"])
    return Twin(model, settings, called())


def minicpm(settings: Settings) -> Any:
    """Build Granite with other factors."""
    config = transformers.GraniteConfig(
        **settings,
        embedding_multiplier=settings["scale_emb"],
        residual_multiplier=settings["scale_depth"] / math.sqrt(settings["num_hidden_layers"]),
        attention_multiplier=settings["head_dim"] ** -0.5,
        logits_scaling=settings["hidden_size"] / settings["dim_model_base"],
    )
    return Twin(transformers.GraniteForCausalLM(config), settings, called())


class Mixture(nn.Module):
    """Softmax over all experts, the top k of them, and shared experts."""

    def __init__(self, config: Any, settings: Settings, shared: int, normed: bool) -> None:
        super().__init__()
        inner, count = settings["moe_intermediate_size"], settings["num_experts"]
        self.top, self.normed = settings["num_experts_per_tok"], normed
        self.gate = nn.Linear(config.hidden_size, count, bias=False)
        self.experts = nn.ModuleList(self._one(config, inner) for _ in range(count))
        self.shared_experts = self._one(config, inner * shared)

    def _one(self, config: Any, inner: int) -> nn.Module:
        made = LlamaMLP(type(config)(**(config.to_dict() | {"intermediate_size": inner})))
        for weight in made.parameters():
            nn.init.normal_(weight, std=0.2)
        return made  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        best, ids = self.gate(x).softmax(-1).topk(self.top, -1)
        if self.normed:
            best = best / best.sum(-1, keepdim=True)
        weights = torch.zeros_like(self.gate(x)).scatter(-1, ids, best)
        output = torch.stack([expert(x) for expert in self.experts], -1)
        return (output * weights[..., None, :]).sum(-1) + self.shared_experts(x)  # type: ignore[no-any-return]


def deepseek(settings: Settings) -> Any:
    model = llama(settings)
    settings = settings | {"num_experts": settings["n_routed_experts"]}
    for layer in model.model.layers[settings["first_k_dense_replace"] :]:
        layer.mlp = Mixture(model.config, settings, settings["n_shared_experts"], normed=False)
    return Twin(model, settings, called())


_LING = {"self_attn": "attention", "o_proj": "dense", "embed_tokens": "word_embeddings"}


def bailing(settings: Settings) -> Any:
    model = llama(settings)
    for layer in model.model.layers:
        layer.mlp = Mixture(model.config, settings, settings["num_shared_experts"], normed=True)
    model.lm_head.forward = lambda x: F.linear(x, F.normalize(model.lm_head.weight))
    names = called(**_LING)
    return Twin(model, settings, lambda t: names(fuse_parts(t, QKV, "query_key_value")))


def bailing_v2(settings: Settings) -> Any:
    """Build GLM-4.5."""
    same = {
        "n_routed_experts": settings["num_experts"],
        "n_shared_experts": settings["num_shared_experts"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    }
    config = transformers.Glm4MoeConfig(**settings | same)
    names = called(
        **_LING, q_norm="query_layernorm", k_norm="key_layernorm", e_score_correction_bias="expert_bias"
    )

    def stored(tensors: Tensors) -> Tensors:
        out = {}
        for name, item in names(fuse_parts(tensors, QKV, "query_key_value")).items():
            front, _, last = name.rpartition(".")
            for i, expert in enumerate(item if ".experts." in name else ()):
                if last == "down_proj":
                    out[f"{front}.{i}.down_proj.weight"] = expert
                else:
                    gate, up = expert.chunk(2)
                    out |= {f"{front}.{i}.gate_proj.weight": gate, f"{front}.{i}.up_proj.weight": up}
            if ".experts." not in name:
                out[name] = item
        return out

    return Twin(transformers.Glm4MoeForCausalLM(config), settings, stored)
