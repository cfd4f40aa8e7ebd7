"""Weights without a kernel for their stored format, which are dequantized."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from quire.logs import get_logger, warn_once
from quire.quant.experts import StoredExperts
from quire.quant.unquantized import PlainExperts, PlainWeight
from quire.quant.weight import Weight

logger = get_logger(__name__)

_META = torch.device("meta")


def dequantize_weight(plain: Callable[[], Weight], values: Tensor, reason: str) -> nn.Parameter:
    """Copy values [outputs, inputs] into the unquantized weight that `plain` creates, and return its
    parameter. A warning with `reason` is logged once."""
    warn_once(logger, f"{reason}: weights are dequantized and take as much memory as in an unquantized model")
    wide = plain()
    for part, rows in zip(wide.parts(), values.split(list(wide.shape.sizes_out)), strict=True):
        part["weight"].tensor.copy_(rows)
    return wide.get_parameter("weight")


def use_plain(weight: Weight, values: nn.Parameter, bias: nn.Parameter | None) -> None:
    """Make `weight` compute with these dequantized values: replace its kernels by those of an unquantized
    weight."""
    plain = PlainWeight(replace(weight.shape, bias=False, device=_META), values.dtype)
    plain.weight, plain.bias = values, bias
    plain.find_kernels()
    weight.product, weight.rows = plain.product, plain.rows
    weight.gated, weight.entered, weight.chosen = plain.gated, plain.entered, plain.chosen


def dequantize_experts(
    plain: Callable[[], StoredExperts], gate_up: Tensor, down: Tensor, reason: str
) -> tuple[nn.Parameter, nn.Parameter]:
    """Copy values into the unquantized experts that `plain` creates, and return the parameters of `gate_up`
    and `down`. A warning with `reason` is logged once."""
    warn_once(logger, f"{reason}: experts are dequantized and take as much memory as in an unquantized model")
    wide = plain()
    for name, values in (("gate_up", gate_up), ("down", down)):
        wide.parts()[name]["weight"].tensor.copy_(values)
    return wide.get_parameter("gate_up"), wide.get_parameter("down")


def use_plain_experts(experts: StoredExperts, gate_up: nn.Parameter, down: nn.Parameter) -> None:
    """Make `experts` compute with these dequantized values: replace their kernels by those of unquantized
    experts."""
    plain = PlainExperts(replace(experts.shape, bias=False, device=_META), gate_up.dtype)
    plain.gate_up, plain.down = gate_up, down
    plain.gate_up_bias, plain.down_bias = experts.gate_up_bias, experts.down_bias
    plain.find_kernels()
    experts.mix = plain.mix
