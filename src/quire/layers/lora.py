"""LoRA: adapters beside the weights of a model, many of them in one batch."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.ops import Ops
from quire.quant.shares import Run, Runs

_ALIGN = 64
"""Numbers: kernels are compiled for aligned pointers."""


class Factors(NamedTuple):
    """What an adapter adds at one point, as it waits in host memory: ranks below the highest of its parts are
    filled up with zeros, and the scale is in `b`."""

    a: Tensor
    """[(experts,) parts, rank, size_in], of an embedding [vocab, rank]"""
    b: Tensor
    """[(experts,) outputs of all parts, rank]"""

    @property
    def num_bytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


class Place(NamedTuple):
    """A matrix of the checkpoint that an adapter may be of: what there is of it here, and where that goes."""

    point: "Point"
    parts: tuple[int, ...]
    """Those of the point that it is; several of a matrix that is fused in some checkpoints."""
    inputs: Run
    outputs: Runs
    expert: int | None = None


class AdapterSlots:
    """The slots of a device, each with room for one adapter at every point of the model, and the slots that
    the tokens of the current step use."""

    def __init__(
        self,
        *,
        max_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        only: Collection[str] = (),
    ) -> None:
        self.max_slots = max_slots
        self.max_rank = max_rank
        self.dtype = dtype
        self.device = device
        self.only = frozenset(only)
        """The last names of layers that take adapters; empty: all."""
        self.points: list[Point] = []
        self.tokens: Tensor | None = None
        """[T] int32, the slot of each token of the step, -1 without; None: no token has an adapter."""
        self.logit_tokens: Tensor | None = None
        """[N] int32, the same of those whose logits are wanted."""
        self._memory: Tensor | None = None

    def takes(self, *names: str) -> bool:
        """Whether a layer of one of these names takes adapters."""
        return not self.only or any(name.rpartition(".")[2] in self.only for name in names)

    @property
    def slot_size(self) -> int:
        """Numbers of a slot."""
        return sum(point.size for point in self.points)

    @property
    def num_bytes(self) -> int:
        return self.max_slots * self.slot_size * self.dtype.itemsize

    def allocate(self) -> None:
        """Once the model is built: the memory of all points, a slot in one piece."""
        memory = torch.zeros(self.max_slots, self.slot_size, dtype=self.dtype, device=self.device)
        self._memory, at = memory, 0
        for point in self.points:
            point.bind(memory[:, at : at + point.size])
            at += point.size

    def release(self) -> None:
        """Give the memory back."""
        self._memory = None
        for point in self.points:
            point.unbind()

    def put(self, slot: int, factors: Iterable[tuple["Point", Factors]]) -> None:
        """An adapter takes the place of what was there; pinned memory is read when the device comes to it."""
        assert self._memory is not None, "allocate() comes first"
        self._memory[slot].zero_()
        for point, each in factors:
            point.put(slot, each)


class Point:
    """Where adapters are added to what a linear layer computes: `a` shrinks its input to ranks, part by part,
    and `b` makes outputs of them."""

    a: Tensor
    """[slots, parts * max_rank, size_in], the slots far apart"""
    b: Tensor
    """[slots, outputs of all parts, max_rank]"""

    def __init__(
        self,
        slots: AdapterSlots,
        size_in: int,
        part_sizes: tuple[int, ...],
        ops: Ops,
        *,
        num_experts: int = 1,
    ) -> None:
        self.slots = slots
        self.size_in = size_in
        self.part_sizes = part_sizes
        self.num_experts = num_experts
        self.ops = ops
        self.places: dict[str, Place] = {}
        """By the dotted name of each matrix in the checkpoint."""
        self.orders: Callable[[], list[Tensor]] = list
        """Of each part: which of the checkpoint's outputs each of its own is; empty: in its order."""
        slots.points.append(self)

    @property
    def is_active(self) -> bool:
        """Whether some token of the step has an adapter."""
        return self.slots.tokens is not None

    def add(self, out: Tensor, x: Tensor) -> Tensor:
        """What the adapters of its tokens make of x, added to the layer's own output in place."""
        tokens = self.slots.tokens
        if tokens is None:
            return out
        return self.ops.lora(out, x, self.a, self.b, self.part_sizes, tokens)

    # ---- memory

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of one slot: what of `a` and `b` there is for a rank, rank last but one and last."""
        rank, experts = self.slots.max_rank, () if self.num_experts == 1 else (self.num_experts,)
        return (*experts, len(self.part_sizes), rank, self.size_in), (*experts, sum(self.part_sizes), rank)

    @property
    def size(self) -> int:
        """Numbers of a slot."""
        return sum(_aligned(math.prod(shape)) for shape in self.shapes)

    def bind(self, memory: Tensor) -> None:
        """[slots, size]"""
        a, b = (math.prod(shape) for shape in self.shapes)
        start = _aligned(a)
        self._a = memory[:, :a].unflatten(1, self.shapes[0])
        self._b = memory[:, start : start + b].unflatten(1, self.shapes[1])
        self.a, self.b = self._flat(self._a), self._b

    def _flat(self, a: Tensor) -> Tensor:
        return a.flatten(-3, -2)

    def unbind(self) -> None:
        for name in ("a", "b", "_a", "_b"):
            self.__dict__.pop(name, None)

    def factors(self, rank: int) -> Factors:
        """Zeros for an adapter of that rank, on the host."""
        (*front, _, size_in), (*outputs, _) = self.shapes
        dtype, pin = self.slots.dtype, self.slots.device.type == "cuda"
        a = torch.zeros(*front, rank, size_in, dtype=dtype, pin_memory=pin)
        return Factors(a, torch.zeros(*outputs, rank, dtype=dtype, pin_memory=pin))

    def put(self, slot: int, factors: Factors) -> None:
        rank = factors.b.shape[-1]
        self._a[slot].narrow(-2, 0, rank).copy_(factors.a, non_blocking=True)
        self._b[slot].narrow(-1, 0, rank).copy_(factors.b, non_blocking=True)


class HeadPoint(Point):
    """The same of the head, which sees the tokens alone whose logits are wanted."""

    @property
    def is_active(self) -> bool:
        return self.slots.logit_tokens is not None

    def add(self, out: Tensor, x: Tensor) -> Tensor:
        tokens = self.slots.logit_tokens
        if tokens is None:
            return out
        return self.ops.lora(out, x, self.a, self.b, self.part_sizes, tokens)


class TablePoint(Point):
    """The same of an embedding: `a` has a row of ranks for each token of the vocabulary."""

    def add(self, out: Tensor, x: Tensor) -> Tensor:
        """x: [T] ids"""
        tokens = self.slots.tokens
        if tokens is None:
            return out
        return self.ops.lora_rows(out, x, self.a, self.b, tokens)

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        rank = self.slots.max_rank
        return (self.size_in, rank), (sum(self.part_sizes), rank)

    def _flat(self, a: Tensor) -> Tensor:
        return a

    def factors(self, rank: int) -> Factors:
        dtype, pin = self.slots.dtype, self.slots.device.type == "cuda"
        a = torch.zeros(self.size_in, rank, dtype=dtype, pin_memory=pin)
        return Factors(a, torch.zeros(sum(self.part_sizes), rank, dtype=dtype, pin_memory=pin))

    def put(self, slot: int, factors: Factors) -> None:
        rank = factors.b.shape[-1]
        for own, given in ((self._a, factors.a), (self._b, factors.b)):
            own[slot].narrow(-1, 0, rank).copy_(given, non_blocking=True)


def places_of(slots: AdapterSlots) -> Iterator[tuple[str, Place]]:
    """All matrices of a model that take adapters, by name."""
    for point in slots.points:
        yield from point.places.items()


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
