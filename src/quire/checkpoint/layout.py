"""The KV cache layout: what each layer stores, and how all layers share one pool of equal blocks."""

import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from quire.checkpoint.facts import ArchFacts, LayerFacts, StateFacts

_MAX_SHARED_FRACTION = 0.75
"""Layers with pages of different sizes share cache tensors if that takes less than this fraction of the
memory of separate tensors."""
_MAX_WASTE = 1.25
"""Layers with equal windows and page sizes are split into cache groups of one size: the largest number of
such layers if it is less than this factor times the smallest number, otherwise the smallest number."""
INT8_CACHE = "int8_per_token_head"
"""KV cache dtype with a scale for each token and head."""
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, INT8_CACHE: 1}
SCALE_BYTES = 4
"""Bytes of the float32 scale behind each head of an int8 cache."""
ROW_KINDS = ("state", "cross_attention")
"""Values of `CacheSpec.kind` for caches with a fixed size per row (running request)."""
_PLACEHOLDER_BYTES = 4
"""Bytes of the unused placeholder state, per running request, of a layer whose cache is in transformers; such
a layer has no pages."""
CROSS_BLOCK_SIZE = 16
"""Block size of cross-attention states; the number of states is rounded up to a multiple of this size."""


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The cache of one layer: its size per token, or per row (running request)."""

    kind: str
    """full | window | latent: a paged cache with a size per token; state | cross_attention: a fixed size per
    row"""
    planes: int = 2
    """Number of planes, the tensors that make up a page: two (keys and values), or one for MLA latents."""
    elements: int = 0
    """Elements per token in one plane (keys, values or MLA latents); for `cross_attention` per row."""
    window: int | None = None
    """Sliding window in tokens, the token itself included; None: full attention."""
    bytes_per_row: int = 0
    """Bytes of the SSM state of a row, which a layer may have in addition to pages; 0: there is none."""
    heads: int = field(default=0, compare=False)
    """Number of KV heads; 0 for caches without heads."""

    def stored_as(self, kv_dtype: str) -> "CacheSpec":
        """Return the spec for a KV cache dtype. For int8, the `elements` include the scales of all
        heads."""
        scales = SCALE_BYTES * self.heads if kv_dtype == INT8_CACHE else 0
        return replace(self, elements=self.elements + scales)

    @property
    def is_paged(self) -> bool:
        return self.kind not in ROW_KINDS

    def row_bytes(self, bytes_per_number: int, num_states: int = 1) -> int:
        """Return the bytes of one row outside of pages: `num_states` SSM states, or cross-attention
        states."""
        cross_bytes = self.planes * self.elements * bytes_per_number if self.kind == "cross_attention" else 0
        return num_states * self.bytes_per_row + cross_bytes

    @property
    def parts(self) -> tuple["CacheSpec", ...]:
        """Return one spec of the pages and one of the state if the layer has both; otherwise only this
        spec."""
        if not (self.is_paged and self.bytes_per_row):
            return (self,)
        return replace(self, bytes_per_row=0), CacheSpec("state", bytes_per_row=self.bytes_per_row)

    @property
    def page(self) -> tuple[int, int]:
        """Return the page size as (planes, elements per token and plane). Layers with equal page sizes can
        share memory."""
        return self.planes, self.elements


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that allocate KV blocks together. A block of the group has one page for each of its layers; a
    page is a layer's cache of `block_size` tokens."""

    window: int | None
    layers: tuple[int, ...]
    """Layer numbers; those of a draft model follow those of the model. The j-th layer with a given page size
    uses the j-th slab (cache tensor) for that page size."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Groups of layers that share one pool of KV blocks. The cache consists of slabs: tensors with one page
    for every block. Each group stores one layer in a slab, or several layers side by side. A block belongs to
    one group at a time."""

    specs: tuple[CacheSpec | None, ...]
    """Spec of each layer; None: the layer has no cache."""
    groups: tuple[CacheGroup, ...]
    largest: int = 0
    """Elements per token in each of the two planes of a slab, if layers with smaller pages lie side by side
    in one slab; 0: each page size has separate slabs."""
    states_per_row: int = 1
    """Number of SSM states of each layer per running request: one for each position that a decode step
    computes, which are several with draft tokens."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(group.window for group in self.groups)

    @property
    def slabs(self) -> tuple[int, ...]:
        """Return the elements per token of each slab (cache tensor), over all planes, ordered by page
        size."""
        if self.largest:
            most = max(
                (-(-len(group.layers) // self._layers_per_slab(group)) for group in self.groups), default=0
            )
            return (2 * self.largest,) * most
        return tuple(math.prod(page) for page, count in self._pages.items() for _ in range(count))

    @property
    def parts(self) -> dict[int, tuple[int, int]]:
        """Map each layer with a paged cache to (index, count): its place among the layers of its group that
        lie side by side in the same slab (cache tensor), and the number of these layers."""
        return {
            layer: (at % self._layers_per_slab(group), self._layers_per_slab(group))
            for group in self.groups
            for at, layer in enumerate(group.layers)
        }

    def _layers_per_slab(self, group: CacheGroup) -> int:
        """Return the number of layers of a group that share one slab. If it is above 1, all layers of the
        group have the same page size."""
        if not self.largest or not group.layers:
            return 1
        _, elements = self._page(group.layers[0])
        return self.largest // elements

    @property
    def places(self) -> dict[int, tuple[int, int]]:
        """Map each layer with a paged cache to (index of its group, index of its slab); a slab is a
        cache tensor."""
        if self.largest:
            return {
                layer: (number, at // self._layers_per_slab(group))
                for number, group in enumerate(self.groups)
                for at, layer in enumerate(group.layers)
            }
        places, firsts = {}, dict(zip(self._pages, accumulate(self._pages.values(), initial=0), strict=False))
        for number, group in enumerate(self.groups):
            slabs = dict(firsts)
            for layer in group.layers:
                page = self._page(layer)
                places[layer] = (number, slabs[page])
                slabs[page] += 1
        return places

    @property
    def _pages(self) -> dict[tuple[int, int], int]:
        """Map each page size, as (planes, elements per token and plane), to its number of slabs (cache
        tensors): the largest number of layers with this page size in one group."""
        most = Counter[tuple[int, int]]()
        for group in self.groups:
            most |= Counter(self._page(layer) for layer in group.layers)
        return dict(most)

    def _page(self, layer: int) -> tuple[int, int]:
        spec = self.specs[layer]
        assert spec is not None, f"layer {layer} has no cache"
        return spec.page

    def of(self, layers: Container[int]) -> "CacheLayout":
        """Return the cache layout of a pipeline stage that has only these layers. The number of groups is the
        same; groups may be empty."""
        specs = tuple(spec if number in layers else None for number, spec in enumerate(self.specs))
        groups = (
            CacheGroup(group.window, tuple(number for number in group.layers if number in layers))
            for group in self.groups
        )
        return replace(self, specs=specs, groups=tuple(groups))

    def keeping(self, more: int) -> "CacheLayout":
        """Return the layout with all sliding windows extended by `more` tokens."""
        groups = (replace(group, window=group.window and group.window + more) for group in self.groups)
        return replace(self, groups=tuple(groups))

    def row_bytes(self, bytes_per_number: int) -> int:
        """Return the bytes of one row (running request) besides its pages: SSM states, and cross-attention
        states of `bytes_per_number` bytes per value."""
        return row_bytes(self.specs, bytes_per_number, self.states_per_row)

    @property
    def state_bytes(self) -> int:
        """Return the bytes of one state checkpoint of the prefix cache: the SSM states of all layers after a
        prefix."""
        return sum(spec.bytes_per_row for spec in self.specs if spec is not None)

    def block_bytes(self, block_size: int, bytes_per_number: int) -> int:
        return sum(self.slabs) * block_size * bytes_per_number

    def blocks_of(self, num_tokens: int, *, block_size: int, max_chunk: int) -> int:
        """Return the largest number of KV blocks, over all groups, that a request of `num_tokens` needs at
        any time; `max_chunk` is the largest prefill chunk in tokens."""
        sizes = {"block_size": block_size, "max_chunk": max_chunk}
        return sum(most_blocks(num_tokens, group.window, **sizes) for group in self.groups)


def most_blocks(num_tokens: int, window: int | None, *, block_size: int, max_chunk: int) -> int:
    """Return the largest number of blocks that a request of `num_tokens` needs in one group at any time. With
    a sliding window these are the blocks of a prefill chunk and of the tokens that its first token attends
    to."""
    blocks = -(-num_tokens // block_size)
    return blocks if window is None else min(blocks, (window + max_chunk - 3) // block_size + 2)


def has_ssm_state(specs: Sequence[CacheSpec | None]) -> bool:
    return any(spec is not None and spec.bytes_per_row for spec in specs)


def row_bytes(specs: Sequence[CacheSpec | None], bytes_per_number: int, num_states: int = 1) -> int:
    """Return the bytes of one row (running request) besides its pages, over all layers, with `num_states` SSM
    states per layer."""
    return sum(spec.row_bytes(bytes_per_number, num_states) for spec in specs if spec is not None)


def layout(
    specs: Sequence[CacheSpec | None], max_len: int, states_per_row: int = 1, kv_dtype: str = "auto"
) -> CacheLayout:
    """Build the cache layout of layers with these specs (None: the layer has no cache).

    A slab is a cache tensor with one page for every block, which one layer of each group uses. Layers with
    equal windows form groups of about equal size, since a block of a smaller group leaves slabs unused.
    Layers with another page size than most layers, such as those of a draft model, have separate slabs and
    join the first full-attention group. If these groups take more memory than a single full-attention group
    of all layers, there is only this single group. If it takes much less memory, several layers with small
    pages lie side by side in a slab instead.
    """
    specs = [spec and spec.stored_as(kv_dtype) for spec in specs]
    return replace(_layout_of_pages(specs, max_len), states_per_row=states_per_row)


def _layout_of_pages(specs: Sequence[CacheSpec | None], max_len: int) -> CacheLayout:
    paged = {layer: spec for layer, spec in enumerate(specs) if spec is not None and spec.is_paged}
    whole = CacheLayout(tuple(specs), (CacheGroup(None, tuple(paged)),))
    odd = _find_odd_layers(paged)
    if not (alike := {layer: spec for layer, spec in paged.items() if layer not in odd}):
        return whole
    groups = _group_layers(alike, max_len)
    if not odd:
        return CacheLayout(whole.specs, tuple(groups))
    first = groups.pop(0).layers if groups[0].window is None else ()
    groups.insert(0, CacheGroup(None, tuple(sorted({*first, *odd}))))
    grouped = CacheLayout(whole.specs, tuple(groups))
    grouped = grouped if _count_elements(grouped, max_len) <= _count_elements(whole, max_len) else whole
    largest = max(spec.elements for spec in paged.values())
    if any(spec.planes != 2 or largest % spec.elements for spec in paged.values()):
        return grouped
    side_by_side = CacheLayout(whole.specs, tuple(_group_layers(paged, max_len, largest)), largest)
    limit = _MAX_SHARED_FRACTION * _count_elements(grouped, max_len)
    return side_by_side if _count_elements(side_by_side, max_len) < limit else grouped


def _group_layers(paged: Mapping[int, CacheSpec], max_len: int, largest: int = 0) -> list[CacheGroup]:
    """Group layers by window and by page size; a window of `max_len` or more counts as full attention. If
    `largest` (elements per token and plane of a slab) is set, several layers may lie in one slab."""
    alike: dict[tuple[int | None, int], list[int]] = {}
    for layer, spec in paged.items():
        window = None if spec.window is None or spec.window >= max_len else spec.window
        alike.setdefault((window, spec.elements), []).append(layer)
    in_slab = {key: largest // key[1] if largest else 1 for key in alike}
    counts = [-(-len(layers) // in_slab[key]) for key, layers in alike.items()]
    size = max(counts) if max(counts) < _MAX_WASTE * min(counts) else min(counts)
    return [
        CacheGroup(key[0], tuple(layers[start : start + size * in_slab[key]]))
        for key, layers in sorted(alike.items(), key=lambda item: item[0][0] or 0)
        for start in range(0, len(layers), size * in_slab[key])
    ]


def _find_odd_layers(paged: Mapping[int, CacheSpec]) -> set[int]:
    """Return the layers whose page size is not the main one, which has the most elements per token over all
    layers."""
    elements = Counter[tuple[int, int]]()
    for spec in paged.values():
        elements[spec.page] += spec.planes * spec.elements
    return {layer for layer, spec in paged.items() if spec.page != elements.most_common(1)[0][0]}


def _count_elements(layout: CacheLayout, num_tokens: int) -> int:
    """Return the approximate number of cache elements of a request of `num_tokens`."""
    kept = (num_tokens if window is None else min(window, num_tokens) for window in layout.windows)
    return sum(layout.slabs) * sum(kept)


def cache_specs(facts: ArchFacts) -> tuple[CacheSpec | None, ...]:
    """Return the cache spec of each layer; None for a layer without a cache, such as a layer of an encoder.
    If the model has cross-attention states, their spec is an additional last entry."""
    if facts.encoder is not None:
        return (None,) * len(facts.layers)
    specs = tuple(_spec(facts, layer) for layer in facts.layers)
    if facts.media is None or not facts.media.num_cross_states:
        return specs
    return (
        *specs,
        cross_attention_spec(len(specs), facts.media.num_cross_states, facts.kv_heads * facts.head_dim),
    )


def cross_attention_spec(num_layers: int, num_vectors: int, elements: int) -> CacheSpec:
    """Return the cache spec of cross-attention states: `num_vectors` (rounded up to whole blocks) keys and
    values of size `elements` in each layer."""
    rounded = -(-num_vectors // CROSS_BLOCK_SIZE) * CROSS_BLOCK_SIZE
    return CacheSpec("cross_attention", elements=num_layers * rounded * elements)


def _spec(facts: ArchFacts, layer: LayerFacts) -> CacheSpec | None:
    if layer.mixer == "none" or layer.kv_sharing_target is not None:
        return None
    if layer.mixer == "transformers":
        return CacheSpec("state", bytes_per_row=_PLACEHOLDER_BYTES)
    if layer.mixer == "latent":
        assert facts.mla is not None
        index_dim = facts.mla.index.dim if facts.mla.index is not None and layer.has_indexer else 0
        elements = facts.mla.kv_latent + facts.mla.rope_dim + index_dim
        return CacheSpec("latent", planes=1, elements=elements)
    state_size = 0
    if layer.mixer != "attention":
        assert facts.state is not None
        state_size = state_bytes(facts.state)
    if "attention" not in layer.mixer:
        return CacheSpec("state", bytes_per_row=state_size)
    layer_facts = facts.of_layer(layer)
    kind, elements = "full" if layer.window is None else "window", layer_facts.kv_heads * layer_facts.head_dim
    heads = layer_facts.kv_heads
    return CacheSpec(kind, elements=elements, window=layer.window, bytes_per_row=state_size, heads=heads)


def state_bytes(state: StateFacts) -> int:
    """Return the bytes of a sequence's state in one layer: SSM state and inputs of the convolution, both in
    float32."""
    inner = state.heads * state.head_dim
    return 4 * (inner * state.state + (inner + 2 * state.groups * state.state) * (state.conv - 1))
