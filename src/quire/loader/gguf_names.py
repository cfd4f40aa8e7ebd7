"""Names of tensors in GGUF files and in Hugging Face checkpoints, and the order of their rows."""

import re
from functools import cache

import numpy as np
from numpy.typing import NDArray

from quire.checkpoint.facts import ArchFacts
from quire.layers.scope import DecoderNames
from quire.models import MODELS

_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_FUSED_GATE = {"ffn_up": "mlp.gate_up_proj"}
_GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_CHOICE_BIAS = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_SHARED_EXPERTS = _CHOICE_BIAS | {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_GEMMA_PER_LAYER = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_DELTA = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_LFM2 = {
    "token_embd_norm": "model.embedding_norm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}


def _mamba2(name: str) -> dict[str, str]:
    """Return a table from the GGUF tensor names of Mamba-2 layers to those of Hugging Face, where the mixer
    has the name `name`."""
    return {
        "ssm_in": f"{name}.in_proj",
        "ssm_conv1d": f"{name}.conv1d",
        "ssm_dt.bias": f"{name}.dt_bias",
        "ssm_a": f"{name}.A_log",
        "ssm_d": f"{name}.D",
        "ssm_norm": f"{name}.norm",
        "ssm_out": f"{name}.out_proj",
    }


LARGE_FALCON = "FalconForCausalLM, large"
"""Key in `_OTHER_NAMES` for Falcon models with separate norms of attention and MLP; in their files
`attn_norm` is the norm of the MLP."""
_OTHER_NAMES: dict[str, dict[str, str]] = {
    "BloomForCausalLM": {"token_embd_norm": "transformer.word_embeddings_layernorm"},
    LARGE_FALCON: {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"},
    "DbrxForCausalLM": {"attn_output_norm": "norm_attn_norm.norm_2"},
    "DeepseekV3ForCausalLM": _SHARED_EXPERTS
    | {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.k_b_proj",
        "attn_v_b": "self_attn.v_b_proj",
    },
    "Dots1ForCausalLM": _SHARED_EXPERTS,
    "Glm4MoeForCausalLM": _SHARED_EXPERTS | {"post_attention_norm": "post_attention_layernorm"},
    "GlmForCausalLM": _FUSED_GATE,
    "Gemma3nForCausalLM": _GEMMA
    | _GEMMA_PER_LAYER
    | {
        "altup_proj": "model.altup_projections",
        "altup_unembd_proj": "model.altup_unembed_projections",
        "altup_correct_coef": "altup.correction_coefs",
        "altup_correct_scale.weight": "altup.correct_output_scale",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    },
    "Gemma4ForCausalLM": _GEMMA
    | _GEMMA_PER_LAYER
    | {
        "layer_output_scale.weight": "layer_scalar",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_gate_exps": "experts.gate_proj",
        "ffn_up_exps": "experts.up_proj",
        "ffn_gate_up_exps": "experts.gate_up_proj",
        "ffn_down_exps": "experts.down_proj",
        "ffn_down_exps.scale": "router.per_expert_scale",
    },
    "Glm4ForCausalLM": _FUSED_GATE,
    "GptOssForCausalLM": {
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks.weight": "self_attn.sinks",
    },
    "GraniteMoeHybridForCausalLM": _mamba2("mamba")
    | {
        "ffn_gate": "shared_mlp.gate_proj",
        "ffn_up": "shared_mlp.up_proj",
        "ffn_down": "shared_mlp.down_proj",
    },
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": _LFM2 | _CHOICE_BIAS,
    "MiniMaxM2ForCausalLM": _CHOICE_BIAS,
    "NemotronHForCausalLM": _mamba2("mixer")
    | {
        "attn_norm": "norm",
        "attn_q": "mixer.q_proj",
        "attn_k": "mixer.k_proj",
        "attn_v": "mixer.v_proj",
        "attn_output": "mixer.o_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        "ffn_gate_inp": "mixer.gate",
        "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
        "ffn_up_exps": "mixer.experts.up_proj",
        "ffn_down_exps": "mixer.experts.down_proj",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
    },
    "Olmo2ForCausalLM": {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "Phi3ForCausalLM": _FUSED_GATE,
    "Qwen3_5ForCausalLM": _DELTA,
    "Qwen3_5MoeForCausalLM": _DELTA,
    "SeedOssForCausalLM": {"post_attention_norm": "post_attention_layernorm"},
}
"""Maps GGUF tensor names to those of Hugging Face, by architecture, where these do not follow from the
model's `DecoderNames`."""
_NAME = re.compile(r"(?:blk\.(\d+)\.)?([\w.]+?)(?:\.(weight|bias|scale))?")
_EXPERT = re.compile(r"(blk\.\d+\.ffn_\w+)\.(\d+)\.weight")
"""Name of a tensor that holds a single expert, as in early files."""
_INTERLEAVED = (
    "ArceeForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "LlamaForCausalLM",
    "MiniCPMForCausalLM",
    "OlmoForCausalLM",
    "SmolLM3ForCausalLM",
)
"""Architectures whose GGUF files, unlike other checkpoints, interleave the halves of query and key heads, for
RoPE on adjacent pairs."""

_BY_HEAD = ("BloomForCausalLM", "FalconForCausalLM", "GPTNeoXForCausalLM")
"""Architectures whose GGUF files store the queries of all heads, then all keys, then all values; other
checkpoints store query, key and value head by head."""


@cache
def _names_of(architecture: str) -> dict[str, str]:
    """Return a table from the GGUF tensor names of an architecture to those of Hugging Face, without
    `.weight` or `.bias`."""
    names: DecoderNames = MODELS[architecture.partition(",")[0]].names
    mlp_parts = ("ffn_gate", "ffn_up", "ffn_down")[-len(names.mlp_names) :]
    mlp = f"{names.mlp}." if names.mlp else ""
    attention = {
        "attn_q": "q_proj",
        "attn_k": "k_proj",
        "attn_v": "v_proj",
        "attn_qkv": names.qkv,
        "attn_output": names.out,
        "attn_q_norm": names.qk_norms[0],
        "attn_k_norm": names.qk_norms[1],
    }
    return {
        "blk": f"{names.body}.{names.layers}",
        "token_embd": f"{names.body}.{names.embedding}",
        "position_embd": f"{names.body}.{names.positions}",
        "output_norm": f"{names.body}.{names.last_norm}",
        "output": names.head,
        **dict(zip(("attn_norm", "ffn_norm"), names.norms, strict=False)),
        **dict(zip(("post_attention_norm", "post_ffw_norm"), names.after_norms, strict=False)),
        **{part: f"{names.attention}.{name}" for part, name in attention.items()},
        **{part: mlp + name for part, name in zip(mlp_parts, names.mlp_names, strict=True)},
        **_EXPERTS,
        **_OTHER_NAMES.get(architecture, {}),
    }


def hf_name(name: str, architecture: str) -> str:
    """Map blk.3.attn_q.weight to model.layers.3.self_attn.q_proj.weight; unknown names stay."""
    if expert := _EXPERT.fullmatch(name):
        merged = hf_name(f"{expert[1]}_exps.weight", architecture)
        return merged.replace(".experts.", f".experts.{expert[2]}.")
    names = _names_of(architecture)
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    number, part, kind = match.groups()
    layer = "" if number is None else f"{names['blk']}.{number}."
    name_of_part = part if kind is None else f"{part}.{kind}"
    if name_of_part in names:
        return f"{layer}{names[name_of_part]}"
    return f"{layer}{names[part]}.{kind}" if part in names else name


def gguf_name(name: str, architecture: str) -> str | None:
    """Return the GGUF name of a Hugging Face tensor name; None if files have no such tensor."""
    names = _names_of(architecture)
    where, _, kind = name.rpartition(".")
    layer, _, part = where.removeprefix(f"{names['blk']}.").partition(".")
    is_in_layer = where.startswith(f"{names['blk']}.")
    stored = next((key for key, known in names.items() if known == (part if is_in_layer else where)), None)
    if stored is None or kind not in ("weight", "bias"):
        return None
    return f"blk.{layer}.{stored}.{kind}" if is_in_layer else f"{stored}.{kind}"


def row_order(name: str, num_rows: int, facts: ArchFacts) -> NDArray[np.intp] | None:
    """Return the index of the stored row for each row of the model's tensor; None if both orders agree."""
    if facts.architecture in _BY_HEAD and ".query_key_value." in name:
        rows, dim = np.arange(num_rows), facts.head_dim
        parts = np.split(rows, (facts.heads * dim, (facts.heads + facts.kv_heads) * dim))
        return np.concatenate([part.reshape(facts.kv_heads, -1) for part in parts], 1).reshape(-1)
    if facts.architecture not in _INTERLEAVED or not re.search(r"self_attn\.[qk]_proj\.(weight|bias)", name):
        return None
    heads = facts.heads if ".q_proj." in name else facts.kv_heads
    return np.arange(num_rows).reshape(heads, num_rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
