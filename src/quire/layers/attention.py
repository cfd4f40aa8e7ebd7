"""PagedAttention: attention of one layer over its part of the KV cache."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from quire.attention.backend import AttentionSpec
from quire.attention.batch import Batch
from quire.checkpoint.layout import SCALE_BYTES, CacheSpec
from quire.kernels.ops import HeadEntry, HeadNorms
from quire.kernels.reference.ops import head_size
from quire.layers.rope import Rope
from quire.layers.scope import LoadedModule, Scope, Target
from quire.quant.sharding import divided
from quire.quant.weight import frozen_parameter

_SCALE_NAMES = {
    "k": ("k_scale", "attn.k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale"),
    "v": ("v_scale", "attn.v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale"),
}
"""Checkpoint names of the KV cache scales, relative to an attention layer, in order of preference."""


class Caching(Protocol):
    """A layer with cache memory: a KV cache, a cache of MLA latents, or SSM states."""

    @property
    def cache_spec(self) -> CacheSpec: ...

    def bind_memory(self, memory: Tensor, *, block_size: int, cache_dtype: torch.dtype, group: int) -> None:
        """Use `memory` as the cache. A KV cache consists of a plane of keys and a plane of values, or one
        plane of latents (MLA); each plane has one page per block. An SSM state is [rows, bytes_per_row], with
        the last row for padding; the first token of a sequence resets its row. `group` is the layer's KV
        cache group, which has its own block tables."""


class KVScales(LoadedModule):
    """Scales of the cached keys and values of an attention layer; 1.0 if the checkpoint has none."""

    def __init__(self, attention: str, scope: Scope) -> None:
        super().__init__()
        self._stored: dict[str, str] = {}
        self.values = nn.ParameterDict()
        for kind, names in _SCALE_NAMES.items():
            stored = [name for end in names if scope.is_stored(name := f"{attention}.{end}")]
            if not stored or stored[0] in self._stored.values():
                continue
            self._stored[kind] = stored[0]
            value = torch.ones(1, dtype=torch.float32, device=scope.device)
            self.values[kind] = frozen_parameter(value)

    @property
    def k(self) -> float:
        return float(self.values["k"]) if "k" in self.values else 1.0

    @property
    def v(self) -> float:
        """Return the scale of cached values. A checkpoint with one scale for both keys and values (kv_scale)
        is loaded into the scale of keys, which is returned then."""
        shared = "v" not in self.values and self._stored.get("k", "").endswith(".kv_scale")
        return self.k if shared else float(self.values["v"]) if "v" in self.values else 1.0

    def targets(self) -> Iterator[Target]:
        for kind, name in self._stored.items():
            yield Target(name, self.values[kind])


class PagedAttention(LoadedModule):
    """Attention of one decoder layer: optional QK norm, RoPE, KV cache write, and paged attention."""

    def __init__(
        self, spec: AttentionSpec, rope: Rope, scope: Scope, alibi_slopes: tuple[float, ...] = ()
    ) -> None:
        """Build the layer. `alibi_slopes` holds the slopes of all heads of the model; empty without ALiBi."""
        super().__init__()
        self.spec = spec
        self.rope = rope
        self.norms: HeadNorms | None = None
        """Weights of the QK norms of each head; None if the model has no such norms."""
        self.backend, self.ops = scope.backend, scope.ops
        self.sinks = frozen_parameter(scope.empty(spec.heads)) if spec.sinks else None
        self.sinks_name = f"{scope.name}.sinks"
        self.local_heads = divided(scope.group, spec.heads * scope.group.size)
        slopes = torch.tensor(alibi_slopes[self.local_heads.start :][: spec.heads], device=scope.device)
        self.alibi_slopes: Tensor | None
        self.register_buffer("alibi_slopes", slopes if spec.uses_alibi else None, persistent=False)
        self.scales = KVScales(scope.name, scope)
        self.k_cache: Tensor | None = None
        self.v_cache: Tensor | None = None
        self.group = 0

    @property
    def cache_spec(self) -> CacheSpec:
        window = self.spec.window
        numbers = self.spec.kv_heads * self.spec.head_dim
        kind = "full" if window is None else "window"
        return CacheSpec(kind, elements=numbers, window=window, heads=self.spec.kv_heads)

    def bind_memory(
        self,
        memory: Tensor,
        *,
        block_size: int,
        cache_dtype: torch.dtype,
        group: int,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        """Use `memory` as the KV cache; `group` is the index of its KV cache group. `part` is (index, count):
        `count` layers share the memory, interleaved by token, and this layer is number `index`."""
        (index, count), spec = part, self.spec
        size = spec.head_dim + (SCALE_BYTES if cache_dtype == torch.int8 else 0)
        planes = memory.view(cache_dtype).view(2, -1, block_size, count, spec.kv_heads, size)
        k_cache, v_cache = (planes[at // count, :, :, at % count] for at in (2 * index, 2 * index + 1))
        self.bind(k_cache, v_cache, group)

    def bind(self, k_cache: Tensor, v_cache: Tensor, group: int = 0) -> None:
        """Use these caches of keys and values, [num_blocks, block_size, kv_heads, head_dim] each, with the
        block tables of KV cache group `group`. In int8 caches each head is followed by its scale."""
        assert k_cache.shape == v_cache.shape and k_cache.shape[2] == self.spec.kv_heads
        assert head_size(k_cache) == self.spec.head_dim
        self.k_cache, self.v_cache, self.group = k_cache, v_cache, group
        has_scales = k_cache.itemsize == 1 and k_cache.dtype != torch.int8
        scales = (self.scales.k, self.scales.v) if has_scales else (1.0, 1.0)
        self.spec = replace(self.spec, k_scale=scales[0], v_scale=scales[1])

    def forward(self, x: Tensor, qkv: Callable[[Tensor, HeadEntry, Batch], Tensor], batch: Batch) -> Tensor:
        """Return the attention output [T, heads * head_dim]. `qkv` is a function that projects x [T,
        size_in], writes rotated keys and values to the KV cache, and returns the rotated queries."""
        assert self.k_cache is not None and self.v_cache is not None, "bind() comes before forward()"
        spec, caches, batch = self.spec, (self.k_cache, self.v_cache), batch.groups[self.group]
        rotations = self.rope.of(batch)
        entry = HeadEntry(spec.heads, *rotations, batch.slots, *caches, self.norms, *spec.scales)
        return self.backend.forward(
            qkv(x, entry, batch), *caches, batch, spec, self.sinks, self.alibi_slopes
        ).flatten(1)

    def attend(self, qkv: Tensor, batch: Batch) -> Tensor:
        """Return the attention output [T, heads * head_dim]. `qkv` holds the concatenated queries, keys and
        values of each token."""
        return self.forward(qkv, lambda qkv, entry, batch: self.ops.rotate_and_write(qkv, entry), batch)

    def targets(self) -> Iterator[Target]:
        if self.sinks is not None:
            yield Target(self.sinks_name, self.sinks, 0, (self.local_heads,))


def attention_layers(modules: Iterable[nn.Module]) -> list[PagedAttention]:
    return [module for module in modules if isinstance(module, PagedAttention)]


def caching_layers(modules: Iterable[nn.Module]) -> list[Caching]:
    """Return the layers that have cache memory, in the model's order."""
    return [cast(Caching, module) for module in modules if hasattr(type(module), "bind_memory")]
