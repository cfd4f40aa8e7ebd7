"""Linear layers. A fused one names the parts of the checkpoint that it is made of."""

from collections.abc import Iterator

from torch import Tensor, nn

from quire.kernels.ops import Entry
from quire.layers.scope import Scope


class Linear(nn.Module):
    """x W^T + b, with the outputs of `parts` (checkpoint name -> size) one after the other."""

    def __init__(self, size_in: int, parts: dict[str, int], scope: Scope, *, bias: bool = False) -> None:
        super().__init__()
        self.part_names = tuple(parts)
        self.sizes_out = tuple(parts.values())
        self.method = scope.linear(self.part_names)
        self.method.create(self, size_in, self.sizes_out, bias=bias, dtype=scope.dtype, device=scope.device)

    def multiply(self, x: Tensor) -> Tensor:
        return self.method.apply(self, x)

    def targets(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensors in zip(self.part_names, self.method.parts(self, self.sizes_out), strict=True):
            yield from ((f"{name}.{suffix}", tensor) for suffix, tensor in tensors.items())

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
    """Query, key and value in one product; divided by heads."""

    def __init__(
        self, size_in: int, heads: int, kv_heads: int, head_dim: int, scope: Scope, *, bias: bool = False
    ) -> None:
        parts = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
        sizes = {scope.beside(name): num_heads * head_dim for name, num_heads in parts.items()}
        super().__init__(size_in, sizes, scope, bias=bias)
        self.heads = heads
        self.kv_heads = kv_heads
        self.ops = scope.ops

    def forward(self, x: Tensor, entry: Entry) -> Tensor:
        """[T, size_in] -> queries [T, heads, head_dim]; keys and values are written where `entry` says."""
        q = self.method.entered(self, x, entry)
        return self.ops.rotate_and_write(self.multiply(x), entry) if q is None else q


class GateUpLinear(Linear):
    """The gate and the up projection of a gated MLP in one product, and silu(gate) * up."""

    def __init__(self, size_in: int, size_out: int, scope: Scope, *, bias: bool = False) -> None:
        parts = {scope.beside("gate_proj"): size_out, scope.beside("up_proj"): size_out}
        super().__init__(size_in, parts, scope, bias=bias)
        self.ops = scope.ops

    def forward(self, x: Tensor) -> Tensor:
        """[T, size_in] -> [T, size_out]."""
        gated = self.method.gated(self, x)
        return self.ops.silu_mul(self.multiply(x)) if gated is None else gated
