"""The layout of the cache: what each layer keeps, and how all of them share one pool of equal blocks."""

import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from quire.checkpoint.facts import ArchFacts, LayerFacts, StateFacts

_WORTH = 0.75
"""Layers lie side by side in slabs where that takes less than such a part of the memory."""
_MAX_WASTE = 1.25
"""Groups may be as large as the largest kind of layers if it has fewer than so many times the smallest's."""
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
OF_ROWS = ("state", "crossed")
"""Kinds of which a row has a fixed size."""
CROSSED_BLOCK = 16
"""Vectors of an item that no tokens stand for, where they are kept."""


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What one layer keeps of the tokens that it has seen."""

    kind: str
    """full | window | latent: pages of tokens; state, crossed: a fixed size for each row"""
    planes: int = 2
    """Tensors of its own that each page lies in: keys and values, or one latent."""
    numbers: int = 0
    """Of one token in one plane; of one row, where all layers see an item that no tokens stand for."""
    window: int | None = None
    """How many tokens, itself included, a token sees; None: all before it."""
    bytes_per_row: int = 0
    """Of a `state`, which may also stand beside pages."""

    @property
    def is_paged(self) -> bool:
        return self.kind not in OF_ROWS

    def row_bytes(self, bytes_per_number: int) -> int:
        """What a row has of its own, where each has."""
        crossed = self.planes * self.numbers * bytes_per_number if self.kind == "crossed" else 0
        return self.bytes_per_row + crossed

    @property
    def parts(self) -> tuple["CacheSpec", ...]:
        """Pages and the state beside them, if there are both."""
        if not (self.is_paged and self.bytes_per_row):
            return (self,)
        return replace(self, bytes_per_row=0), CacheSpec("state", bytes_per_row=self.bytes_per_row)

    @property
    def page(self) -> tuple[int, int]:
        """Layers with equal ones can lie in the same memory."""
        return self.planes, self.numbers


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose pages come and go together: a block of the group is a page in each of them."""

    window: int | None
    layers: tuple[int, ...]
    """Numbers of layers of the model, and behind them of its draft; the j-th with pages of one kind lies in
    slab j of those with such pages."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Groups of layers over one pool of blocks. A block is a page in every slab, and belongs to one group of
    one request at a time."""

    specs: tuple[CacheSpec | None, ...]
    """By layer; None: it keeps nothing."""
    groups: tuple[CacheGroup, ...]
    largest: int = 0
    """Numbers of a token in each of two planes of every slab, where layers with smaller pages lie side by
    side in one; 0: each kind of page has slabs of its own."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(group.window for group in self.groups)

    @property
    def slabs(self) -> tuple[int, ...]:
        """Numbers of a token in each piece of memory that a layer of every group lies in, those with pages of
        one kind side by side."""
        if self.largest:
            most = max((-(-len(group.layers) // self._beside(group)) for group in self.groups), default=0)
            return (2 * self.largest,) * most
        return tuple(math.prod(page) for page, count in self._pages.items() for _ in range(count))

    @property
    def parts(self) -> dict[int, tuple[int, int]]:
        """Which of how many layers that lie side by side in its slab each layer with pages is."""
        return {
            layer: (at % self._beside(group), self._beside(group))
            for group in self.groups
            for at, layer in enumerate(group.layers)
        }

    def _beside(self, group: CacheGroup) -> int:
        """Layers of a group in one slab. Where these are several, all of it have pages of one kind."""
        if not self.largest or not group.layers:
            return 1
        _, numbers = self._page(group.layers[0])
        return self.largest // numbers

    @property
    def places(self) -> dict[int, tuple[int, int]]:
        """Group and slab of each layer with pages."""
        if self.largest:
            return {
                layer: (number, at // self._beside(group))
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
        """How many slabs there are for each kind of page: what the group with the most such layers needs."""
        most = Counter[tuple[int, int]]()
        for group in self.groups:
            most |= Counter(self._page(layer) for layer in group.layers)
        return dict(most)

    def _page(self, layer: int) -> tuple[int, int]:
        spec = self.specs[layer]
        assert spec is not None, f"layer {layer} keeps nothing"
        return spec.page

    def of(self, layers: Container[int]) -> "CacheLayout":
        """What a stage of these layers has of it: as many groups, of which some may be empty there."""
        specs = tuple(spec if number in layers else None for number, spec in enumerate(self.specs))
        groups = (
            CacheGroup(group.window, tuple(number for number in group.layers if number in layers))
            for group in self.groups
        )
        return CacheLayout(specs, tuple(groups), self.largest)

    def keeping(self, more: int) -> "CacheLayout":
        """The same with windows that keep so many tokens more than are seen."""
        groups = (replace(group, window=group.window and group.window + more) for group in self.groups)
        return CacheLayout(self.specs, tuple(groups), self.largest)

    def row_bytes(self, bytes_per_number: int) -> int:
        """What one row takes beside pages."""
        return row_bytes(self.specs, bytes_per_number)

    def block_bytes(self, block_size: int, bytes_per_number: int) -> int:
        return sum(self.slabs) * block_size * bytes_per_number

    def blocks_of(self, num_tokens: int, *, block_size: int, max_chunk: int) -> int:
        """The most blocks that a request of so many tokens ever holds."""
        sizes = {"block_size": block_size, "max_chunk": max_chunk}
        return sum(most_blocks(num_tokens, group.window, **sizes) for group in self.groups)


def most_blocks(num_tokens: int, window: int | None, *, block_size: int, max_chunk: int) -> int:
    """The same in one group. With a window these are the blocks that a chunk lies in and its first token
    sees, wherever in a block they begin."""
    blocks = -(-num_tokens // block_size)
    return blocks if window is None else min(blocks, (window + max_chunk - 3) // block_size + 2)


def has_states(specs: Sequence[CacheSpec | None]) -> bool:
    return any(spec is not None and spec.bytes_per_row for spec in specs)


def row_bytes(specs: Sequence[CacheSpec | None], bytes_per_number: int) -> int:
    """What each row has of its own, beside pages."""
    return sum(spec.row_bytes(bytes_per_number) for spec in specs if spec is not None)


def layout(specs: Sequence[CacheSpec | None], max_len: int) -> CacheLayout:
    """Layers that see as far as each other go into groups of about equal size, since a block of a small group
    leaves slabs unused. Those whose pages are not like most others', as a draft's may be, share no memory
    with them: they lie in a group that keeps all. Where that takes more than to keep all of every layer, all
    are that one group. Or layers lie side by side in slabs, where that takes much less."""
    paged = {layer: spec for layer, spec in enumerate(specs) if spec is not None and spec.is_paged}
    whole = CacheLayout(tuple(specs), (CacheGroup(None, tuple(paged)),))
    odd = _odd(paged)
    if not (alike := {layer: spec for layer, spec in paged.items() if layer not in odd}):
        return whole
    groups = _grouped(alike, max_len)
    if not odd:
        return CacheLayout(whole.specs, tuple(groups))
    first = groups.pop(0).layers if groups[0].window is None else ()
    groups.insert(0, CacheGroup(None, tuple(sorted({*first, *odd}))))
    made = CacheLayout(whole.specs, tuple(groups))
    made = made if _numbers(made, max_len) <= _numbers(whole, max_len) else whole
    largest = max(spec.numbers for spec in paged.values())
    if any(spec.planes != 2 or largest % spec.numbers for spec in paged.values()):
        return made
    beside = CacheLayout(whole.specs, tuple(_grouped(paged, max_len, largest)), largest)
    return beside if _numbers(beside, max_len) < _WORTH * _numbers(made, max_len) else made


def _grouped(paged: Mapping[int, CacheSpec], max_len: int, largest: int = 0) -> list[CacheGroup]:
    """Layers of one window, and of one kind of page; `largest`: several of them may lie in one slab."""
    alike: dict[tuple[int | None, int], list[int]] = {}
    for layer, spec in paged.items():
        alike.setdefault((_useful(spec.window, max_len), spec.numbers), []).append(layer)
    in_slab = {key: largest // key[1] if largest else 1 for key in alike}
    counts = [-(-len(layers) // in_slab[key]) for key, layers in alike.items()]
    size = max(counts) if max(counts) < _MAX_WASTE * min(counts) else min(counts)
    return [
        CacheGroup(key[0], tuple(layers[start : start + size * in_slab[key]]))
        for key, layers in sorted(alike.items(), key=lambda item: item[0][0] or 0)
        for start in range(0, len(layers), size * in_slab[key])
    ]


def _odd(paged: Mapping[int, CacheSpec]) -> set[int]:
    """The layers whose pages are not of the kind that most numbers lie in."""
    numbers = Counter[tuple[int, int]]()
    for spec in paged.values():
        numbers[spec.page] += spec.planes * spec.numbers
    return {layer for layer, spec in paged.items() if spec.page != numbers.most_common(1)[0][0]}


def _numbers(made: CacheLayout, num_tokens: int) -> int:
    """What blocks for so many tokens hold, about."""
    kept = (num_tokens if window is None else min(window, num_tokens) for window in made.windows)
    return sum(made.slabs) * sum(kept)


def _useful(window: int | None, max_len: int) -> int | None:
    """A window that no sequence outgrows is none."""
    return None if window is None or window >= max_len else window


def cache_specs(facts: ArchFacts) -> tuple[CacheSpec | None, ...]:
    """What each layer of a model keeps; an encoder's nothing. Behind them what all keep of an item that no
    tokens stand for."""
    if facts.encoder is not None:
        return (None,) * len(facts.layers)
    specs = tuple(_spec(facts, layer) for layer in facts.layers)
    if facts.media is None or not facts.media.crossed:
        return specs
    return (*specs, crossed_spec(len(specs), facts.media.crossed, facts.kv_heads * facts.head_dim))


def crossed_spec(num_layers: int, num_vectors: int, numbers: int) -> CacheSpec:
    """Of so many vectors, in whole blocks: each layer's keys and values of so many numbers each."""
    rounded = -(-num_vectors // CROSSED_BLOCK) * CROSSED_BLOCK
    return CacheSpec("crossed", numbers=num_layers * rounded * numbers)


def _spec(facts: ArchFacts, layer: LayerFacts) -> CacheSpec | None:
    if layer.mixer == "none" or layer.keys_of is not None:
        return None
    if layer.mixer == "latent":
        assert facts.mla is not None
        index_dim = facts.mla.index.dim if facts.mla.index is not None and layer.picks else 0
        numbers = facts.mla.kv_latent + facts.mla.rope_dim + index_dim
        return CacheSpec("latent", planes=1, numbers=numbers)
    beside = 0
    if layer.mixer != "attention":
        assert facts.state is not None
        beside = state_bytes(facts.state)
    if "attention" not in layer.mixer:
        return CacheSpec("state", bytes_per_row=beside)
    own = facts.of_layer(layer)
    kind, numbers = "full" if layer.window is None else "window", own.kv_heads * own.head_dim
    return CacheSpec(kind, numbers=numbers, window=layer.window, bytes_per_row=beside)


def state_bytes(state: StateFacts) -> int:
    """Of one row: the state itself, and what the convolution still sees; all as if in float32."""
    inner = state.heads * state.head_dim
    return 4 * (inner * state.state + (inner + 2 * state.groups * state.state) * (state.conv - 1))
