"""Norms, with the residual addition that mostly comes before them."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from quire.checkpoint.facts import ArchFacts
from quire.kernels.ops import HeadNorms
from quire.layers.scope import Scope, Target
from quire.parallel.group import Group
from quire.quant.sharding import Shard
from quire.quant.weight import kept


class Norm(nn.Module):
    """What all norms share: a weight, and the residual that is added in where there is one."""

    def __init__(self, size: int | Shard, eps: float, scope: Scope, dtype: torch.dtype) -> None:
        super().__init__()
        self.run = Shard(size) if isinstance(size, int) else size
        """What this device has of its weight."""
        self.name = scope.name
        self.ops = scope.ops
        self.eps = eps
        weight = torch.empty(self.run.size, dtype=dtype, device=scope.device)
        self.weight = kept(weight)

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual), the latter in the memory of `residual` or x."""
        if residual is None:
            return self.alone(x), x
        return self.added(x, residual), residual

    def alone(self, x: Tensor) -> Tensor:
        """The norm of x."""
        raise NotImplementedError

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """x is added to `residual` in place; the norm of the sum."""
        raise NotImplementedError

    def targets(self) -> Iterator[Target]:
        yield Target(f"{self.name}.weight", self.weight, 0, (self.run,))

    def finish(self) -> None:
        """The weight is used as it was loaded."""


class RMSNorm(Norm):
    """RMS norm. With `plus_one` a weight of 0 multiplies by 1; then it is kept in float32, since little of it
    is left beside the 1 in a narrower type."""

    def __init__(self, size: int | Shard, eps: float, scope: Scope, *, plus_one: bool = False) -> None:
        super().__init__(size, eps, scope, torch.float32 if plus_one else scope.dtype)
        self.plus_one = plus_one

    def alone(self, x: Tensor) -> Tensor:
        return self.ops.norm(x, self.weight, self.eps)

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.ops.add_norm(x, residual, self.weight, self.eps)

    def finish(self) -> None:
        if self.plus_one:
            self.weight.add_(1)


class LayerNorm(Norm):
    """Mean and spread taken out, weight and bias put in."""

    def __init__(
        self, size: int | Shard, eps: float, scope: Scope, *, bias: bool = True, plus_one: bool = False
    ) -> None:
        super().__init__(size, eps, scope, scope.dtype)
        self.plus_one = plus_one
        self.bias = kept(scope.empty(self.run.size)) if bias else None

    def alone(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.ops.add_layer_norm(x, residual, self.weight, self.bias, self.eps)

    def targets(self) -> Iterator[Target]:
        yield from super().targets()
        if self.bias is not None:
            yield Target(f"{self.name}.bias", self.bias, 0, (self.run,))

    def finish(self) -> None:
        if self.plus_one:
            self.weight.add_(1)


class BareNorm(LayerNorm):
    """A layer norm of which checkpoints have nothing."""

    def __init__(self, size: int | Shard, eps: float, scope: Scope) -> None:
        super().__init__(size, eps, scope, bias=False)
        self.weight.fill_(1)

    def targets(self) -> Iterator[Target]:
        return iter(())


def norm_of(facts: ArchFacts, scope: Scope, size: int | Shard = 0) -> Norm:
    """The norm that a model has everywhere; of its hidden size, unless another is given."""
    size = size or facts.hidden
    plus_one = facts.norm.endswith("_plus_one")
    if facts.norm == "layer_bare":
        return BareNorm(size, facts.norm_eps, scope)
    if facts.norm.startswith("layer"):
        return LayerNorm(size, facts.norm_eps, scope, bias=facts.norm_bias, plus_one=plus_one)
    return RMSNorm(size, facts.norm_eps, scope, plus_one=plus_one)


def head_norms(norms: Sequence[Norm]) -> HeadNorms | None:
    """The norms of query and key as kernels want them; None where there are none."""
    if not norms:
        return None
    q_norm, k_norm = norms
    return HeadNorms(q_norm.weight, k_norm.weight, q_norm.eps)


def norm_shares(x: Tensor, weights: tuple[Tensor, ...], eps: float, *, group: Group) -> Tensor:
    """`Ops.norm_parts` of parts of which each device has a share."""
    parts = x.split([*map(len, weights), x.shape[1] - sum(map(len, weights))], 1)
    wide = [part.float() for part in parts[: len(weights)]]
    squares = group.all_reduce(torch.stack([part.square().sum(-1) for part in wide], 1))
    for i, weight in enumerate(weights):
        mean = squares[:, i : i + 1] / (group.size * len(weight))  # heads that several have count so often
        scaled = wide[i] * torch.rsqrt(mean + eps)
        parts[i].copy_(weight * scaled.to(weight.dtype))
    return x
