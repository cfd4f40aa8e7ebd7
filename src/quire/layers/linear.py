"""Linear layers. A fused one names the parts of the checkpoint that it is made of."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quire.kernels.ops import Entry, HeadNorms
from quire.layers.rope import halved
from quire.layers.scope import Scope


class Linear(nn.Module):
    """x W^T + b, with the outputs of `parts` (checkpoint name -> size) one after the other."""

    def __init__(self, size_in: int, parts: dict[str, int], scope: Scope, *, bias: bool = False) -> None:
        super().__init__()
        self.part_names = tuple(parts)
        self.sizes_out = tuple(parts.values())
        self.across = scope.across
        self.method = scope.linear(self.part_names)
        self.method.create(self, size_in, self.sizes_out, bias=bias, dtype=scope.dtype, device=scope.device)

    def multiply(self, x: Tensor) -> Tensor:
        return self.method.apply(self, x)

    def targets(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensors in zip(self.part_names, self.method.parts(self, self.sizes_out), strict=True):
            for suffix, tensor in tensors.items():
                yield f"{name}.{suffix}", tensor.t() if self.across else tensor

    def finish(self) -> None:
        self.method.finish(self)


class ColumnLinear(Linear):
    """Divided by its outputs: each device of a group computes some of them."""

    def __init__(self, size_in: int, size_out: int, scope: Scope, *, bias: bool = False) -> None:
        super().__init__(size_in, {scope.name: size_out}, scope, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x)


class RowLinear(Linear):
    """Divided by its inputs, which a column-divided layer made: the devices' results are summed."""

    def __init__(self, size_in: int, size_out: int, scope: Scope, *, bias: bool = False) -> None:
        super().__init__(size_in, {scope.name: size_out}, scope, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x)


class QKVLinear(Linear):
    """Query, key and value in one product; divided by heads. `names` are theirs in the checkpoint, or one of
    all three, which may have those of one head beside each other (`by_head`)."""

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
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.paired_dim = paired_dim
        self.by_head = by_head
        self.ops = scope.ops
        self.norms: HeadNorms | None = None
        """Where queries and keys have norms over all heads."""

    def finish(self) -> None:
        if self.by_head:
            order = torch.arange(sum(self.sizes_out)).view(self.heads, 3, -1).transpose(0, 1).flatten()
            self.method.reorder(self, self.sizes_out, [order])
        if self.paired_dim:
            q, k, v = (num_heads * self.head_dim for num_heads in (self.heads, self.kv_heads, self.kv_heads))
            orders = [*(halved(size, self.head_dim, self.paired_dim) for size in (q, k)), torch.arange(v)]
            if len(self.sizes_out) == 1:
                orders = [torch.cat((orders[0], orders[1] + q, orders[2] + q + k))]
            self.method.reorder(self, self.sizes_out, orders)
        super().finish()

    def forward(self, x: Tensor, entry: Entry) -> Tensor:
        """[T, size_in] -> queries [T, heads, head_dim]; keys and values are written where `entry` says."""
        if self.norms is not None:
            qkv = self.ops.norm_parts(self.multiply(x), (self.norms.q, self.norms.k), self.norms.eps)
            return self.ops.rotate_and_write(qkv, entry)
        q = self.method.entered(self, x, entry)
        return self.ops.rotate_and_write(self.multiply(x), entry) if q is None else q


class GateUpLinear(Linear):
    """The gate and the up projection of a gated MLP in one product, and act(gate) * up. `names` are theirs in
    the checkpoint, or one of both."""

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
        self.ops = scope.ops
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """[T, size_in] -> [T, size_out]."""
        gated = self.method.gated(self, x) if self.activation == "silu" else None
        return self.ops.gated(self.multiply(x), self.activation) if gated is None else gated
