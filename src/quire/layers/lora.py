"""LoRA: adapters beside the weights of a model, many of them in one batch."""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.comm.group import Group
from quire.kernels.ops import Adapted, Ops
from quire.quant.shares import Run, Runs, divided

_ALIGN = 64
"""Numbers: kernels are compiled for aligned pointers."""
Shape = tuple[int, ...]


class Factors(NamedTuple):
    """What an adapter adds at one point. In host memory ranks below the highest of its parts are filled up
    with zeros; the scale is in `b`."""

    a: Tensor
    """[(experts,) parts, rank, size_in], of an embedding [vocab, rank]"""
    b: Tensor
    """[(experts,) outputs of all parts, rank]"""

    @property
    def num_ranks(self) -> int:
        """Of all parts and experts."""
        return self.a.numel() // self.a.shape[-1]

    def zero(self) -> None:
        self.a.zero_(), self.b.zero_()


class Table(Protocol):
    """A table that adapters may bring as a whole; see `layers/whole.py`."""

    names: tuple[str, ...]
    """Of its layer."""
    own: Run
    """The rows of it that are here."""
    hidden: int

    @property
    def size(self) -> int:
        """Numbers of a slot."""
        ...

    def bind(self, memory: Tensor) -> None:
        """[slots, size]"""
        ...

    def unbind(self) -> None: ...

    def put(self, slot: int, table: Tensor | None) -> None:
        """None: the adapter of this slot has none."""
        ...


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
        divides: bool = False,
        whole: Collection[str] = (),
        num_own: int = 0,
        no_own: str = "",
    ) -> None:
        self.max_slots = max_slots
        self.max_rank = max_rank
        self.dtype = dtype
        self.device = device
        self.only = frozenset(only)
        """The last names of layers that take adapters; empty: all."""
        self.divides = divides
        """Whether devices that share a layer share all that adapters add to it."""
        self.whole = frozenset(whole)
        """Which of embed_tokens and lm_head adapters may bring as a whole."""
        self.tables: dict[str, Table] = {}
        """Those, by the name of their layer."""
        self.num_own = num_own
        """Rows of embedding and head that an adapter may have of its own; see `layers/own.py`."""
        self.no_own = no_own or "--lora-extra-vocab-size is 0"
        """Why it can have none."""
        self.owned: dict[str, Any] = {}
        """The room for them: of embed_tokens and lm_head."""
        self.has_own = np.zeros(max_slots + 1, np.bool_)
        """By slot; the last stands for no adapter."""
        self.num_new = np.zeros(max_slots + 1, np.int32)
        """Tokens beyond the model's vocabulary that the adapter of each has."""
        self.is_wide = False
        """Whether some row of the step has an adapter with rows of its own."""
        self.points: dict[str, Point] = {}
        self.stacks: dict[str, Stack] = {}
        """Experts whose matrices some checkpoints have in one, by its name."""
        self.refused: dict[str, str] = {}
        """Layers that take none although others like them do, and why."""
        self.unused = ""
        """A pattern of the names of layers that compute nothing here: what is there for them is left out."""
        self.tokens: Tensor | None = None
        """[T] int32, the slot of each token of the step, -1 without; None: no token has an adapter."""
        self.logit_tokens: Tensor | None = None
        """[N] int32, the same of those whose logits are wanted."""
        self.assigned: Any = None
        """What kernels want to know of `tokens`."""
        self.logit_assigned: Any = None
        self._memory: Tensor | None = None
        self._spares: deque[Tensor] = deque()

    def use(
        self, tokens: Tensor | None = None, logit_tokens: Tensor | None = None, *, is_wide: bool = False
    ) -> None:
        """The slots of what is computed next; None: nothing of it has an adapter."""
        logit_tokens = None if logit_tokens is None or not len(logit_tokens) else logit_tokens
        self.is_wide, self.tokens, self.logit_tokens = is_wide, tokens, logit_tokens
        self.assigned, self.logit_assigned = self._assigned(tokens), self._assigned(logit_tokens)

    def _assigned(self, tokens: Tensor | None) -> Any:
        if tokens is None or not self.points:
            return None
        return next(iter(self.points.values())).ops.assigned(tokens, self.max_slots)

    def takes(self, *names: str) -> bool:
        """Whether a layer of one of these names takes adapters."""
        return not self.only or any(name.rpartition(".")[2] in self.only for name in names)

    @property
    def slot_size(self) -> int:
        """Numbers of a slot."""
        return sum(part.size for part in self._parts)

    @property
    def _parts(self) -> list[Any]:
        return [*self.points.values(), *self.tables.values(), *self.owned.values()]

    @property
    def _points_size(self) -> int:
        return sum(point.size for point in self.points.values())

    @property
    def num_bytes(self) -> int:
        return self.max_slots * self.slot_size * self.dtype.itemsize

    def allocate(self) -> None:
        """Once the model is built: the memory of all points, a slot in one piece."""
        memory = torch.zeros(self.max_slots, self.slot_size, dtype=self.dtype, device=self.device)
        self._memory, at = memory, 0
        for each in self._parts:
            each.bind(memory[:, at : at + each.size])
            at += each.size

    def release(self) -> None:
        """Give the memory back."""
        self._memory = None
        for each in self._parts:
            each.unbind()

    def keep_spares(self, count: int, size: int) -> None:
        """Pinned memory for the next adapters, if they have so many numbers: to pin it takes longer than to
        read one."""
        while len(self._spares) < count:
            self._spares.append(torch.empty(size, dtype=self.dtype, pin_memory=True))

    def _host_memory(self, size: int) -> Tensor:
        with contextlib.suppress(IndexError):
            spare = self._spares.pop()
            if size <= len(spare) < 2 * size:
                return spare[:size]
        return torch.empty(size, dtype=self.dtype, pin_memory=self.device.type == "cuda")

    def room(self, ranks: Mapping[str, int]) -> dict[str, Factors]:
        """Host memory, in one piece, for an adapter of these ranks, by point."""
        shapes = {name: self.points[name].shapes(rank) for name, rank in ranks.items()}
        size = sum(math.prod(shape) for both in shapes.values() for shape in both)
        memory, found, at = self._host_memory(size), {}, 0
        for name, (a, b) in shapes.items():
            middle, end = at + math.prod(a), at + math.prod(a) + math.prod(b)
            found[name] = Factors(memory[at:middle].view(a), memory[middle:end].view(b))
            at = end
        return found

    def table_room(self, name: str) -> Tensor:
        """Host memory for what of a table is here."""
        table, pins = self.tables[name], self.device.type == "cuda"
        return torch.empty(table.own.size, table.hidden, dtype=self.dtype, pin_memory=pins)

    def put(
        self,
        slot: int,
        factors: Mapping[str, Factors],
        tables: Mapping[str, Tensor] | None = None,
        own: Mapping[str, Any] | None = None,
    ) -> None:
        """An adapter takes the place of what was there; pinned memory is read when the device comes to it."""
        assert self._memory is not None, "allocate() comes first"
        self._memory[slot, : self._points_size].zero_()
        for name, each in factors.items():
            self.points[name].put(slot, each)
        for name, table in self.tables.items():
            table.put(slot, (tables or {}).get(name))
        for name, room in self.owned.items():
            room.put(slot, (own or {}).get(name))
        self.has_own[slot] = bool(own)
        news = (int((each.ids >= self.owned[name].vocab).sum()) for name, each in (own or {}).items())
        self.num_new[slot] = max(news, default=0)


class Point:
    """Where adapters are added to what a linear layer computes: `a` shrinks its input to ranks, part by part,
    and `b` makes outputs of them."""

    a: Tensor
    """[slots, parts * max_rank, size_in], the slots far apart; of experts [slots, experts, ...]"""
    b: Tensor
    """[slots, outputs of all parts, max_rank]; of experts [slots, experts, ...]"""

    def __init__(
        self,
        name: str,
        slots: AdapterSlots,
        size_in: int,
        part_sizes: tuple[int, ...],
        ops: Ops,
        *,
        num_experts: int | None = None,
    ) -> None:
        self.name = name
        self.slots = slots
        self.size_in = size_in
        self.part_sizes = part_sizes
        self.num_experts = num_experts
        self.ops = ops
        self.places: dict[str, Place] = {}
        """By the dotted name of each matrix in the checkpoint."""
        slots.points[name] = self

    @property
    def tokens(self) -> Tensor | None:
        """The slots of what the layer sees in this step; None: nothing of it has an adapter."""
        return self.slots.tokens

    @property
    def assigned(self) -> Any:
        return self.slots.assigned

    @property
    def adapted(self) -> Adapted | None:
        """What the adapters of the step's tokens add, for a product that takes it along; None: it is added
        behind."""
        return Adapted(self.a, self.b, self.part_sizes, self.assigned)

    def add(self, out: Tensor, x: Tensor) -> Tensor:
        """What the adapters of its tokens make of x, added to the layer's own output in place."""
        if self.tokens is None:
            return out
        return self.ops.lora(out, x, self.a, self.b, self.part_sizes, self.assigned)

    # ---- memory

    def shapes(self, rank: int) -> tuple[Shape, Shape]:
        """Those of `Factors`."""
        front = () if self.num_experts is None else (self.num_experts,)
        return (*front, len(self.part_sizes), rank, self.size_in), (*front, sum(self.part_sizes), rank)

    @property
    def own_shapes(self) -> tuple[Shape, Shape]:
        """Those in a slot."""
        return self.shapes(self.slots.max_rank)

    @property
    def size(self) -> int:
        """Numbers of a slot."""
        return sum(_aligned(math.prod(shape)) for shape in self.own_shapes)

    def bind(self, memory: Tensor) -> None:
        """[slots, size]"""
        a, b = self.own_shapes
        start = _aligned(math.prod(a))
        self._own = Factors(
            memory[:, : math.prod(a)].unflatten(1, a),
            memory[:, start : start + math.prod(b)].unflatten(1, b),
        )
        self.a, self.b = self._own.a.flatten(-3, -2), self._own.b

    def unbind(self) -> None:
        for name in ("a", "b", "_own"):
            self.__dict__.pop(name, None)

    def put(self, slot: int, factors: Factors) -> None:
        rank = factors.b.shape[-1]
        self._own.a[slot].narrow(-2, 0, rank).copy_(factors.a, non_blocking=True)
        self._own.b[slot].narrow(-1, 0, rank).copy_(factors.b, non_blocking=True)


class RanksPoint(Point):
    """The same of a layer that is divided by its outputs: each device shrinks to some of the ranks, and all
    tell each other theirs."""

    def __init__(
        self, name: str, slots: AdapterSlots, size_in: int, sizes: tuple[int, ...], ops: Ops, group: Group
    ) -> None:
        self.group = group
        self.num_own = -(-slots.max_rank // group.size)
        super().__init__(name, slots, size_in, sizes, ops)

    @property
    def adapted(self) -> None:
        return None

    @property
    def own_shapes(self) -> tuple[Shape, Shape]:
        (parts, _, size_in), b = self.shapes(self.num_own * self.group.size)
        return (parts, self.num_own, size_in), b

    def put(self, slot: int, factors: Factors) -> None:
        first, rank = self.group.rank * self.num_own, factors.b.shape[-1]
        own = factors.a[:, first : first + self.num_own]
        self._own.a[slot].narrow(1, 0, own.shape[1]).copy_(own, non_blocking=True)
        self._own.b[slot].narrow(-1, 0, rank).copy_(factors.b, non_blocking=True)

    def add(self, out: Tensor, x: Tensor) -> Tensor:
        if self.tokens is None:
            return out
        own = self.ops.lora_shrink(x, self.a, self.assigned).unflatten(1, (-1, self.num_own))
        ranks = self.group.gather(own).flatten(1)
        return self.ops.lora_expand(out, ranks, self.b, self.part_sizes, self.assigned)


class SumPoint(Point):
    """The same of a layer that is divided by its inputs: the ranks are summed, and each device expands them
    to some of the outputs, which are summed with those of the layer."""

    def __init__(
        self, name: str, slots: AdapterSlots, size_in: int, size_out: int, ops: Ops, group: Group
    ) -> None:
        self.group = group
        self.own = divided(group, size_out)
        super().__init__(name, slots, size_in, (self.own.size,), ops)

    @property
    def adapted(self) -> None:
        return None

    def add(self, out: Tensor, x: Tensor) -> Tensor:
        if self.tokens is None:
            return out
        ranks = self.group.all_reduce(self.ops.lora_shrink(x, self.a, self.assigned))
        own = out[:, self.own.start : self.own.start + self.own.size]
        self.ops.lora_expand(own, ranks, self.b, self.part_sizes, self.assigned)
        return out


class LatentPoint(Point):
    """The same of the weight that makes keys and values of latents: used by heads, and by some kernels both
    ways round, too (`turned`)."""

    def __init__(
        self,
        name: str,
        slots: AdapterSlots,
        latent: int,
        heads: tuple[int, int, int],
        ops: Ops,
        *,
        turns: bool,
    ) -> None:
        """`heads`: how many, and the sizes of their keys and values."""
        self.heads, self.key_dim, value_dim = heads
        self._turns = turns
        super().__init__(name, slots, latent, (self.heads * (self.key_dim + value_dim),), ops)
        self.turned: tuple[Tensor, Tensor] | None = None

    def _turned_shapes(self) -> tuple[Shape, ...]:
        rank = self.slots.max_rank
        return ((self.heads, rank, self.key_dim), (self.size_in, rank)) if self._turns else ()

    @property
    def size(self) -> int:
        return super().size + sum(_aligned(math.prod(shape)) for shape in self._turned_shapes())

    def bind(self, memory: Tensor) -> None:
        super().bind(memory)
        if self._turns:
            at, found = super().size, []
            for shape in self._turned_shapes():
                found.append(memory[:, at : at + math.prod(shape)].unflatten(1, shape))
                at += _aligned(math.prod(shape))
            self.turned = found[0], found[1]

    def unbind(self) -> None:
        super().unbind()
        self.turned = None

    def put(self, slot: int, factors: Factors) -> None:
        super().put(slot, factors)
        a, b = self.a[slot], self.b[slot]
        # Products of all slots at once: an infinity would reach the rows of others.
        a.nan_to_num_(), b.nan_to_num_()
        if self.turned is not None:
            keys, down = self.turned
            keys[slot].copy_(b.unflatten(0, (self.heads, -1))[:, : self.key_dim].transpose(1, 2))
            down[slot].copy_(a.t())


class HeadPoint(Point):
    """The same of the head, which sees the tokens alone whose logits are wanted."""

    @property
    def tokens(self) -> Tensor | None:
        return self.slots.logit_tokens

    @property
    def assigned(self) -> Any:
        return self.slots.logit_assigned


class TablePoint(Point):
    """The same of an embedding: `a` has a row of ranks for each token of the vocabulary."""

    def add(self, out: Tensor, x: Tensor) -> Tensor:
        """x: [T] ids"""
        if self.tokens is None:
            return out
        return self.ops.lora_rows(out, x, self.a, self.b, self.assigned)

    def shapes(self, rank: int) -> tuple[Shape, Shape]:
        return (self.size_in, rank), (sum(self.part_sizes), rank)

    def bind(self, memory: Tensor) -> None:
        super().bind(memory)
        self.a = self._own.a

    def put(self, slot: int, factors: Factors) -> None:
        rank = factors.b.shape[-1]
        for own, given in zip(self._own, factors, strict=True):
            own[slot].narrow(-1, 0, rank).copy_(given, non_blocking=True)


def _in_order() -> Tensor | None:
    return None


class Place(NamedTuple):
    """A matrix of the checkpoint that an adapter may be of: what there is of it here, and where that goes."""

    point: Point
    part: slice
    """Those of the point that it is; several of a matrix that other checkpoints have apart."""
    inputs: Run
    outputs: Runs
    order: Callable[[], Tensor | None] = _in_order
    """Where each output of these parts lies among those that are here; None: at its place."""
    expert: int | None = None
    is_table: bool = False

    @property
    def sizes(self) -> tuple[int, int]:
        """Inputs and outputs in the checkpoint."""
        return self.inputs.all, sum(run.all for run in self.outputs)

    @property
    def num_parts(self) -> int:
        return int(self.part.stop - self.part.start)

    def of(self, factors: Factors) -> Factors:
        """Its own part of the point's: [parts, rank, size_in] and [outputs, rank]."""
        a, b = factors if self.expert is None else (each[self.expert] for each in factors)
        if self.is_table:
            return Factors(a, b)
        first, end = (sum(self.point.part_sizes[:end]) for end in (self.part.start, self.part.stop))
        return Factors(a.narrow(0, self.part.start, self.num_parts), b.narrow(0, first, end - first))


class Stack(NamedTuple):
    """The experts of a layer: for each of their products, the place of every expert's matrix."""

    products: dict[str, list[Place]]


def places(slots: AdapterSlots) -> Iterator[tuple[str, Place]]:
    """All matrices of a model that take adapters, by name."""
    for point in slots.points.values():
        yield from point.places.items()


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
