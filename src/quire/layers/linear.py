"""Linear layers. A fused one names the parts of the checkpoint that it is made of."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from quire.kernels.ops import HeadEntry, HeadNorms
from quire.layers.lora import AdapterSlots
from quire.layers.lora_layers import LoRALayer, LoRARanksLayer, LoRASumLayer, LoRATarget
from quire.layers.norm import norm_shares
from quire.layers.rope import halved
from quire.layers.scope import Scope, Target, once, target_of
from quire.quant.sharding import Runs, Shard, by_group, divided, of_heads
from quire.quant.weight import LinearShape

_LEAST_OUTPUTS = 16
"""Of a weight that is worth narrowing."""


class Linear(nn.Module):
    """x W^T + b, with the outputs of `parts` (checkpoint name -> size) one after the other. A part of which a
    device of a group has some only says which, unless all are `divided` alike."""

    divided: ClassVar[Literal["outputs", "inputs"] | None] = None
    """What each device of a group has an equal share of."""
    is_summed: ClassVar[bool] = False
    """Whether the devices' results are added up, so that a bias counts on one of them."""
    narrows: ClassVar[bool] = True
    """Whether its weight may be kept in fewer bits than it is stored in."""
    multiply: Callable[[Tensor], Tensor]
    """[T, size_in] -> [T, outputs of all parts]; there after `finish`."""

    def __init__(
        self, size_in: int, parts: Mapping[str, int | Runs], scope: Scope, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.group = scope.group
        self.part_names = tuple(parts)
        self.outputs = tuple(self._runs(part) for part in parts.values())
        self.inputs = divided(scope.group, size_in) if self.divided == "inputs" else Shard(size_in)
        self.sizes_out = tuple(sum(run.size for run in runs) for runs in self.outputs)
        self.across = scope.across
        num_outputs = sum(run.all for runs in self.outputs for run in runs)
        shape = LinearShape(
            self.inputs.size,
            self.sizes_out,
            bias,
            scope.dtype,
            scope.device,
            narrows=self.narrows and num_outputs >= _LEAST_OUTPUTS,
            outputs=self.outputs,
            inputs=self.inputs,
        )
        self.weight = scope.linear(self.part_names, shape)
        self.point = self._point(scope)
        """Where adapters are added; None: nowhere."""

    def _point(self, scope: Scope) -> LoRALayer | None:
        slots = scope.adapters
        if slots is None or not slots.takes(scope.name, *self.part_names):
            return None
        point = self._point_of(slots, scope)
        own = ((point.own,),) if isinstance(point, LoRASumLayer) else self.outputs
        for i, (name, outputs) in enumerate(zip(self.part_names, own, strict=True)):
            if slots.takes(scope.name, name):
                order = partial(self._order, i)
                point.places[name] = LoRATarget(point, slice(i, i + 1), self.inputs, outputs, order)
        return point

    def _point_of(self, slots: AdapterSlots, scope: Scope) -> LoRALayer:
        given = self.part_names[0], slots, self.inputs.size
        if slots.divides and scope.group.size > 1:
            if self.divided == "outputs":
                return LoRARanksLayer(*given, self.sizes_out, scope.ops, scope.group)
            if self.divided == "inputs" and self.sizes_out[0] % scope.group.size == 0:
                return LoRASumLayer(*given, self.sizes_out[0], scope.ops, scope.group)
        return LoRALayer(*given, self.sizes_out, scope.ops)

    def _order(self, part: int) -> Tensor | None:
        orders = self.orders()
        return orders[part] if orders else None

    @property
    def adapts(self) -> bool:
        """Whether an adapter is to be added to the product of some token of the step."""
        return self.point is not None and self.point.tokens is not None

    def orders(self) -> list[Tensor]:
        """For each part, where each of its outputs lies in the checkpoint; empty: they lie in order."""
        return []

    def _runs(self, part: int | Runs) -> Runs:
        if not isinstance(part, int):
            return part
        return (divided(self.group, part) if self.divided == "outputs" else Shard(part),)

    def targets(self) -> Iterator[Target]:
        by_inputs = self.divided == "inputs"
        for name, part, outputs in zip(self.part_names, self.weight.parts(), self.outputs, strict=True):
            runs = (self.inputs,) if by_inputs else outputs
            for suffix, piece in part.items():
                target = target_of(f"{name}.{suffix}", piece, runs, by_inputs=by_inputs)
                yield target.turned() if self.across else target

    def begin(self) -> None:
        self.weight.begin()

    def finish(self) -> None:
        if orders := self.orders():
            self.weight.reorder(orders)
        if self.is_summed:
            for part in self.weight.parts():
                if "bias" in part:
                    once(self.group, part["bias"].tensor)
        self.weight.finish()
        self.equip()

    def equip(self) -> None:
        """Take over what the finished weight can do."""
        self.multiply = self.weight.product if self.point is None else self._adapted

    def _adapted(self, x: Tensor) -> Tensor:
        assert self.point is not None
        if self.weight.adapted is not None and self.adapts and (adapted := self.point.adapted) is not None:
            return self.weight.adapted(x, adapted=adapted)
        return self.point.add(self.weight.product(x), x)


class OneLinear(Linear):
    """A linear layer of one part."""

    def __init__(self, size_in: int, size_out: int, scope: Scope, *, bias: bool = False) -> None:
        super().__init__(size_in, {scope.name: size_out}, scope, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x)


class WholeLinear(OneLinear):
    """Not divided: each device of a group computes all of it."""


class ColumnLinear(OneLinear):
    """Divided by its outputs: each device of a group computes some of them."""

    divided = "outputs"


class RowLinear(OneLinear):
    """Divided by its inputs, which a column-divided layer made: the devices' results are summed, unless
    something is added to them first (`sums`)."""

    divided = "inputs"
    is_summed = True
    of_gates: Callable[[Tensor], Tensor] | None = None
    """The weight's own product of what is not gated yet."""

    def __init__(
        self, size_in: int, size_out: int, scope: Scope, *, bias: bool = False, sums: bool = True
    ) -> None:
        super().__init__(size_in, size_out, scope, bias=bias)
        self.sums = sums and scope.group.size > 1

    def equip(self) -> None:
        super().equip()
        self.of_gates = self.weight.of_gates
        if self.sums:
            self.multiply = partial(_summed, self.multiply, self.group.all_reduce)
            if self.of_gates is not None:
                self.of_gates = partial(_summed, self.of_gates, self.group.all_reduce)


def _summed(product: Callable[[Tensor], Tensor], sum: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return sum(product(x))


class QKVLinear(Linear):
    """Query, key and value in one product; divided by heads. `names` are theirs in the checkpoint, or one of
    all three, which may have those of one head of keys beside each other (`by_head`), or two: then `bounded`
    makes the values."""

    divided = "outputs"

    def __init__(
        self,
        size_in: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scope: Scope,
        *,
        bias: bool = False,
        names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
        paired_dim: int = 0,
        by_head: bool = False,
    ) -> None:
        group = scope.group
        q, kv = divided(group, heads * head_dim), of_heads(group, kv_heads, head_dim)
        parts: list[Runs] = [(q,), (kv,), (kv,)]
        parts = parts[: len(names)] if len(names) > 1 else [(q, kv, kv)]
        if by_head:
            parts = [by_group(group, kv_heads, (q, kv, kv))]
        named = {scope.beside(name): runs for name, runs in zip(names, parts, strict=True)}
        super().__init__(size_in, named, scope, bias=bias)
        self.heads, self.kv_heads = q.size // head_dim, kv.size // head_dim
        self.head_dim = head_dim
        self.paired_dim = paired_dim
        self.by_head = by_head
        self.ops = scope.ops
        self.norms: HeadNorms | None = None
        """Where queries and keys have norms over all heads."""
        self.bounded: Callable[[Tensor], Tensor] | None = None
        """What else is done to queries, keys and values before they turn."""
        self.norm_parts = scope.ops.norm_parts
        if group.size > 1:
            self.norm_parts = partial(norm_shares, group=group)
        self.entered: Callable[[Tensor, HeadEntry], Tensor | None] | None = None
        """The weight's own way into the cache."""

    def orders(self) -> list[Tensor]:
        q, k, v = (num_heads * self.head_dim for num_heads in (self.heads, self.kv_heads, self.kv_heads))
        together: list[Tensor] = []
        if self.by_head:
            stored = torch.arange(q + k + v).view(self.kv_heads, -1, self.head_dim)
            together = [torch.cat([part.flatten() for part in stored.tensor_split((-2, -1), 1)])]
        if not self.paired_dim:
            return together
        orders = [*(halved(size, self.head_dim, self.paired_dim) for size in (q, k)), torch.arange(v)]
        if len(self.part_names) == 1:
            orders = [torch.cat((orders[0], orders[1] + q, orders[2] + q + k))]
        return [together[0][orders[0]]] if together else orders

    def equip(self) -> None:
        super().equip()
        self.entered = self.weight.entered

    def forward(self, x: Tensor, entry: HeadEntry) -> Tensor:
        """[T, size_in] -> queries [T, heads, head_dim]; keys and values are written where `entry` says."""
        if self.norms is not None or self.bounded is not None:
            qkv = self.multiply(x)
            if self.norms is not None:
                qkv = self.norm_parts(qkv, (self.norms.q, self.norms.k), self.norms.eps)
            return self.ops.rotate_and_write(qkv if self.bounded is None else self.bounded(qkv), entry)
        q = self._entered(x, entry)
        return self.ops.rotate_and_write(self.multiply(x), entry) if q is None else q

    def _entered(self, x: Tensor, entry: HeadEntry) -> Tensor | None:
        """None where the weight has no such way."""
        if self.point is None or not self.adapts:
            return None if self.entered is None else self.entered(x, entry)
        enter, adapted = self.weight.entered_adapted, self.point.adapted
        return None if enter is None or adapted is None else enter(x, entry, adapted=adapted)


class KeysWithoutBias(QKVLinear):
    """Queries and values have a bias in the checkpoint, keys have none."""

    def targets(self) -> Iterator[Target]:
        return without_bias(self.part_names[1], super().targets())


def without_bias(part: str, targets: Iterator[Target]) -> Iterator[Target]:
    """Those of a layer of whose parts one has no bias in the checkpoint: it is zero."""
    for target in targets:
        if target.name == f"{part}.bias":
            target.tensor.zero_()
        else:
            yield target


class GateUpLinear(Linear):
    """The gate and the up projection of a gated MLP in one product, and act(gate) * up. `names` are theirs in
    the checkpoint, or one of both."""

    divided = "outputs"

    def __init__(
        self,
        size_in: int,
        size_out: int,
        scope: Scope,
        *,
        bias: bool = False,
        activation: str = "silu",
        names: tuple[str, ...] = ("gate_proj", "up_proj"),
    ) -> None:
        own = divided(scope.group, size_out)
        parts = {scope.beside(name): (own,) * (2 // len(names)) for name in names}
        super().__init__(size_in, parts, scope, bias=bias)
        self.ops = scope.ops
        self.activation = activation
        self.gated: Callable[[Tensor], Tensor] | None = None
        """The weight's own activated product."""

    def equip(self) -> None:
        super().equip()
        self.gated = self.weight.gated if self.activation == "silu" else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, size_in] -> [T, size_out]."""
        if self.gated is not None and not self.adapts:
            return self.gated(x)
        adapted = None if self.point is None else self.point.adapted
        if adapted is not None and self.gated is not None and self.weight.gated_adapted is not None:
            return self.weight.gated_adapted(x, adapted=adapted)
        return self.ops.gated(self.multiply(x), self.activation)
