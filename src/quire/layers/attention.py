"""PagedAttention: one layer's attention over its part of the cache."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from quire.attention.backend import AttentionSpec
from quire.attention.batch import Batch
from quire.checkpoint.layout import CacheSpec
from quire.kernels.ops import HeadEntry, HeadNorms
from quire.layers.kv_scales import KVScales
from quire.layers.rope import Rope
from quire.layers.scope import Scope, Target
from quire.quant.sharding import divided
from quire.quant.weight import kept


@runtime_checkable
class Caching(Protocol):
    """A layer that keeps something of the tokens that it has seen."""

    @property
    def keeps(self) -> CacheSpec: ...

    def bind_memory(self, memory: Tensor, *, block_size: int, cache_dtype: torch.dtype, group: int) -> None:
        """Use these bytes from now on: one plane after the other, each with a page for each block. For a
        state [rows, bytes_per_row], the last row for padding; a sequence whose first token is computed starts
        from nothing, whatever its row held. `group` is the one whose blocks are this layer's."""


class PagedAttention(nn.Module):
    """Queries and keys are normed (where the model has such norms), rotated, and attend."""

    def __init__(
        self,
        spec: AttentionSpec,
        rope: Rope,
        scope: Scope,
        alibi_slopes: tuple[float, ...] = (),
    ) -> None:
        """`alibi_slopes` are those of all heads of the model, where they have any."""
        super().__init__()
        self.spec = spec
        self.rope = rope
        self.norms: HeadNorms | None = None
        """Where each head's query and key have norms."""
        self.backend = scope.backend
        self.sinks = kept(scope.empty(spec.heads)) if spec.sinks else None
        self.sinks_name = f"{scope.name}.sinks"
        self.own_heads = divided(scope.group, spec.heads * scope.group.size)
        own = torch.tensor(alibi_slopes[self.own_heads.start :][: spec.heads], device=scope.device)
        self.alibi_slopes: Tensor | None
        self.register_buffer("alibi_slopes", own if spec.uses_alibi else None, persistent=False)
        self.scales = KVScales(scope.name, scope)
        self.k_cache: Tensor | None = None
        self.v_cache: Tensor | None = None
        self.group = 0

    @property
    def keeps(self) -> CacheSpec:
        window = self.spec.window
        numbers = self.spec.kv_heads * self.spec.head_dim
        return CacheSpec("full" if window is None else "window", numbers=numbers, window=window)

    def bind_memory(
        self,
        memory: Tensor,
        *,
        block_size: int,
        cache_dtype: torch.dtype,
        group: int,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        """`part`: which of how many layers it is that lie side by side there, token by token."""
        (own, count), spec = part, self.spec
        planes = memory.view(cache_dtype).view(2, -1, block_size, count, spec.kv_heads, spec.head_dim)
        k_cache, v_cache = (planes[at // count, :, :, at % count] for at in (2 * own, 2 * own + 1))
        self.bind(k_cache, v_cache, group)

    def bind(self, k_cache: Tensor, v_cache: Tensor, group: int = 0) -> None:
        """Use these caches from now on: [num_blocks, block_size, kv_heads, head_dim] each."""
        assert k_cache.shape[2:] == v_cache.shape[2:] == (self.spec.kv_heads, self.spec.head_dim)
        self.k_cache, self.v_cache, self.group = k_cache, v_cache, group
        scales = (self.scales.k, self.scales.v) if k_cache.itemsize == 1 else (1.0, 1.0)
        self.spec = replace(self.spec, k_scale=scales[0], v_scale=scales[1])

    def forward(self, x: Tensor, qkv: Callable[[Tensor, HeadEntry], Tensor], batch: Batch) -> Tensor:
        """[T, size_in] -> [T, heads * head_dim]; `qkv` makes queries, keys and values of it."""
        assert self.k_cache is not None and self.v_cache is not None, "bind() comes before forward()"
        spec, caches, batch = self.spec, (self.k_cache, self.v_cache), batch.groups[self.group]
        turns = self.rope.of(batch)
        entry = HeadEntry(spec.heads, *turns, batch.slots, *caches, self.norms, *spec.scales)
        return self.backend.forward(
            qkv(x, entry), *caches, batch, spec, self.sinks, self.alibi_slopes
        ).flatten(1)

    def targets(self) -> Iterator[Target]:
        if self.sinks is not None:
            yield Target(self.sinks_name, self.sinks, 0, (self.own_heads,))

    def finish(self) -> None:
        """Sinks are used as they were loaded."""


def attention_layers(modules: Iterable[nn.Module]) -> list[PagedAttention]:
    """Those of a model's modules that attend, in its order."""
    return [module for module in modules if isinstance(module, PagedAttention)]


def caching_layers(modules: Iterable[nn.Module]) -> list[Caching]:
    """Those that keep something, in the model's order."""
    return [module for module in modules if isinstance(module, Caching)]
