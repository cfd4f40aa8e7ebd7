"""StoredExperts: all experts of a layer in some format."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.quant.weight import Piece, unfilled


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The sizes of a layer's experts, and the type of what they compute."""

    experts: int
    hidden: int
    intermediate: int
    activation: str
    bias: bool
    dtype: torch.dtype
    device: torch.device


class StoredExperts(nn.Module):
    """Owns the tensors of all experts of a layer, unfilled at first."""

    mix: Callable[[Tensor, Tensor, Tensor], Tensor]
    """`kernels/experts.py` mix: what the chosen experts make of each token, weighed and added up; there after
    `finish`."""

    def __init__(self, shape: ExpertShape) -> None:
        super().__init__()
        self.shape = shape
        self.gate_up_bias = self._bias(2 * shape.intermediate)
        self.down_bias = self._bias(shape.hidden)

    def _bias(self, size: int) -> nn.Parameter | None:
        shape = self.shape
        return unfilled(shape.experts, size, dtype=shape.dtype, device=shape.device) if shape.bias else None

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.mix(x, ids, weights)

    def parts(self) -> dict[str, Piece]:
        """What loading fills, with an expert's own in front: `gate` and `up` or both as `gate_up` [experts,
        outputs, inputs], `down`, and where there are biases `gate_up_bias` and `down_bias`."""
        biases = {"gate_up_bias": self.gate_up_bias, "down_bias": self.down_bias}
        return {name: Piece(bias, 1) for name, bias in biases.items() if bias is not None}

    def reorder(self, order: Tensor) -> None:
        """After loading and before `finish`: the outputs of `gate_up` in another order."""
        parts = self.parts()
        for name in ("gate_up", "gate_up_bias") if self.shape.bias else ("gate_up",):
            tensor, axis, _ = parts[name]
            assert axis is not None
            for expert in tensor:
                expert.copy_(expert.index_select(axis - 1, order.to(expert.device)))

    def finish(self) -> None:
        """Called once after loading: repack, and look for kernels."""
        raise NotImplementedError

    @property
    def biases(self) -> list[nn.Parameter]:
        return [bias for bias in (self.gate_up_bias, self.down_bias) if bias is not None]
