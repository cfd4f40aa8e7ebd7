"""Activations in plain torch, by the names that configurations use.

Finite inputs give equal results on every CPU, up to rounding. For infinite inputs some torch kernels return
NaN instead of infinity on some CPUs. Both results become NaN in the next norm, so they are not handled here.

`silu<7` is an activation with a bound: the activated gate is at most 7, and the up projection is clamped to
-7 and 7.
"""

import math
from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
NUMBERS = {name: number for number, name in enumerate((*ACTIVATIONS, "clamped_swiglu"))}
_CLAMP, _SLOPE = 7.0, 1.702
"""Constants of `clamped_swiglu`, the activation of gpt-oss."""


def bounded(activation: str) -> tuple[str, float]:
    """Split an activation such as `silu<7` into its name and its bound, which is infinity if it has none."""
    name, _, bound = activation.partition("<")
    return name, float(bound or math.inf)


def in_c(activation: str) -> tuple[int, float]:
    """Return the number of an activation in csrc/activations.h, and its bound (0 if it has none)."""
    name, bound = bounded(activation)
    assert name == "silu" or bound == math.inf, "only silu has a bound in C"
    return NUMBERS[name], bound if bound < math.inf else 0.0


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """Return act(gate) * up [T, n] for `gate_up` [T, 2n], the gate and up projections side by side."""
    gate, up = gate_up.chunk(2, -1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=_CLAMP), up.clamp(-_CLAMP, _CLAMP)
        return gate * (gate * _SLOPE).sigmoid() * (up + 1)
    name, bound = bounded(activation)
    if bound < math.inf:
        return ACTIVATIONS[name](gate).clamp(max=bound) * up.clamp(-bound, bound)
    return ACTIVATIONS[name](gate) * up
