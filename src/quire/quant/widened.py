"""Weights that no kernel multiplies as they were stored: they become plain ones."""

from collections.abc import Callable

from torch import Tensor

from quire.logs import get_logger, warn_once
from quire.quant.experts import StoredExperts
from quire.quant.weight import Weight

logger = get_logger(__name__)


def widen(weight: Weight, plain: Callable[[], Weight], values: Tensor, bias: Tensor | None, why: str) -> None:
    """Let a plain weight with these values [outputs, inputs] do all that `weight` is asked for."""
    warn_once(logger, f"{why}: weights are unpacked, and take as much memory as in an unquantized model")
    wide = plain()
    sizes = list(weight.shape.sizes_out)
    biases = [None] * len(sizes) if bias is None else bias.split(sizes)
    for part, rows, offset in zip(wide.parts(), values.split(sizes), biases, strict=True):
        part["weight"].tensor.copy_(rows)
        if offset is not None:
            part["bias"].tensor.copy_(offset)
    wide.finish()
    weight.wide = wide
    weight.product, weight.rows = wide.product, wide.rows
    weight.gated, weight.entered, weight.chosen = wide.gated, wide.entered, wide.chosen


def widen_experts(
    experts: StoredExperts, plain: Callable[[], StoredExperts], gate_up: Tensor, down: Tensor, why: str
) -> None:
    """The same for experts."""
    warn_once(logger, f"{why}: experts are unpacked, and take as much memory as in an unquantized model")
    wide = plain()
    for name, values in (("gate_up", gate_up), ("down", down)):
        wide.parts()[name]["weight"].tensor.copy_(values)
    for name, piece in experts.bias_parts().items():
        wide.bias_parts()[name].tensor.copy_(piece.tensor)
    wide.finish()
    experts.wide = wide
    experts.mix = wide.mix
