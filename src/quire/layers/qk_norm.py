"""Per-head layer norms of queries and keys, and clipping of QKV."""

from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.nn import functional as F

from quire.checkpoint.facts import ArchFacts
from quire.layers.linear import QKVLinear
from quire.layers.rope import half_split_order
from quire.layers.scope import Scope, Target
from quire.quant.sharding import of_heads
from quire.quant.weight import frozen_parameter


class HeadLayerNorm(nn.Module):
    """Layer norm of each head of queries or keys. All heads share one weight, or each has its own;
    checkpoints store the weights of the heads as one tensor or as a list."""

    def __init__(self, heads: int, facts: ArchFacts, paired_dim: int, scope: Scope) -> None:
        super().__init__()
        self.name, self.eps, self.paired_dim = scope.name, facts.norm_eps, paired_dim
        self.shard = of_heads(scope.group, heads, 1)
        self.is_per_head = facts.qk_norm == "each"
        self.in_list = scope.is_stored(f"{scope.name}.norms.0.weight")
        shape = (self.shard.size if self.is_per_head else 1, facts.head_dim)
        self.weight = frozen_parameter(scope.empty(*shape))
        biased = facts.norm_bias and not self.is_per_head
        self.bias = frozen_parameter(scope.empty(*shape)) if biased else None

    def targets(self) -> Iterator[Target]:
        if self.in_list:
            for i, weight in enumerate(self.weight, start=self.shard.start):
                yield Target(f"{self.name}.norms.{i}.weight", weight)
        elif self.is_per_head:
            yield Target(f"{self.name}.weight", self.weight, 0, (self.shard,))
        else:
            yield Target(f"{self.name}.weight", self.weight[0])
        if self.bias is not None:
            yield Target(f"{self.name}.bias", self.bias[0])

    def finish(self) -> None:
        """Reorder the elements of each head if the model has interleaved RoPE. The rows of the Q and K
        projections are reordered alike (`half_split_order`), so that half-split RoPE can be computed."""
        if self.paired_dim:
            dim = self.weight.shape[1]
            order = half_split_order(dim, dim, self.paired_dim)
            for tensor in (self.weight, self.bias):
                if tensor is not None:
                    tensor.copy_(tensor[:, order].clone())

    def forward(self, x: Tensor) -> None:
        """Normalize [T, heads, head_dim] in place."""
        normed = F.layer_norm(x.float(), x.shape[-1:], eps=self.eps) * self.weight
        x.copy_(normed if self.bias is None else normed + self.bias)


class NormedHeads(nn.Module):
    """Per-head layer norms of queries and keys, applied before RoPE."""

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


def clipped(limit: float) -> Callable[[Tensor], Tensor]:
    """Return a function that clamps concatenated queries, keys and values in place to [-limit, limit]."""

    def clip(qkv: Tensor) -> Tensor:
        return qkv.clamp_(-limit, limit)

    return clip
