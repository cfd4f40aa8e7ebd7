"""Activations in plain torch, by the names that configurations use.

Finite numbers give the same on every CPU, up to rounding. What torch makes of infinity is left as it is: some
of its kernels give NaN where the limit is infinity, on some CPUs. Either makes the row NaN by the next norm:
a check here would cost time and change no answer.

`silu<7` is one with a bound: what it makes of the gate is 7 at most, and what that is multiplied with is cut
to -7 and 7.
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
"""Of gpt-oss."""


def bounded(activation: str) -> tuple[str, float]:
    """Its name without the bound, and that; infinity: it has none."""
    name, _, bound = activation.partition("<")
    return name, float(bound or math.inf)


def in_c(activation: str) -> tuple[int, float]:
    """Its number in csrc/activations.h, and its bound, or 0."""
    name, bound = bounded(activation)
    assert name == "silu" or bound == math.inf, "no other has a bound in C"
    return NUMBERS[name], bound if bound < math.inf else 0.0


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """[T, 2n] gate and up side by side -> act(gate) * up, [T, n]."""
    gate, up = gate_up.chunk(2, -1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=_CLAMP), up.clamp(-_CLAMP, _CLAMP)
        return gate * (gate * _SLOPE).sigmoid() * (up + 1)
    name, bound = bounded(activation)
    if bound < math.inf:
        return ACTIVATIONS[name](gate).clamp(max=bound) * up.clamp(-bound, bound)
    return ACTIVATIONS[name](gate) * up
