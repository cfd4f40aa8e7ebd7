"""Linear layers. A fused one names the parts of the checkpoint that it is made of."""

from collections.abc import Callable, Iterator
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from quire.kernels.ops import Entry, HeadNorms
from quire.layers.rope import halved
from quire.layers.scope import Scope, Target
from quire.quant.weight import LinearShape, Text

_LEAST_OUTPUTS = 16
"""Of a weight that is worth narrowing."""


class Linear(nn.Module):
    """x W^T + b, with the outputs of `parts` (checkpoint name -> size) one after the other."""

    divided: ClassVar[Literal["outputs", "inputs"] | None] = None
    """What each device of a group has some of."""
    narrows: ClassVar[bool] = True
    """Whether its weight may be kept in fewer bits than it is stored in."""
    multiply: Callable[[Tensor], Tensor]
    """[T, size_in] -> [T, outputs of all parts]; there after `finish`."""

    def __init__(self, size_in: int, parts: dict[str, int], scope: Scope, *, bias: bool = False) -> None:
        super().__init__()
        share = scope.group.share
        outputs = map(share, parts.values()) if self.divided == "outputs" else parts.values()
        inputs = share(size_in) if self.divided == "inputs" else size_in
        self.part_names, self.sizes_out = tuple(parts), tuple(outputs)
        self.across = scope.across
        self.stacked: tuple[int, ...] = ()
        """Sizes of what the one part is made of, where it is more than one thing."""
        narrows = self.narrows and sum(self.sizes_out) >= _LEAST_OUTPUTS
        shape = LinearShape(inputs, self.sizes_out, bias, scope.dtype, scope.device, narrows)
        self.weight = scope.linear(self.part_names, shape)

    def targets(self) -> Iterator[Target]:
        for name, part in zip(self.part_names, self.weight.parts(), strict=True):
            for suffix, piece in part.items():
                tensor, axis = piece.tensor, piece.along(self.divided)
                if self.across:
                    tensor, axis = tensor.t(), None if axis is None else tensor.ndim - 1 - axis
                stacked = () if axis is None else self.stacked
                yield Target(f"{name}.{suffix}", tensor, axis, stacked, isinstance(piece, Text))

    def begin(self) -> None:
        self.weight.begin()

    def finish(self) -> None:
        self.weight.finish()
        self.equip()

    def equip(self) -> None:
        """Take over what the finished weight can do."""
        self.multiply = self.weight.product


class ColumnLinear(Linear):
    """Divided by its outputs: each device of a group computes some of them."""

    divided = "outputs"

    def __init__(self, size_in: int, size_out: int, scope: Scope, *, bias: bool = False) -> None:
        super().__init__(size_in, {scope.name: size_out}, scope, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x)


class RowLinear(Linear):
    """Divided by its inputs, which a column-divided layer made: the devices' results are summed."""

    divided = "inputs"

    def __init__(self, size_in: int, size_out: int, scope: Scope, *, bias: bool = False) -> None:
        super().__init__(size_in, {scope.name: size_out}, scope, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x)


class QKVLinear(Linear):
    """Query, key and value in one product; divided by heads. `names` are theirs in the checkpoint, or one of
    all three, which may have those of one head beside each other (`by_head`)."""

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
        sizes = [num_heads * head_dim for num_heads in (heads, kv_heads, kv_heads)]
        parts = dict(zip(names, sizes if len(names) > 1 else [sum(sizes)], strict=True))
        super().__init__(
            size_in, {scope.beside(name): size for name, size in parts.items()}, scope, bias=bias
        )
        self.heads, self.kv_heads = scope.group.share(heads), scope.group.share(kv_heads)
        if len(names) == 1 and not by_head:
            self.stacked = tuple(map(scope.group.share, sizes))
        self.head_dim = head_dim
        self.paired_dim = paired_dim
        self.by_head = by_head
        self.ops = scope.ops
        self.norms: HeadNorms | None = None
        """Where queries and keys have norms over all heads."""
        self.entered: Callable[[Tensor, Entry], Tensor | None] | None = None
        """The weight's own way into the cache."""

    def finish(self) -> None:
        q, k, v = (num_heads * self.head_dim for num_heads in (self.heads, self.kv_heads, self.kv_heads))
        if self.by_head:
            order = torch.arange(q + k + v).view(self.heads, 3, -1).transpose(0, 1).flatten()
            self.weight.reorder([order])
        if self.paired_dim:
            orders = [*(halved(size, self.head_dim, self.paired_dim) for size in (q, k)), torch.arange(v)]
            if len(self.part_names) == 1:
                orders = [torch.cat((orders[0], orders[1] + q, orders[2] + q + k))]
            self.weight.reorder(orders)
        super().finish()

    def equip(self) -> None:
        super().equip()
        self.entered = self.weight.entered

    def forward(self, x: Tensor, entry: Entry) -> Tensor:
        """[T, size_in] -> queries [T, heads, head_dim]; keys and values are written where `entry` says."""
        if self.norms is not None:
            qkv = self.ops.norm_parts(self.multiply(x), (self.norms.q, self.norms.k), self.norms.eps)
            return self.ops.rotate_and_write(qkv, entry)
        q = None if self.entered is None else self.entered(x, entry)
        return self.ops.rotate_and_write(self.multiply(x), entry) if q is None else q


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
        parts = {scope.beside(name): 2 * size_out // len(names) for name in names}
        super().__init__(size_in, parts, scope, bias=bias)
        if len(names) == 1:
            self.stacked = (scope.group.share(size_out),) * 2
        self.ops = scope.ops
        self.activation = activation
        self.gated: Callable[[Tensor], Tensor] | None = None
        """The weight's own activated product."""

    def equip(self) -> None:
        super().equip()
        self.gated = self.weight.gated if self.activation == "silu" else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, size_in] -> [T, size_out]."""
        if self.gated is not None:
            return self.gated(x)
        return self.ops.gated(self.multiply(x), self.activation)
