"""Conversions of hybrid, latent and newer families, as llama.cpp's converter does them."""

from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from gguf_conversion import (
    Conversion,
    expert_keys,
    expert_pieces,
    granite_keys,
    granite_pieces,
    interleaved,
    plus_one,
    sharing_keys,
    sharing_pieces,
)
from numpy.typing import NDArray
from torch import Tensor
from zoo import TIED, rope

_YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


def _squeezed(name: str, values: NDArray[Any], config: Any) -> NDArray[Any]:
    """Store convolutions without their axis of 1, and decay rates as the rates themselves."""
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return values[:, 0]
    return -np.exp(values) if name.endswith(".A_log") else values


def _delta_keys(config: Any) -> dict[str, Any]:
    keys = {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "full_attention_interval": 2,
    }
    return keys | (expert_keys(config) if hasattr(config, "num_experts") else {})


def _delta_change(name: str, values: NDArray[Any], config: Any) -> NDArray[Any]:
    """Add 1 to norms, except that of the gated delta rule."""
    if name.endswith("linear_attn.norm.weight"):
        return values
    values = values[0] if "shared_expert_gate" in name else values
    return plus_one(name, _squeezed(name, values, config), config)


def _delta_pieces(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if name.endswith(".dt_bias"):
        return {name.replace("dt_bias", "dt_proj.bias"): tensor}
    return expert_pieces(name, tensor)


def _next_pieces(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Separate qkv and z, which are grouped by key head: 2 groups of 16, 16, 2 x 8 and 2 x 8 rows."""
    if not name.endswith("in_proj_qkvz.weight"):
        return _delta_pieces(name, tensor)
    layer = name.split(".")[2]
    *qkv, z = (part.flatten(0, 1) for part in tensor.view(2, -1, tensor.shape[1]).split([16] * 4, 1))
    return {f"blk.{layer}.attn_qkv.weight": torch.cat(qkv), f"blk.{layer}.attn_gate.weight": z}


def _tiled_change(name: str, values: NDArray[Any], config: Any) -> NDArray[Any]:
    """Sort value heads by their number within a key head, first."""
    values = _delta_change(name, values, config)
    if ".linear_attn." not in name:
        return values
    groups, heads = config.linear_num_key_heads, config.linear_num_value_heads
    dim, keys = config.linear_value_head_dim, groups * config.linear_key_head_dim

    def tile(part: NDArray[Any]) -> NDArray[Any]:
        size = len(part) // heads
        return part.reshape(groups, heads // groups, size, -1).swapaxes(0, 1).reshape(part.shape)

    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        return np.concatenate((values[: 2 * keys], tile(values[2 * keys :])))
    if name.endswith("out_proj.weight"):
        assert values.shape[1] == heads * dim
        return tile(np.ascontiguousarray(values.T)).T
    return values if name.endswith("norm.weight") else tile(values)


def _latent_keys(config: Any) -> dict[str, Any]:
    latent, rope_dim = config.kv_lora_rank, config.qk_rope_head_dim
    keys = sharing_keys(config) | {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + rope_dim,
        "attention.value_length": latent,
        "attention.key_length_mla": config.qk_nope_head_dim + rope_dim,
        "attention.value_length_mla": config.v_head_dim,
        "expert_gating_func": 2,
        "rope.dimension_count": rope_dim,
    }
    if config.q_lora_rank:
        keys["attention.q_lora_rank"] = config.q_lora_rank
    if config.rope_parameters["rope_type"] == "yarn":
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": config.rope_parameters["factor"],
            "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_log_multiplier": 0.1 * config.rope_parameters["mscale_all_dim"],
        }
    return keys


def whole_head_keys(config: Any) -> dict[str, Any]:
    """Return the header of DeepSeek-V2 in files from before the split of kv_b: sizes of whole heads."""
    keys = _latent_keys(config) | {
        "attention.head_count_kv": config.num_attention_heads,
        "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length": config.v_head_dim,
    }
    dropped = ("attention.key_length_mla", "attention.value_length_mla", "expert_gating_func")
    return {key: value for key, value in keys.items() if key not in dropped}


def _latent_pieces(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Separate keys and values of the 4 heads, of 16 and 12 rows."""
    if not name.endswith("kv_b_proj.weight"):
        return sharing_pieces(name, tensor)
    keys, values = tensor.view(4, -1, tensor.shape[1]).split([16, 12], 1)
    return {name.replace("kv_b", "k_b"): keys, name.replace("kv_b", "v_b"): values}


def _latent_change(name: str, values: NDArray[Any], config: Any) -> NDArray[Any]:
    return values.swapaxes(1, 2) if ".k_b_proj." in name else values


def _kv_heads(config: Any) -> list[int]:
    """Return the number of key/value heads of each layer, 0 for layers without attention."""
    kinds = getattr(config, "layer_types", None) or config.layers_block_type
    return [config.num_key_value_heads if kind in ("full_attention", "attention") else 0 for kind in kinds]


def _lfm2_keys(config: Any) -> dict[str, Any]:
    keys = {
        "attention.head_count_kv": _kv_heads(config),
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "shortconv.l_cache": config.conv_L_cache,
    }
    if hasattr(config, "num_experts"):
        return keys | expert_keys(config) | {"leading_dense_block_count": config.num_dense_layers}
    inner, unit = 2 * config.intermediate_size // 3, config.block_multiple_of
    return keys | {"feed_forward_length": -(-inner // unit) * unit}


def _lfm2_pieces(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if name.endswith(".expert_bias"):
        return {f"{name}.bias": tensor}
    pieces = expert_pieces(name, tensor)
    if ".experts." not in name:
        return pieces
    renamed = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    out = {}
    for name, piece in pieces.items():
        where, part, _ = name.removeprefix("model.").rsplit(".", 2)
        out[f"{where}.{renamed[part]}.weight"] = piece
    return out


def _mamba2_keys(config: Any) -> dict[str, Any]:
    heads = config.mamba_n_heads
    return {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
        "ssm.time_step_rank": heads,
        "attention.head_count_kv": _kv_heads(config),
    }


def _granite_hybrid_keys(config: Any) -> dict[str, Any]:
    keys = granite_keys(config) | _mamba2_keys(config)
    keys["rope.scaling.finetuned"] = config.position_embedding_type == "rope"
    keys["expert_shared_feed_forward_length"] = config.shared_intermediate_size
    return keys | (expert_keys(config) if config.num_local_experts else {})


def _mamba2_change(name: str, values: NDArray[Any], config: Any) -> NDArray[Any]:
    """Store A and D as columns, and norms by group."""
    if name.endswith((".A_log", ".D")):
        return _squeezed(name, values, config)[:, None]
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        groups = getattr(config, "mamba_n_groups", None) or config.n_groups
        return values.reshape(groups, -1)
    return interleaved(name, _squeezed(name, values, config), config)


def _granite_hybrid_pieces(name: str, tensor: Tensor, shared: str = "") -> dict[str, Tensor]:
    """Split the gate and up of the only feed-forward part, or of the shared expert."""
    if ".shared_mlp." in name:
        parts = {"down": tensor}
        if "input_linear" in name:
            parts = dict(zip(("gate", "up"), tensor.chunk(2), strict=True))
        return {f"blk.{name.split('.')[2]}.ffn_{part}{shared}.weight": piece for part, piece in parts.items()}
    return granite_pieces(name.replace("dt_bias", "dt_proj.bias"), tensor)


def _nemotron_keys(config: Any) -> dict[str, Any]:
    kinds = config.layers_block_type
    inner = [config.moe_intermediate_size if kind == "moe" else 0 for kind in kinds]
    if "moe" not in kinds:
        inner = [config.intermediate_size if kind == "mlp" else 0 for kind in kinds]
    keys = {
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "attention.head_count_kv": _kv_heads(config),
        "feed_forward_length": inner,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.time_step_rank": config.mamba_num_heads,
    }
    if "moe" not in kinds:
        return keys
    shared = config.moe_shared_expert_intermediate_size
    names = ("expert_count", "expert_used_count", "expert_feed_forward_length", "expert_weights_scale")
    experts = sharing_keys(config)
    return keys | {key: experts[key] for key in names} | {"expert_shared_feed_forward_length": shared}


def _nemotron_pieces(name: str, tensor: Tensor) -> dict[str, Tensor]:
    name = name.replace("model.", "backbone.", 1)
    if name.endswith(".dt_bias"):
        return {name.replace("dt_bias", "dt_proj.bias"): tensor}
    if ".mixer.experts." in name:
        return {f"blk.{name.split('.')[2]}.ffn_{name.rsplit('.', 1)[1][:-5]}_exps.weight": tensor}
    return {name.replace("e_score_correction_bias", "e_score_correction.bias"): tensor}


def _gemma3n_keys(config: Any) -> dict[str, Any]:
    deviations = [
        NormalDist().inv_cdf(part) if part else -np.inf for part in config.activation_sparsity_pattern
    ]
    return {
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "activation_sparsity_scale": [float(number) for number in deviations],
        "altup.active_idx": config.altup_active_idx,
        "altup.num_inputs": config.altup_num_inputs,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "feed_forward_length": list(config.intermediate_size),
        "final_logit_softcapping": config.final_logit_softcapping,
        "rope.freq_base": config.rope_parameters["full_attention"]["rope_theta"],
    }


def _gemma3n_gather(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack the projections of the hidden states."""
    out = {name: tensor for name, tensor in tensors.items() if "_projections." not in name}
    for name in ("altup_projections", "altup_unembed_projections"):
        parts = [tensor.data for full, tensor in tensors.items() if f"model.{name}." in full]
        out[f"model.{name}.weight"] = torch.stack(parts)
    return out


def _gemma_pieces(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Add the suffix of weights to factors."""
    if name.endswith("router.scale"):
        return {f"blk.{name.split('.')[2]}.ffn_gate_inp.scale": tensor}
    if name.endswith("per_expert_scale"):
        return {f"blk.{name.split('.')[2]}.ffn_down_exps.scale": tensor}
    bare = name.endswith(("_scale", "layer_scalar")) or (".experts." in name and not name.endswith(".weight"))
    return {f"{name}.weight" if bare else name: tensor}


def _gemma4_keys(config: Any) -> dict[str, Any]:
    config.allow_global_per_layer_attribute_access = True
    local = [kind == "sliding_attention" for kind in config.layer_types]
    layers = [config.per_layer_config[at] for at in range(len(local))]
    full_dim, first = layers[-1].head_dim, len(local) - config.num_kv_shared_layers
    inner, ropes = config.intermediate_size, config.rope_parameters
    keys = {
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": local,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "attention.key_length": full_dim,
        "attention.value_length": full_dim,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "attention.head_count_kv": [layer.num_key_value_heads for layer in layers],
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input or 0,
        "final_logit_softcapping": config.final_logit_softcapping,
        "rope.freq_base": ropes["full_attention"]["rope_theta"],
        "rope.freq_base_swa": ropes["sliding_attention"]["rope_theta"],
        "rope.dimension_count": full_dim,
        "rope.dimension_count_swa": config.head_dim,
    }
    if config.use_double_wide_mlp:
        keys["feed_forward_length"] = [inner if at < first else 2 * inner for at in range(len(local))]
    if config.enable_moe_block:
        experts = expert_keys(config) | {"expert_feed_forward_length": config.moe_intermediate_size}
        keys |= experts | {"expert_used_count": config.top_k_experts}
    return {key: value for key, value in keys.items() if value is not None}


def _gemma4_tensors(config: Any) -> dict[str, Any]:
    """Return factors that stop the frequencies that do not rotate."""
    half = config.per_layer_config[config.num_hidden_layers - 1].head_dim // 2
    rotated = int(half * config.rope_parameters["full_attention"].get("partial_rotary_factor", 1.0))
    return {"rope_freqs": [1.0] * rotated + [1e30] * (half - rotated)}


def _minimax_pieces(name: str, tensor: Tensor) -> dict[str, Tensor]:
    name = name.replace("mlp.e_score_correction_bias", "block_sparse_moe.e_score_correction.bias")
    return expert_pieces(name, tensor)


_NEMOTRON_DENSE = ["linear_attention", "mlp", "full_attention", "mlp"]
_NEMOTRON_SPARSE = ["linear_attention", "moe", "full_attention", "moe"]
HYBRID_CONVERSIONS = {
    "qwen3_next": Conversion(
        "qwen3next",
        _delta_keys,
        change=_delta_change,
        pieces=_next_pieces,
        settings={"mlp_only_layers": []},
    ),
    "qwen3_5_text": Conversion("qwen35", _delta_keys, change=_tiled_change, pieces=_delta_pieces),
    "qwen3_5_moe_text": Conversion(
        "qwen35moe",
        lambda config: _delta_keys(config) | {"block_count": 4, "nextn_predict_layers": 1},
        lambda config: {"blk.3.nextn.enorm": [1.0], "blk.3.attn_norm": [1.0]},
        change=_tiled_change,
        pieces=_delta_pieces,
    ),
    "deepseek_v2": Conversion(
        "deepseek2",
        whole_head_keys,
        pieces=sharing_pieces,
        settings={"norm_topk_prob": False, "q_lora_rank": None},
    ),
    "deepseek_v3": Conversion(
        "deepseek2",
        _latent_keys,
        pieces=_latent_pieces,
        change=_latent_change,
        settings=rope("yarn", mscale=0.8, mscale_all_dim=0.8, **_YARN),
    ),
    "lfm2": Conversion(keys=_lfm2_keys, change=_squeezed),
    "lfm2_moe": Conversion(
        "lfm2moe",
        _lfm2_keys,
        change=_squeezed,
        pieces=_lfm2_pieces,
        settings=TIED | {"routed_scaling_factor": 1.0},
    ),
    "granitemoehybrid": Conversion(
        "granitehybrid", _granite_hybrid_keys, change=_mamba2_change, pieces=_granite_hybrid_pieces
    ),
    "nemotron_h": Conversion(
        keys=_nemotron_keys,
        change=_mamba2_change,
        pieces=_nemotron_pieces,
        settings={"time_step_min": 0.001, "layers_block_type": _NEMOTRON_DENSE},
    ),
    "gemma3n_text": Conversion(
        "gemma3n", _gemma3n_keys, pieces=_gemma_pieces, gather=_gemma3n_gather, settings=TIED
    ),
    "gemma4_text": Conversion("gemma4", _gemma4_keys, _gemma4_tensors, pieces=_gemma_pieces),
    "minimax_m2": Conversion(
        "minimax-m2",
        lambda config: expert_keys(config) | {"expert_feed_forward_length": config.intermediate_size},
        pieces=_minimax_pieces,
    ),
}
"""Conversions by model_type."""
NEMOTRON_MOE = HYBRID_CONVERSIONS["nemotron_h"]._replace(
    architecture="nemotron_h_moe",
    settings={"time_step_min": 0.001, "layers_block_type": _NEMOTRON_SPARSE},
)


def _bamba_pieces(name: str, tensor: Tensor) -> dict[str, Tensor]:
    return {name.replace("dt_bias", "dt_proj.bias"): tensor}


def _bamba_keys(config: Any) -> dict[str, Any]:
    attending = [at in config.attn_layer_indices for at in range(config.num_hidden_layers)]
    kv_heads = [config.num_key_value_heads if attends else 0 for attends in attending]
    sizes = {"attention.head_count_kv": kv_heads, "rope.dimension_count": 8, "rope.scaling.finetuned": True}
    return _mamba2_keys(config) | sizes


bamba = Conversion("granitehybrid", _bamba_keys, change=_mamba2_change, pieces=_bamba_pieces)
granite_experts = HYBRID_CONVERSIONS["granitemoehybrid"]._replace(
    pieces=partial(_granite_hybrid_pieces, shared="_shexp")
)
old_qwen3next = HYBRID_CONVERSIONS["qwen3_next"]._replace(
    pieces=lambda name, tensor: (
        {f"blk.{name.split('.')[2]}.ssm_in.weight": tensor}
        if "in_proj_qkvz" in name
        else _delta_pieces(name, tensor)
    )
)
"""Qwen3-Next before qkv and z were stored separately."""
fused_experts = HYBRID_CONVERSIONS["qwen3_5_moe_text"]._replace(
    pieces=lambda name, tensor: (
        {f"blk.{name.split('.')[2]}.ffn_gate_up_exps.weight": tensor}
        if name.endswith("experts.gate_up_proj")
        else _delta_pieces(name, tensor)
    )
)
"""Experts with gate and up in one tensor, which the converter can write for any family."""
