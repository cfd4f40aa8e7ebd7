"""Round to nearest: what compressed-tensors keeps of a weight, and how config.json tells of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Parts = dict[str, Tensor]
"""By the suffix of their names, in place of `weight`."""
_LARGEST_FP8 = 448.0


@dataclass(frozen=True, slots=True)
class RoundingScheme:
    """How the weights of linear layers are rounded and stored."""

    format: str
    """As compressed-tensors calls it."""
    pack: Callable[[Tensor, int, torch.dtype], Parts]
    """Of a float32 weight [outputs, inputs], the inputs of a group, and the type of scales."""
    bits: int
    kind: Literal["float", "int"]
    grouped: bool = False
    """Inputs by groups that share a scale; otherwise an output has one."""
    dynamic: bool = True
    """Whether activations are rounded, too, token by token."""

    def config(self, group: int, ignore: list[str]) -> dict[str, Any]:
        """The quantization_config."""
        numbers = {"num_bits": self.bits, "type": self.kind, "symmetric": True}
        by = {"strategy": "group", "group_size": group} if self.grouped else {"strategy": "channel"}
        activations = numbers | {"strategy": "token", "dynamic": True} if self.dynamic else None
        layers = {
            "targets": ["Linear"],
            "weights": numbers | by | {"dynamic": False},
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
    return {"weight": _rounded(weight, scale, 8), "weight_scale": scale}


def _int4(weight: Tensor, group: int, dtype: torch.dtype) -> Parts:
    grouped = weight.unflatten(1, (-1, group))
    scale = _scale(grouped, 7.5, dtype)
    nibbles = (_rounded(grouped, scale, 4) + 8).view(len(weight), -1, 8).to(torch.int32)
    packed = (nibbles << torch.arange(0, 32, 4, dtype=torch.int32)).sum(-1, dtype=torch.int32)
    shape = torch.tensor(weight.shape)
    return {"weight_packed": packed, "weight_scale": scale.squeeze(-1), "weight_shape": shape}


def _scale(weight: Tensor, largest: float, dtype: torch.dtype) -> Tensor:
    """Of each row, as it will be read again."""
    scale = (weight.abs().amax(-1, keepdim=True) / largest).to(dtype)
    return torch.where(scale == 0, 1, scale)


def _rounded(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    bound = 1 << (bits - 1)
    return (weight / scale.float()).round().clamp(-bound, bound - 1).to(torch.int8)


SCHEMES = {
    "fp8": RoundingScheme("float-quantized", _fp8, 8, "float"),
    "int8": RoundingScheme("int-quantized", _int8, 8, "int"),
    "int4": RoundingScheme("pack-quantized", _int4, 4, "int", grouped=True, dynamic=False),
}
