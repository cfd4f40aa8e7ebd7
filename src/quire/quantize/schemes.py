"""Round-to-nearest quantization: the tensors of compressed-tensors, and their config.json entry."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Parts = dict[str, Tensor]
"""Stored tensors of one weight, by the suffix that replaces `weight` in the tensor name."""
_LARGEST_FP8 = 448.0


@dataclass(frozen=True, slots=True)
class RoundingScheme:
    """Rounding and storage of the weights of linear layers."""

    format: str
    """Name of the format in compressed-tensors."""
    pack: Callable[[Tensor, int, torch.dtype], Parts]
    """Packs a float32 weight [outputs, inputs], given the group size and the dtype of scales."""
    bits: int
    kind: Literal["float", "int"]
    grouped: bool = False
    """Whether groups of inputs share a scale; otherwise each output has one."""
    dynamic: bool = True
    """Whether activations are quantized as well, dynamically per token."""

    def config(self, group: int, ignore: list[str]) -> dict[str, Any]:
        """Return the quantization_config of config.json."""
        numbers = {"num_bits": self.bits, "type": self.kind, "symmetric": True}
        granularity = {"strategy": "group", "group_size": group} if self.grouped else {"strategy": "channel"}
        activations = numbers | {"strategy": "token", "dynamic": True} if self.dynamic else None
        layers = {
            "targets": ["Linear"],
            "weights": numbers | granularity | {"dynamic": False},
            "input_activations": activations,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": layers},
            "ignore": ignore,
            "kv_cache_scheme": None,
        }


def _fp8(weight: Tensor, group: int, dtype: torch.dtype) -> Parts:
    scale = _scale(weight, _LARGEST_FP8, dtype)
    rounded = (weight / scale.float()).clamp(-_LARGEST_FP8, _LARGEST_FP8)
    return {"weight": rounded.to(torch.float8_e4m3fn), "weight_scale": scale}


def _int8(weight: Tensor, group: int, dtype: torch.dtype) -> Parts:
    scale = _scale(weight, 127.5, dtype)
    return {"weight": _round(weight, scale, 8), "weight_scale": scale}


def _int4(weight: Tensor, group: int, dtype: torch.dtype) -> Parts:
    grouped = weight.unflatten(1, (-1, group))
    scale = _scale(grouped, 7.5, dtype)
    nibbles = (_round(grouped, scale, 4) + 8).view(len(weight), -1, 8).to(torch.int32)
    packed = (nibbles << torch.arange(0, 32, 4, dtype=torch.int32)).sum(-1, dtype=torch.int32)
    shape = torch.tensor(weight.shape)
    return {"weight_packed": packed, "weight_scale": scale.squeeze(-1), "weight_shape": shape}


def _scale(weight: Tensor, largest: float, dtype: torch.dtype) -> Tensor:
    """Return the scale that maps the largest absolute value of each row or group (the last dimension) to
    `largest`, rounded to the stored dtype."""
    scale = (weight.abs().amax(-1, keepdim=True) / largest).to(dtype)
    return torch.where(scale == 0, 1, scale)


def _round(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    bound = 1 << (bits - 1)
    return (weight / scale.float()).round().clamp(-bound, bound - 1).to(torch.int8)


SCHEMES = {
    "fp8": RoundingScheme("float-quantized", _fp8, 8, "float"),
    "int8": RoundingScheme("int-quantized", _int8, 8, "int"),
    "int4": RoundingScheme("pack-quantized", _int4, 4, "int", grouped=True, dynamic=False),
}
