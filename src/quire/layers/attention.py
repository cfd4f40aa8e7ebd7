"""PagedAttention: one layer's attention over its part of the cache."""

from torch import Tensor, nn

from quire.attention.backend import AttentionSpec
from quire.attention.batch import Batch
from quire.layers.scope import Scope


class PagedAttention(nn.Module):
    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, scope: Scope, *, window: int | None = None
    ) -> None:
        super().__init__()
        self.spec = AttentionSpec(heads, kv_heads, head_dim, scope.dtype, window)
        self.backend = scope.backend
        self.k_cache: Tensor | None = None
        self.v_cache: Tensor | None = None

    def bind(self, k_cache: Tensor, v_cache: Tensor) -> None:
        """Use these caches from now on: [num_blocks, block_size, kv_heads, head_dim] each."""
        assert k_cache.shape[2:] == v_cache.shape[2:] == (self.spec.kv_heads, self.spec.head_dim)
        self.k_cache, self.v_cache = k_cache, v_cache

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Query [T, heads, head_dim], key and value [T, kv_heads, head_dim] -> [T, heads * head_dim]."""
        assert self.k_cache is not None and self.v_cache is not None, "bind() comes before forward()"
        self.backend.write(k, v, self.k_cache, self.v_cache, batch.slots)
        return self.backend.forward(q, self.k_cache, self.v_cache, batch, self.spec).flatten(1)


def attention_layers(model: nn.Module) -> list[PagedAttention]:
    """The layers that want a cache, in the order of the model."""
    return [module for module in model.modules() if isinstance(module, PagedAttention)]
