"""Weight: the weight of a linear layer in some format, apart from what the layer is for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from quire.checkpoint.facts import Routing
from quire.kernels.ops import HeadEntry
from quire.quant.sharding import Runs, Shard


@dataclass(frozen=True, slots=True)
class LinearShape:
    """What a layer needs of its weight: sizes, and the type of what it computes."""

    size_in: int
    sizes_out: tuple[int, ...]
    """One for each part of the checkpoint; their outputs lie one after the other (query, key, value)."""
    bias: bool
    dtype: torch.dtype
    device: torch.device
    narrows: bool = True
    """Whether it may be kept in fewer bits than it is stored in: not so where little memory is saved, or
    much depends on it."""
    outputs: tuple[Runs, ...] = ()
    """Of each part: which of the stored outputs these are; empty: all."""
    inputs: Shard | None = None
    """The same of inputs."""


class Piece(NamedTuple):
    """What one tensor of the checkpoint fills, and its axes along the layer's outputs and inputs."""

    tensor: Tensor
    outputs: int | None = 0
    inputs: int | None = None
    per_output: int = 1
    """How many outputs one number along that axis is for."""
    per_input: int | Fraction = 1
    is_flat: bool = False
    """Whether the checkpoint has all of it in one row or column."""


class TextTensor(Piece):
    """Room for the bytes of a text, all zeros: the checkpoint may have fewer."""


class Chooses(Protocol):
    """`Ops.route` of a router's product."""

    def __call__(self, x: Tensor, *, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]: ...


class Weight(nn.Module):
    """Owns its tensors, unfilled at first. What a kernel does beside the product is an ability: None where
    there is no such kernel, settled by `finish`."""

    product: Callable[[Tensor], Tensor]
    """x W^T + b; there after `finish`."""
    gated: Callable[[Tensor], Tensor] | None = None
    """Of a gate and an up part: silu(gate) * up."""
    of_gates: Callable[[Tensor], Tensor] | None = None
    """The product of silu(gate) * up, for x [T, 2 * size_in] of a gate and an up part."""
    entered: Callable[[Tensor, HeadEntry], Tensor | None] | None = None
    """Of query, key and value: `Ops.rotate_and_write` of the product; None where it does not fit x."""
    adapted: Callable[..., Tensor] | None = None
    """The product, and what adapters add (`adapted`)."""
    gated_adapted: Callable[..., Tensor] | None = None
    entered_adapted: Callable[..., Tensor | None] | None = None
    chosen: Chooses | None = None
    rows: Callable[[Tensor], Tensor] | None = None
    """Of an embedding: [T] ids -> [T, size_in]."""

    def __init__(self, shape: LinearShape) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)

    def parts(self) -> list[dict[str, Piece]]:
        """For each part: what loading fills, by the suffix of its checkpoint name."""
        raise NotImplementedError

    def begin(self) -> None:
        """Called once before the first piece is filled; afterwards `parts` may be other tensors."""

    def reorder(self, orders: list[Tensor]) -> None:
        """After loading and before `finish`: the outputs of each part in another order."""
        for part, order in zip(self.parts(), orders, strict=True):
            for tensor, axis, *_ in part.values():
                if axis is not None:
                    tensor.copy_(tensor.index_select(axis, order.to(tensor.device)))

    def finish(self) -> None:
        """Called once after loading. A weight that does not change it can be saved as it is then, and its
        tensors put in their place again, followed by `find_kernels` alone."""
        self.repack()
        self.find_kernels()

    def repack(self) -> None:
        """Leave the tensors as kernels read them; all that is kept are parameters."""

    def find_kernels(self) -> None:
        """For the tensors as `repack` leaves them."""
        raise NotImplementedError


def with_bias(
    parts: list[dict[str, Piece]], bias: Tensor | None, sizes: Sequence[int]
) -> list[dict[str, Piece]]:
    """Parts of so many outputs each, with their pieces of a bias that is one for all."""
    if bias is not None:
        for part, piece in zip(parts, bias.split(list(sizes)), strict=True):
            part["bias"] = Piece(piece)
    return parts


def kept(tensor: Tensor) -> nn.Parameter:
    """As a module owns its tensors: nothing is trained."""
    return nn.Parameter(tensor, requires_grad=False)


def bias_of(shape: LinearShape) -> nn.Parameter | None:
    """Unfilled, where there is one."""
    return unfilled(sum(shape.sizes_out), dtype=shape.dtype, device=shape.device) if shape.bias else None


def lent(*size: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Stands for an unfilled tensor that is there only between `begin` and `finish`: of weights that are
    narrowed while they are loaded, no more than a layer's are in memory as they were stored."""
    return kept(torch.empty(1, dtype=dtype, device=device).expand(*size))


def lend(parameter: nn.Parameter) -> nn.Parameter:
    """What it stands for."""
    return unfilled(*parameter.shape, dtype=parameter.dtype, device=parameter.device)


def unfilled(*size: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return kept(torch.empty(*size, dtype=dtype, device=device))
