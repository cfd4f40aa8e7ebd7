"""Steps of llama.cpp's converter that several architectures share."""

from collections.abc import Callable
from typing import Any, NamedTuple

from numpy.typing import NDArray
from torch import Tensor
from zoo import Settings


class Conversion(NamedTuple):
    """The converter's steps for one architecture, in addition to the common ones."""

    architecture: str = ""
    """llama.cpp's name of the architecture, if it is not the model_type."""
    keys: Callable[[Any], dict[str, Any]] = lambda config: {}
    """Additional header keys from the model's configuration."""
    tensors: Callable[[Any], dict[str, Any]] = lambda config: {}
    """Additional tensors."""
    settings: Settings = {}
    """Settings that a model must have because files do not store them."""
    change: Callable[[str, NDArray[Any], Any], NDArray[Any]] = lambda name, values, config: values
    """Transforms a tensor, by its Hugging Face name, for storage."""
    pieces: Callable[[str, Tensor], dict[str, Tensor]] = lambda name, tensor: {name: tensor}
    """Splits a tensor into views that are stored separately."""
    gather: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda tensors: tensors
    """Joins tensors that are stored as one."""
    as_stored: bool = False
    """Whether the converter reads the makers' checkpoint instead of the transformers one."""


def interleaved(name: str, values: NDArray[Any], config: Any) -> NDArray[Any]:
    """Interleave the halves of each query and key head."""
    if ".q_proj." not in name and ".k_proj." not in name:
        return values
    heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def plus_one(name: str, values: NDArray[Any], config: Any) -> NDArray[Any]:
    return values + 1 if name.endswith("norm.weight") else values


def expert_pieces(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Split gate and up, which are concatenated for each expert."""
    where, _, part = name.rpartition(".")
    if part == "gate_up_proj":
        gate, up = tensor.chunk(2, dim=1)
        return {f"{where}.gate_proj.weight": gate, f"{where}.up_proj.weight": up}
    return {f"{name}.weight" if part == "down_proj" else name: tensor}


def granite_pieces(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Rename the tensors to the converter's names."""
    pieces = expert_pieces(name.replace("block_sparse_moe.router", "mlp.gate"), tensor)
    return {name.replace("block_sparse_moe", "mlp"): piece for name, piece in pieces.items()}


def sharing_keys(config: Any) -> dict[str, Any]:
    return {
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_group_count": config.n_group,
        "expert_group_used_count": config.topk_group,
        "leading_dense_block_count": 1,
    }


def sharing_pieces(name: str, tensor: Tensor) -> dict[str, Tensor]:
    return expert_pieces(name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor)


def expert_keys(config: Any) -> dict[str, Any]:
    keys = {
        "expert_count": getattr(config, "num_experts", None) or config.num_local_experts,
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        "expert_shared_feed_forward_length": getattr(config, "shared_expert_intermediate_size", None),
    }
    return {key: value for key, value in keys.items() if value is not None}


def granite_keys(config: Any) -> dict[str, Any]:
    return {
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "attention.scale": config.attention_multiplier,
        "logit_scale": config.logits_scaling,
    }
