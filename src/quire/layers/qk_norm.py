"""Layer norms of queries and keys, head by head, and bounds of their numbers."""

from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.nn import functional as F

from quire.checkpoint.facts import ArchFacts
from quire.layers.linear import QKVLinear
from quire.layers.rope import halved
from quire.layers.scope import Scope, Target
from quire.quant.sharding import of_heads
from quire.quant.weight import kept


class HeadLayerNorm(nn.Module):
    """A layer norm of each head, by one weight for all heads or by weights of their own; those may lie in one
    tensor or in one each."""

    def __init__(self, heads: int, facts: ArchFacts, paired_dim: int, scope: Scope) -> None:
        super().__init__()
        self.name, self.eps, self.paired_dim = scope.name, facts.norm_eps, paired_dim
        self.own = of_heads(scope.group, heads, 1)
        self.is_each = facts.qk_norm == "each"
        self.in_list = scope.is_stored(f"{scope.name}.norms.0.weight")
        shape = (self.own.size if self.is_each else 1, facts.head_dim)
        self.weight = kept(scope.empty(*shape))
        biased = facts.norm_bias and not self.is_each
        self.bias = kept(scope.empty(*shape)) if biased else None

    def targets(self) -> Iterator[Target]:
        if self.in_list:
            for i, weight in enumerate(self.weight, start=self.own.start):
                yield Target(f"{self.name}.norms.{i}.weight", weight)
        elif self.is_each:
            yield Target(f"{self.name}.weight", self.weight, 0, (self.own,))
        else:
            yield Target(f"{self.name}.weight", self.weight[0])
        if self.bias is not None:
            yield Target(f"{self.name}.bias", self.bias[0])

    def finish(self) -> None:
        """Heads whose neighbours turn together come in another order than they are stored in."""
        if self.paired_dim:
            dim = self.weight.shape[1]
            order = halved(dim, dim, self.paired_dim)
            for tensor in (self.weight, self.bias):
                if tensor is not None:
                    tensor.copy_(tensor[:, order].clone())

    def forward(self, x: Tensor) -> None:
        """[T, heads, head_dim], in place."""
        normed = F.layer_norm(x.float(), x.shape[-1:], eps=self.eps) * self.weight
        x.copy_(normed if self.bias is None else normed + self.bias)


class NormedHeads(nn.Module):
    """What queries and keys are before they turn."""

    def __init__(
        self, names: tuple[str, str], qkv: QKVLinear, facts: ArchFacts, paired_dim: int, scope: Scope
    ) -> None:
        super().__init__()
        self.sizes = (qkv.heads, qkv.kv_heads, qkv.kv_heads)
        self.head_dim = qkv.head_dim
        q, k = (scope / name for name in names)
        self.q = HeadLayerNorm(facts.heads, facts, paired_dim, q)
        self.k = HeadLayerNorm(facts.kv_heads, facts, paired_dim, k)

    def forward(self, qkv: Tensor) -> Tensor:
        q, k, _ = qkv.view(len(qkv), -1, self.head_dim).split(self.sizes, 1)
        self.q(q)
        self.k(k)
        return qkv


def clipped(most: float) -> Callable[[Tensor], Tensor]:
    """Numbers no further from 0 than this."""

    def clip(qkv: Tensor) -> Tensor:
        return qkv.clamp_(-most, most)

    return clip
