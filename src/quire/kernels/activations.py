"""Activations in plain torch, by the names that configurations use."""

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
"""In C, as in csrc/activations.h."""
_CLAMP, _SLOPE = 7.0, 1.702
"""Of gpt-oss."""


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """[T, 2n] gate and up side by side -> act(gate) * up, [T, n]."""
    gate, up = gate_up.chunk(2, -1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=_CLAMP), up.clamp(-_CLAMP, _CLAMP)
        return gate * (gate * _SLOPE).sigmoid() * (up + 1)
    return ACTIVATIONS[activation](gate) * up
