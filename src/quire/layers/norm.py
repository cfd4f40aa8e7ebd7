"""RMS norm and layer norm, fused with the residual addition before them."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quire.checkpoint.facts import ArchFacts
from quire.kernels import batch_invariant
from quire.kernels.ops import HeadNorms
from quire.layers.scope import LoadedModule, Scope, Target
from quire.parallel.group import Group
from quire.quant.sharding import Shard
from quire.quant.weight import frozen_parameter


class Norm(LoadedModule):
    """Base of RMS norm and layer norm: a weight, and an optional residual addition before the norm."""

    def __init__(
        self, size: int | Shard, eps: float, scope: Scope, dtype: torch.dtype, plus_one: bool = False
    ) -> None:
        super().__init__()
        self.offset = float(plus_one)
        """The normalized values are multiplied by the sum of this number and the weight: 1 for Gemma."""
        self.run = Shard(size) if isinstance(size, int) else size
        """Shard of the weight on this device."""
        self.name = scope.name
        self.ops = scope.ops
        self.eps = eps
        weight = torch.empty(self.run.size, dtype=dtype, device=scope.device)
        self.weight = frozen_parameter(weight)

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and the sum, which is written to `residual` in place. Without a
        residual, the sum is x."""
        if residual is None:
            return self.normalize(x), x
        return self.add_and_normalize(x, residual), residual

    def normalize(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def add_and_normalize(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add x to `residual` in place and return the norm of the sum."""
        raise NotImplementedError

    def targets(self) -> Iterator[Target]:
        yield Target(f"{self.name}.weight", self.weight, 0, (self.run,))

    def finish(self) -> None:
        if self.offset:
            self.weight.add_(self.offset)


class RMSNorm(Norm):
    """RMS norm. With `plus_one` the weight is stored in float32 to preserve the precision of small
    weights."""

    def __init__(self, size: int | Shard, eps: float, scope: Scope, *, plus_one: bool = False) -> None:
        super().__init__(size, eps, scope, torch.float32 if plus_one else scope.dtype, plus_one)

    def normalize(self, x: Tensor) -> Tensor:
        return self.ops.norm(x, self.weight, self.eps)

    def add_and_normalize(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.ops.add_norm(x, residual, self.weight, self.eps)


class LayerNorm(Norm):
    """Layer norm with weight and optional bias."""

    def __init__(
        self, size: int | Shard, eps: float, scope: Scope, *, bias: bool = True, plus_one: bool = False
    ) -> None:
        super().__init__(size, eps, scope, scope.dtype, plus_one)
        self.bias = frozen_parameter(scope.empty(self.run.size)) if bias else None

    def normalize(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def add_and_normalize(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)

    def targets(self) -> Iterator[Target]:
        yield from super().targets()
        if self.bias is not None:
            yield Target(f"{self.name}.bias", self.bias, 0, (self.run,))


class BareNorm(LayerNorm):
    """Layer norm without weight and bias."""

    def __init__(self, size: int | Shard, eps: float, scope: Scope) -> None:
        super().__init__(size, eps, scope, bias=False)
        self.weight.fill_(1)

    def targets(self) -> Iterator[Target]:
        return iter(())


def norm_of(facts: ArchFacts, scope: Scope, size: int | Shard = 0) -> Norm:
    """Build the model's kind of norm; `size` defaults to the hidden size."""
    size = size or facts.hidden
    plus_one = facts.norm.endswith("_plus_one")
    if facts.norm == "layer_bare":
        return BareNorm(size, facts.norm_eps, scope)
    if facts.norm.startswith("layer"):
        return LayerNorm(size, facts.norm_eps, scope, bias=facts.norm_bias, plus_one=plus_one)
    return RMSNorm(size, facts.norm_eps, scope, plus_one=plus_one)


def head_norms(norms: Sequence[Norm]) -> HeadNorms | None:
    """Return the weights and epsilon of the query and key norm for kernels; None if `norms` is empty."""
    if not norms:
        return None
    q_norm, k_norm = norms
    return HeadNorms(q_norm.weight, k_norm.weight, q_norm.eps)


def norm_sharded_parts(x: Tensor, weights: tuple[Tensor, ...], eps: float, *, group: Group) -> Tensor:
    """Apply an RMS norm to each of the first parts of x [T, size] in place, like `Ops.norm_parts`, if each
    part is sharded over a tensor-parallel group. `weights` has the weight of each part on this device."""
    parts = x.split([*map(len, weights), x.shape[1] - sum(map(len, weights))], 1)
    wide = [part.float() for part in parts[: len(weights)]]
    squares = group.all_reduce(torch.cat([sum_of_squares(part) for part in wide], 1))
    for i, weight in enumerate(weights):
        mean = squares[:, i : i + 1] / (group.size * len(weight))  # replicated heads count several times
        scaled = wide[i] * torch.rsqrt(mean + eps)
        parts[i].copy_(weight * scaled.to(weight.dtype))
    return x


def sum_of_squares(x: Tensor) -> Tensor:
    """Return the sum of squares [T, 1] of each row. In batch-invariant mode, halves of a row are added until
    one column is left, because the order of torch's sum depends on the number of rows."""
    squares = x.square()
    while batch_invariant.is_on() and squares.shape[1] > 1:
        half = squares.shape[1] // 2
        left, right, odd = squares.split([half, half, squares.shape[1] % 2], 1)
        squares = torch.cat((left + right, odd), 1)
    return squares.sum(1, keepdim=True)
