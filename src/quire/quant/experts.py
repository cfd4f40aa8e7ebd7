"""StoredExperts: all experts of a layer in some format."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire.kernels.cpu.moe import CpuExperts
from quire.quant.sharding import Shard
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
    inner: Shard | None = None
    """Which of the stored intermediate numbers these are; None: all."""


class StoredExperts(nn.Module):
    """Owns the tensors of all experts of a layer, unfilled at first."""

    mix: Callable[..., Tensor]
    """Weighted sum of the chosen experts' outputs (`mix` of `kernels/reference/moe.py`); set by `finish`."""

    def __init__(self, shape: ExpertShape) -> None:
        super().__init__()
        self.shape = shape
        self.gate_up_bias = self._bias(2 * shape.intermediate)
        self.down_bias = self._bias(shape.hidden)

    def _bias(self, size: int) -> nn.Parameter | None:
        shape = self.shape
        return unfilled(shape.experts, size, dtype=shape.dtype, device=shape.device) if shape.bias else None

    @property
    def adapts(self) -> bool:
        """Whether `mix` takes adapters; known after `finish`."""
        return "adapters" in inspect.signature(self.mix).parameters

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.mix(x, ids, weights)

    def parts(self) -> dict[str, dict[str, Piece]]:
        """For `gate` and `up` or both as `gate_up`, and `down`: what loading fills, by the suffix of its name
        in the checkpoint. The first axis is the experts'; a weight is [experts, outputs, inputs]."""
        raise NotImplementedError

    def bias_parts(self) -> dict[str, Piece]:
        """The same for biases, if there are any: of `gate_up` and `down`."""
        biases = {"gate_up": self.gate_up_bias, "down": self.down_bias}
        return {name: Piece(bias, 1) for name, bias in biases.items() if bias is not None}

    def begin(self) -> None:
        """Called once before the first piece is filled; afterwards `parts` may be other tensors."""

    def reorder(self, order: Tensor) -> None:
        """After loading and before `finish`: the outputs of `gate_up` in another order."""
        biases = [self.bias_parts()["gate_up"]] if self.shape.bias else []
        for tensor, axis, *_ in (*self.parts()["gate_up"].values(), *biases):
            if axis is not None:
                for expert in tensor:
                    expert.copy_(expert.index_select(axis - 1, order.to(expert.device)))

    def finish(self) -> None:
        """As a `Weight`'s."""
        self.repack()
        self.find_kernels()

    def repack(self) -> None:
        """Leave the tensors as kernels read them; all that is kept are parameters."""

    def find_kernels(self) -> None:
        """For the tensors as `repack` leaves them."""
        raise NotImplementedError

    def by_expert(self) -> list[list[Tensor]]:
        """All that kernels read, in bytes: of each tensor what is each expert's. To copy an expert's bytes to
        another's place is to move it there."""
        if isinstance(self.mix, CpuExperts):
            return self.mix.by_expert()
        return [_rows_of(tensor, self.shape.experts) for tensor in self.parameters() if tensor.numel()]

    @property
    def biases(self) -> list[nn.Parameter]:
        return [bias for bias in (self.gate_up_bias, self.down_bias) if bias is not None]


def _rows_of(tensor: Tensor, num: int) -> list[Tensor]:
    """The bytes of a tensor of so many experts, one after the other."""
    assert tensor.is_contiguous() and tensor.numel() % num == 0
    return list(tensor.detach().flatten().view(torch.uint8).view(num, -1))
