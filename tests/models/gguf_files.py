"""Tiny models as GGUF files, as written by llama.cpp's converter."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
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
from gguf_hybrid_files import HYBRID_CONVERSIONS
from numpy.typing import NDArray
from oracle import make_tiny
from torch import Tensor
from twins import Twin
from zoo import SHARED, TIED, Settings, longrope


def _transposed(name: str, values: NDArray[Any], config: Any) -> NDArray[Any]:
    return values.T if ".c_" in name else values


def each_expert(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Split a tensor into single experts, as the first converters wrote Mixtral."""
    pieces = expert_pieces(name, tensor)
    if tensor.ndim < 3:
        return pieces
    layer = name.split(".")[2]
    parts = {name.split(".")[-2].removesuffix("_proj"): piece for name, piece in pieces.items()}
    return {
        f"blk.{layer}.ffn_{part}.{i}.weight": expert
        for part, piece in parts.items()
        for i, expert in enumerate(piece)
    }


def _layer_norms(config: Any) -> dict[str, Any]:
    return {"attention.layer_norm_epsilon": config.rms_norm_eps}


def _gpt_oss_pieces(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Split interleaved gate and up and transpose to outputs first."""
    where, _, part = name.rpartition(".")
    if part == "sinks":
        return {f"{name}.weight": tensor}
    kind = "bias" if part.endswith("_bias") else "weight"
    across = tensor.transpose(1, 2) if tensor.ndim == 3 else tensor
    if part.startswith("gate_up_proj"):
        return {
            f"{where}.{item}_proj.{kind}": across[:, first::2] for first, item in enumerate(("gate", "up"))
        }
    return {f"{where}.down_proj.{kind}" if part.startswith("down_proj") else name: across}


def _one_row_as_a_vector(name: str, values: NDArray[Any], config: Any) -> NDArray[Any]:
    return values[0] if "shared_expert_gate" in name else values


def _apart(name: str, values: NDArray[Any], config: Any) -> NDArray[Any]:
    """Regroup per-head Q, K and V into all queries, all keys and all values."""
    if ".query_key_value." not in name:
        return values
    return values.reshape(config.n_head, 3, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)


def _four_times(config: Any) -> dict[str, Any]:
    """Return sizes that the configurations of Bloom and MPT do not name."""
    return {
        "feed_forward_length": 4 * config.hidden_size,
        "attention.head_count_kv": config.num_attention_heads,
    }


def _mpt_keys(config: Any) -> dict[str, Any]:
    return _four_times(config) | {
        "attention.clamp_kqv": config.attn_config.clip_qkv,
        "attention.max_alibi_bias": float(config.attn_config.alibi_bias_max),
    }


def _falcon_order(name: str, values: NDArray[Any], config: Any) -> NDArray[Any]:
    """Regroup Q, K and V per KV head into all queries, all keys and all values."""
    if ".query_key_value." not in name:
        return values
    keys = getattr(config, "num_kv_heads", config.num_attention_heads)
    dim = config.hidden_size // config.num_attention_heads
    heads = values.reshape(keys, -1, dim, *values.shape[1:])
    parts = heads[:, :-2], heads[:, -2:-1], heads[:, -1:]
    return np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])


def _falcon_keys(config: Any) -> dict[str, Any]:
    return {"feed_forward_length": config.ffn_hidden_size, "attention.head_count_kv": config.num_kv_heads}


def _dbrx_keys(config: Any) -> dict[str, Any]:
    attention, ffn = config.attn_config, config.ffn_config
    return {
        "feed_forward_length": ffn.ffn_hidden_size,
        "attention.head_count_kv": attention.kv_n_heads,
        "attention.clamp_kqv": attention.clip_qkv,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.freq_base": attention.rope_theta if hasattr(attention, "rope_theta") else 10000.0,
        "expert_count": ffn.moe_num_experts,
        "expert_used_count": ffn.moe_top_k,
    }


def _dbrx_pieces(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Split concatenated experts and transpose the last matrix of each."""
    if ".experts.mlp." not in name:
        return {name: tensor}
    item = tensor.view(4, -1, tensor.shape[1])
    return {f"{name}.weight": item.transpose(1, 2) if name.endswith("w2") else item}


def _gpt_oss_keys(config: Any) -> dict[str, Any]:
    return expert_keys(config) | {
        "expert_feed_forward_length": config.intermediate_size,
        "attention.sliding_window": config.sliding_window,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": config.rope_parameters["factor"],
        "rope.scaling.original_context_length": config.rope_parameters["original_max_position_embeddings"],
    }


def _gemma2_keys(config: Any) -> dict[str, Any]:
    return {
        "attention.sliding_window": config.sliding_window,
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
    }


def gemma3_keys(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters["full_attention"]
    keys = {"attention.sliding_window": config.sliding_window, "rope.freq_base": rope["rope_theta"]}
    if rope["rope_type"] == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}
    return keys


def _phi3_keys(config: Any) -> dict[str, Any]:
    scale = config.max_position_embeddings / config.original_max_position_embeddings
    return {
        "rope.scaling.original_context_length": config.original_max_position_embeddings,
        "rope.scaling.attn_factor": np.sqrt(
            1 + np.log(scale) / np.log(config.original_max_position_embeddings)
        ).item(),
        "attention.sliding_window": config.sliding_window or 0,
    }


def _phi3_tensors(config: Any) -> dict[str, Any]:
    return {f"rope_factors_{kind}": config.rope_parameters[f"{kind}_factor"] for kind in ("short", "long")}


HEAD_DIM = SHARED["head_dim"]
SIX_LAYERS: Settings = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    },
}
FOUR_LAYERS = ["sliding_attention"] * 3 + ["full_attention"]
EXACT = (
    ".bias",
    "ffn_gate_inp.weight",
    "ffn_gate_inp_shexp.weight",
    "ssm_conv1d.weight",
    "shortconv.conv.weight",
    "attn_k_b.weight",
)
"""Tensors that the converter never packs, besides vectors."""
ADD = {
    bool: GGUFWriter.add_bool,
    int: GGUFWriter.add_uint32,
    float: GGUFWriter.add_float32,
    str: GGUFWriter.add_string,
    list: GGUFWriter.add_array,
}
EPSILONS = {
    "rms_norm_eps": "layer_norm_rms_epsilon",
    "layer_norm_eps": "layer_norm_epsilon",
    "layer_norm_epsilon": "layer_norm_epsilon",
    "norm_epsilon": "layer_norm_epsilon",
    "norm_eps": "layer_norm_epsilon",
}
"""Names of values in configurations and their names in headers."""
CONVERSIONS = {
    "arcee": Conversion(change=interleaved),
    "bloom": Conversion(
        keys=_four_times,
        change=_apart,
        pieces=lambda name, tensor: {name.removeprefix("transformer."): tensor},
    ),
    "BaiChuanForCausalLM": Conversion("baichuan", change=interleaved),
    "BaichuanForCausalLM": Conversion(
        "baichuan", settings={"num_hidden_layers": 40, "initializer_range": 0.1}, change=interleaved
    ),
    "glm": Conversion("chatglm"),
    "chatglm": Conversion(
        pieces=lambda name, tensor: {name.removeprefix("transformer."): tensor}, as_stored=True
    ),
    "dbrx": Conversion(keys=_dbrx_keys, pieces=_dbrx_pieces),
    "dots1": Conversion(keys=sharing_keys, pieces=sharing_pieces),
    "falcon": Conversion(
        keys=_falcon_keys, change=_falcon_order, settings=TIED | {"num_kv_heads": 1, "multi_query": True}
    ),
    "gemma": Conversion(change=plus_one),
    "glm4_moe": Conversion(
        "glm4moe",
        lambda config: sharing_keys(config) | {"block_count": 3, "nextn_predict_layers": 1},
        lambda config: {"blk.2.nextn.enorm": [1.0], "blk.2.attn_norm": [1.0]},
        pieces=sharing_pieces,
    ),
    "gpt_bigcode": Conversion("starcoder", lambda config: {"attention.head_count_kv": 1}, settings=TIED),
    "gpt_neox": Conversion(
        "gptneox",
        lambda config: {"use_parallel_residual": config.use_parallel_residual},
        change=_falcon_order,
    ),
    "olmo": Conversion(
        keys=lambda config: {
            "attention.layer_norm_epsilon": 1e-5,
            "attention.clamp_kqv": config.clip_qkv,
        },
        change=interleaved,
        settings={"clip_qkv": 0.5},
    ),
    "phi": Conversion("phi2"),
    "stablelm": Conversion(keys=lambda config: {"use_parallel_residual": config.use_parallel_residual}),
    "ernie4_5": Conversion(),
    "exaone": Conversion(settings={"rope_parameters": None}),
    "granitemoe": Conversion(
        keys=lambda config: granite_keys(config) | expert_keys(config),
        change=interleaved,
        pieces=granite_pieces,
    ),
    "internlm2": Conversion(change=interleaved),
    "minicpm": Conversion(keys=granite_keys, change=interleaved),
    "mpt": Conversion(keys=_mpt_keys, settings={"attn_config": {"clip_qkv": 0.5}}),
    "olmoe": Conversion(keys=expert_keys, pieces=expert_pieces),
    "orion": Conversion(keys=_layer_norms),
    "cohere": Conversion("command-r", lambda config: {"logit_scale": config.logit_scale}, settings=TIED),
    "cohere2": Conversion(
        keys=lambda config: {
            "logit_scale": config.logit_scale,
            "attention.sliding_window": config.sliding_window,
        },
        settings=TIED | {"num_hidden_layers": 4, "layer_types": FOUR_LAYERS},
    ),
    "gemma2": Conversion(keys=_gemma2_keys, settings={"query_pre_attn_scalar": HEAD_DIM}, change=plus_one),
    "gemma3_text": Conversion(
        "gemma3", gemma3_keys, settings=SIX_LAYERS | {"query_pre_attn_scalar": HEAD_DIM}, change=plus_one
    ),
    "glm4": Conversion(),
    "gpt_oss": Conversion("gpt-oss", _gpt_oss_keys, pieces=_gpt_oss_pieces),
    "gpt2": Conversion(change=_transposed),
    "granite": Conversion(keys=granite_keys, change=interleaved),
    "llama": Conversion(change=interleaved),
    "mixtral": Conversion("llama", expert_keys, change=interleaved, pieces=expert_pieces),
    "nemotron": Conversion(change=plus_one),
    "olmo2": Conversion(),
    "phi3": Conversion(keys=_phi3_keys, tensors=_phi3_tensors, settings=longrope(original=8)),
    "qwen2": Conversion(),
    "qwen2_moe": Conversion("qwen2moe", expert_keys, change=_one_row_as_a_vector, pieces=expert_pieces),
    "qwen3": Conversion(),
    "qwen3_moe": Conversion("qwen3moe", expert_keys, pieces=expert_pieces),
    "seed_oss": Conversion(),
    "smollm3": Conversion(
        settings={"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}, change=interleaved
    ),
    "starcoder2": Conversion(),
} | HYBRID_CONVERSIONS
"""Conversions by model_type."""


def make_tiny_gguf(family: str, tmp_path: Path, kind: str = "F32", **overrides: Any) -> tuple[Path, Any]:
    """Write the zoo's model as a file and return it with its transformers model."""
    _, hf_model = make_tiny(family, tmp_path, **(CONVERSIONS[family].settings | overrides))
    return write_gguf(tmp_path / "m.gguf", hf_model, kind, family), hf_model


def _shared_keys(config: Any) -> dict[str, Any]:
    heads, rope = config.num_attention_heads, getattr(config, "rope_parameters", {})
    head_dim = getattr(config, "head_dim", config.hidden_size // heads)
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None) or config.n_inner,
        "attention.head_count": heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", heads),
        "attention.key_length": head_dim,
        "rope.freq_base": rope.get("rope_theta"),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
    }
    for epsilon in [name for name in EPSILONS if hasattr(config, name)][:1]:
        keys[f"attention.{EPSILONS[epsilon]}"] = getattr(config, epsilon)
    return {key: value for key, value in keys.items() if value is not None}


def write_gguf(path: Path, hf_model: Any, kind: str = "F32", family: str = "") -> Path:
    """Write the tiny model as a GGUF file with matrices of type `kind`; `hf_model` gets the rounded values.

    The family is that of its configuration unless another is passed.
    """
    from gguf.constants import MODEL_ARCH_NAMES, GGMLQuantizationType
    from gguf.quants import dequantize, quantize
    from gguf.tensor_mapping import get_tensor_name_map

    twin, hf_model = hf_model, hf_model.model if isinstance(hf_model, Twin) else hf_model
    config = hf_model.config
    family = family or config.model_type
    conversion = CONVERSIONS[family]
    tensors = dict(hf_model.named_parameters())
    tensors |= {
        name: item for name, item in hf_model.state_dict().items() if name in dict(hf_model.named_buffers())
    }
    tensors = conversion.gather(tensors)
    if conversion.as_stored:
        tensors = twin.stored(tensors)
    arch = conversion.architecture or family
    writer = GGUFWriter(path, arch)
    own_keys = conversion.keys(config)  # may make values of layers readable
    for key, value in (_shared_keys(config) | own_keys).items():
        ADD[type(value)](writer, f"{arch}.{key}", value)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    enum = next(enum for enum, name in MODEL_ARCH_NAMES.items() if name == arch)
    names = get_tensor_name_map(enum, config.num_hidden_layers)
    for full, parameter in tensors.items():
        for name, piece in conversion.pieces(full, parameter.data).items():
            stored_as = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if name.startswith("blk."):
                stored_as = name
            assert stored_as is not None, f"the converter has no name for {name}"
            values = np.ascontiguousarray(piece.numpy())
            exact = values.ndim == 1 or stored_as.endswith(EXACT) or values.shape[-1] % 32 != 0
            packed_as = GGMLQuantizationType["F32" if exact else kind]
            # Rows are packed independently, so that permuting and packing rows commute.
            rounded = dequantize(quantize(values, packed_as), packed_as).astype(np.float32)
            stored = np.ascontiguousarray(conversion.change(name, values, config))
            piece.copy_(torch.from_numpy(rounded))
            writer.add_tensor(stored_as, quantize(stored, packed_as), raw_dtype=packed_as)
    for name, numbers in conversion.tensors(config).items():
        writer.add_tensor(f"{name}.weight", np.array(numbers, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
