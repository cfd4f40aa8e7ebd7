"""Points: where adapters are added to what layers compute, and which matrices of a checkpoint they are of."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from quire.kernels.ops import LoRAHeads, Ops
from quire.parallel.group import Group
from quire.quant.sharding import Runs, Shard, divided

_ALIGN = 64
"""Numbers: kernels are compiled for aligned pointers."""
Shape = tuple[int, ...]


class LoRAFactors(NamedTuple):
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


class LoRASlots(Protocol):
    """Whoever has the memory of all points, and knows whose adapters the step at hand uses."""

    max_rank: int
    points: dict[str, "LoRALayer"]
    tokens: Tensor | None
    """[T] int32, the slot of each token of the step, -1 without; None: no token has an adapter."""
    logit_tokens: Tensor | None
    """[N] int32, the same of those whose logits are wanted."""
    assigned: Any
    """What kernels want to know of `tokens`."""
    logit_assigned: Any


class LoRALayer:
    """Where adapters are added to what a linear layer computes: `a` shrinks its input to ranks, part by part,
    and `b` makes outputs of them."""

    a: Tensor
    """[slots, parts * max_rank, size_in], the slots far apart; of experts [slots, experts, ...]"""
    b: Tensor
    """[slots, outputs of all parts, max_rank]; of experts [slots, experts, ...]"""

    def __init__(
        self,
        name: str,
        slots: LoRASlots,
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
        self.places: dict[str, LoRATarget] = {}
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
    def adapted(self) -> LoRAHeads | None:
        """What the adapters of the step's tokens add, for a product that takes it along; None: it is added
        behind."""
        return LoRAHeads(self.a, self.b, self.part_sizes, self.assigned)

    def add(self, out: Tensor, x: Tensor) -> Tensor:
        """What the adapters of its tokens make of x, added to the layer's own output in place."""
        if self.tokens is None:
            return out
        return self.ops.lora(out, x, self.a, self.b, self.part_sizes, self.assigned)

    # ---- memory

    def shapes(self, rank: int) -> tuple[Shape, Shape]:
        """Those of `LoRAFactors`."""
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
        self._own = LoRAFactors(
            memory[:, : math.prod(a)].unflatten(1, a),
            memory[:, start : start + math.prod(b)].unflatten(1, b),
        )
        self.a, self.b = self._own.a.flatten(-3, -2), self._own.b

    def unbind(self) -> None:
        for name in ("a", "b", "_own"):
            self.__dict__.pop(name, None)

    def put(self, slot: int, factors: LoRAFactors) -> None:
        rank = factors.b.shape[-1]
        self._own.a[slot].narrow(-2, 0, rank).copy_(factors.a, non_blocking=True)
        self._own.b[slot].narrow(-1, 0, rank).copy_(factors.b, non_blocking=True)


class LoRARanksLayer(LoRALayer):
    """The same of a layer that is divided by its outputs: each device shrinks to some of the ranks, and all
    tell each other theirs."""

    def __init__(
        self, name: str, slots: LoRASlots, size_in: int, sizes: tuple[int, ...], ops: Ops, group: Group
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

    def put(self, slot: int, factors: LoRAFactors) -> None:
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


class LoRASumLayer(LoRALayer):
    """The same of a layer that is divided by its inputs: the ranks are summed, and each device expands them
    to some of the outputs, which are summed with those of the layer."""

    def __init__(
        self, name: str, slots: LoRASlots, size_in: int, size_out: int, ops: Ops, group: Group
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


class LoRAMlaLayer(LoRALayer):
    """The same of the weight that makes keys and values of latents: used by heads, and by some kernels both
    ways round, too (`turned`)."""

    def __init__(
        self,
        name: str,
        slots: LoRASlots,
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

    def put(self, slot: int, factors: LoRAFactors) -> None:
        super().put(slot, factors)
        a, b = self.a[slot], self.b[slot]
        # Products of all slots at once: an infinity would reach the rows of others.
        a.nan_to_num_(), b.nan_to_num_()
        if self.turned is not None:
            keys, down = self.turned
            keys[slot].copy_(b.unflatten(0, (self.heads, -1))[:, : self.key_dim].transpose(1, 2))
            down[slot].copy_(a.t())


class LoRAHeadLayer(LoRALayer):
    """The same of the head, which sees the tokens alone whose logits are wanted."""

    @property
    def tokens(self) -> Tensor | None:
        return self.slots.logit_tokens

    @property
    def assigned(self) -> Any:
        return self.slots.logit_assigned


class LoRAEmbeddingLayer(LoRALayer):
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

    def put(self, slot: int, factors: LoRAFactors) -> None:
        rank = factors.b.shape[-1]
        for own, given in zip(self._own, factors, strict=True):
            own[slot].narrow(-1, 0, rank).copy_(given, non_blocking=True)


def in_order() -> Tensor | None:
    """Outputs that lie where the checkpoint has them."""
    return None


class LoRATarget(NamedTuple):
    """A matrix of the checkpoint that an adapter may be of: what there is of it here, and where that goes."""

    point: LoRALayer
    part: slice
    """Those of the point that it is; several of a matrix that other checkpoints have apart."""
    inputs: Shard
    outputs: Runs
    order: Callable[[], Tensor | None] = in_order
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

    def of(self, factors: LoRAFactors) -> LoRAFactors:
        """Its own part of the point's: [parts, rank, size_in] and [outputs, rank]."""
        a, b = factors if self.expert is None else (each[self.expert] for each in factors)
        if self.is_table:
            return LoRAFactors(a, b)
        first, end = (sum(self.point.part_sizes[:end]) for end in (self.part.start, self.part.stop))
        return LoRAFactors(a.narrow(0, self.part.start, self.num_parts), b.narrow(0, first, end - first))


class LoRAStack(NamedTuple):
    """The experts of a layer: for each of their products, the place of every expert's matrix."""

    products: dict[str, list[LoRATarget]]


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
