"""Media on the device: items go through the tower, and their vectors among those of tokens."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from quire.config.engine import EngineConfig
from quire.data.multimodal import TABLE, Array, Arrays, MediaItem, unpack
from quire.data.plan import StepPlan
from quire.errors import EngineError
from quire.layers.cross_attention import CrossAttentionCache
from quire.memory import max_vectors
from quire.models.towers import Repeats, Tower, is_divided
from quire.parallel.group import ALONE, Group
from quire.sampling.transfer import to_device
from quire.system.shared_arena import ArenaView
from quire.worker.cuda.encoder_graphs import MOST_VECTORS, TowerGraphs
from quire.worker.memory import Needs
from quire.worker.multimodal.embeds import VectorRoom
from quire.worker.rows import Rows

_EMBEDS = "embeds"
"""What arrays are called that are vectors already."""
_PLACES_PER_VECTOR = 4
"""Towers work on patches, or on frames, of which about so many become a vector;"""
_COPIES = 4
"""as many as this of their widest layer are there at once. For where nothing can be measured."""
_GRAPH_COPIES = 4
"""All graphs of a tower share their memory, and may take so many times what the largest takes: each has what
goes in and comes out to itself."""


class MediaEncoder:
    """A tower, and the vectors that it has made, by the keys of items."""

    def __init__(
        self,
        tower: Tower,
        *,
        hidden: int,
        levels: int = 0,
        scale: float = 1.0,
        dtype: torch.dtype,
        device: torch.device,
        group: Group = ALONE,
        graphs: TowerGraphs | None = None,
    ) -> None:
        """Vectors have `hidden` numbers, and as many more for each of the layers that are given some.
        They are multiplied by `scale`. Each of a `group` encodes some of the items."""
        self.tower = tower
        self.hidden, self.width = hidden, hidden * (1 + levels)
        self.scale = scale
        self.dtype = dtype
        self.device = device
        self.group = group
        self.kept: dict[bytes, Tensor] = {}
        self._window = ArenaView()
        self._graphs = graphs

    # ---- steps

    def step(self, plan: StepPlan, all_rows: Rows) -> tuple[Tensor, Tensor] | None:
        """[K] the tokens of a step that stand for media, and [K, width] the vectors that take their place;
        None if there are none. All that the step needs is encoded first."""
        for key in plan.forgotten:
            self.kept.pop(key, None)
        if plan.encodes:
            self._encode(plan.encodes)
        return self._take(plan, all_rows) if all_rows.items else None

    def _encode(self, items: list[MediaItem]) -> None:
        """All of a modality in one batch."""
        made: dict[bytes, Tensor] = {}
        seen: dict[str, list[MediaItem]] = {}
        for item in items:
            if item.stored is not None:
                item = structs.replace(item, arrays=unpack(self._window.read(item.stored)))
            if item.arrays is None:
                raise EngineError(f"nobody has brought the {item.modality} {item.key.hex()[:16]}")
            if _EMBEDS in item.arrays:
                given = self._on_device(item.arrays[_EMBEDS])
                made[item.key] = self._checked(item, self._widened(given))
            else:
                seen.setdefault(item.modality, []).append(item)
        for modality, those in seen.items():
            vectors = self._run(modality, those) if self.group.size == 1 else self._spread(modality, those)
            made |= {item.key: part for item, part in zip(those, vectors, strict=True)}
        self.kept |= made if self.scale == 1 else {key: each * self.scale for key, each in made.items()}

    def _run(self, modality: str, items: Sequence[MediaItem]) -> list[Tensor]:
        given = [self._given(item.arrays or {}) for item in items]
        if self._graphs is None:
            vectors = self.tower.encode(modality, given)
        else:
            vectors = self._graphs.encode(modality, given, sum(item.num_vectors for item in items))
        made = zip(items, vectors, strict=True)
        return [self._checked(item, part.to(self.dtype)) for item, part in made]

    def _given(self, arrays: Arrays) -> dict[str, Tensor]:
        """What a tower reads of an item."""
        found = {name: self._on_device(array) for name, array in arrays.items()}
        if (table := found.pop(TABLE, None)) is None:
            return found
        return {name: numbers_of(each, table.to(self.dtype)) for name, each in found.items()}

    def _checked(self, item: MediaItem, vectors: Tensor) -> Tensor:
        """Not as a part of a larger tensor, all of which would be kept with it."""
        if vectors.shape != (item.num_vectors, self.width):
            shape, wanted = tuple(vectors.shape), (item.num_vectors, self.width)
            raise EngineError(f"the {item.modality} {item.key.hex()[:16]} became {shape}, not {wanted}")
        return vectors if vectors.untyped_storage().nbytes() == vectors.nbytes else vectors.clone()

    def _on_device(self, array: Array) -> Tensor:
        numbers = array.numbers()
        dtype: torch.dtype = getattr(torch, array.dtype)
        found = torch.empty(array.shape, dtype=dtype, pin_memory=self.device.type == "cuda")
        found.numpy()[...] = numbers
        found = found.to(self.device, non_blocking=True)
        return found.view(torch.bfloat16) if dtype == torch.uint16 else found

    def _widened(self, vectors: Tensor) -> Tensor:
        """With zeros where later layers would be given more."""
        missing = self.width - self.hidden if vectors.shape[-1] == self.hidden else 0
        return torch.nn.functional.pad(vectors.to(self.dtype), (0, missing))

    def _take(self, plan: StepPlan, all_rows: Rows) -> tuple[Tensor, Tensor] | None:
        """What a row has computed of its items it does not need again."""
        ends = np.cumsum(plan.num_tokens)
        tokens, vectors = [], []
        for place in np.flatnonzero(np.isin(plan.rows, list(all_rows.items))).tolist():
            row, count = int(plan.rows[place]), int(plan.num_tokens[place])
            items, first = all_rows.items[row], int(all_rows.num_computed[row])
            at = int(ends[place]) - count - first
            for item in items:
                for start, end, begin in _within(item, first, first + count):
                    tokens.append(np.arange(at + start, at + end))
                    vectors.append(self.kept[item.key][begin : begin + end - start])
            if items[-1].end <= first + count:
                del all_rows.items[row]
        if not vectors:
            return None
        return to_device(np.concatenate(tokens), self.device), torch.cat(vectors)

    def joined(
        self, given: tuple[Tensor, Tensor] | None, own: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor] | None:
        """With the vectors that prompts came as."""
        if given is None or own is None:
            return given or own
        return torch.cat([given[0], own[0]]), torch.cat([self._widened(given[1]), own[1]])

    def room(self, num_tokens: int) -> VectorRoom:
        return VectorRoom(num_tokens, self.width, self.dtype, self.device)

    def clear(self) -> None:
        self.kept.clear()
        if self._graphs is not None:
            self._graphs.forget()

    # ---- over devices

    def _spread(self, modality: str, items: list[MediaItem]) -> list[Tensor]:
        """Each device has some of the items, by what they take, and all get all vectors. Where one fails all
        do: the step is the same everywhere."""
        shapes = [{name: array.shape for name, array in (item.arrays or {}).items()} for item in items]
        owners = shares([self.tower.cost(modality, each) for each in shapes], self.group.size)
        counts = [sum(items[n].num_vectors for n in share) for share in owners]
        own, failed = torch.zeros(max(counts) + 1, self.width, dtype=self.dtype, device=self.device), None
        share = [items[number] for number in owners[self.group.rank]]
        try:
            if share:
                torch.cat(self._run(modality, share), out=own[: counts[self.group.rank]])
        except Exception as error:
            failed = error
            own[-1, 0] = 1
        found = self.group.gather(own, 0).view(self.group.size, -1, self.width)
        if failed is not None:
            raise failed
        if bool(found[:, -1, 0].any()):
            raise EngineError("another device could not encode its items")
        parts: dict[int, Tensor] = {}
        for rank, numbers in enumerate(owners):
            sizes = [items[number].num_vectors for number in numbers]
            parts |= zip(numbers, found[rank, : counts[rank]].split(sizes), strict=True)
        return [parts[number].clone() for number in range(len(items))]

    # ---- memory

    def counted_in(self, needs: Needs, config: EngineConfig) -> Needs:
        """With what it takes to encode as many as a step may, to keep as many, and to have a copy of those
        that a step reads."""
        largest, most = config.largest_items, max_vectors(config)
        peak = max((self._peak(modality, each, most) for modality, each in largest.items()), default=0)
        row_bytes = self.width * self.dtype.itemsize
        copied = config.scheduler.max_num_batched_tokens * row_bytes
        vectors, activations = most * row_bytes, needs.activations + copied
        needs = replace(needs, vectors=vectors, activations=activations).beside(peak)
        if self._graphs is not None:
            some = min(most, MOST_VECTORS)
            peaks = (self._peak(modality, min(each, some), some) for modality, each in largest.items())
            self._graphs.max_bytes = _GRAPH_COPIES * max(peaks, default=0)
            needs = replace(needs, graphs=needs.graphs + self._graphs.max_bytes)
        return needs

    def _peak(self, modality: str, largest: int, num_vectors: int) -> int:
        """Bytes of so many vectors, the most of one item being the `largest`. On a GPU it is tried, else
        reckoned."""
        if self.device.type != "cuda":
            widest = max((max(each.shape) for each in _weights(self.tower)), default=self.width)
            return num_vectors * _PLACES_PER_VECTOR * _COPIES * widest * self.dtype.itemsize
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        count = max(num_vectors // max(largest, 1), 1)
        with torch.inference_mode():
            blank = {name: each.to(self.device) for name, each in self.tower.blank(modality, largest).items()}
            self.tower.encode(modality, [blank] * count)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def numbers_of(pixels: Tensor, table: Tensor) -> Tensor:
    """Of bytes [..., 3, height, width], by a table [3, 256]; of what are no bytes, those."""
    if pixels.dtype != torch.uint8:
        return pixels
    found = torch.empty(pixels.shape, dtype=table.dtype, device=table.device)
    for colour, numbers in enumerate(table):
        found[..., colour, :, :] = numbers[pixels[..., colour, :, :].int()]
    return found


class CrossEncoder(MediaEncoder):
    """One for items that no tokens stand for: what layers make of their vectors is kept in slots, by the keys
    of items, in place of the vectors."""

    def __init__(self, crossing: CrossAttentionCache, tower: Tower, **settings: Any) -> None:
        super().__init__(tower, **settings)
        self.crossing = crossing
        self._slots: dict[bytes, int] = {}

    def step(self, plan: StepPlan, all_rows: Rows) -> None:
        """Rows see their items from their first step on."""
        for key in plan.forgotten:
            self._slots.pop(key, None)
        if plan.encodes:
            self._encode(plan.encodes)
        made, self.kept = self.kept, {}
        free = sorted({*range(self.crossing.num_slots)}.difference(self._slots.values())) if made else []
        for key, vectors in made.items():
            if key not in self._slots:
                self._slots[key] = free.pop()
            self.crossing.keep(vectors, self._slots[key])
        if new := [row for row in plan.rows.tolist() if row in all_rows.items]:
            self.crossing.assign(new, [self._slots[all_rows.items.pop(row)[0].key] for row in new])

    def clear(self) -> None:
        super().clear()
        self._slots.clear()

    def counted_in(self, needs: Needs, config: EngineConfig) -> Needs:
        """With what it takes to encode as many as a step may: what is kept counts as the rows' own."""
        (modality, largest), *_ = config.largest_items.items()
        return needs.beside(self._peak(modality, largest, max_vectors(config)))


def tower_group(config: EngineConfig, group: Group) -> Group:
    """The devices that share the layers of a tower; alone, each has all of them."""
    media, mode = config.checkpoint.facts.media, config.multimodal.mm_encoder_tp_mode
    return group if media is not None and is_divided(media, mode, group.size) else ALONE


def open_encoder(config: EngineConfig, model: Any, group: Group, device: torch.device) -> MediaEncoder | None:
    media, tower = config.checkpoint.facts.media, getattr(model, "tower", None)
    if media is None or tower is None:
        return None
    graphs = None
    if config.multimodal.cudagraph_mm_encoder and device.type == "cuda" and not config.model.enforce_eager:
        # Devices that share a tower would have to capture the same, and each finds room by itself.
        is_whole = tower_group(config, group).size == 1
        graphs = TowerGraphs(tower) if is_whole and isinstance(tower, Repeats) else None
    kind: Callable[..., MediaEncoder] = (
        partial(CrossEncoder, model.crossing) if media.crossed else MediaEncoder
    )
    return kind(
        tower,
        hidden=config.checkpoint.facts.hidden,
        levels=media.levels,
        scale=media.scale,
        dtype=getattr(torch, config.model.dtype),
        device=device,
        group=ALONE if tower_group(config, group) is group else group,
        graphs=graphs,
    )


def shares(costs: Sequence[int], count: int) -> list[list[int]]:
    """Which of the items each of so many devices has: the dearest first, to whom has least."""
    owners: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        least = loads.index(min(loads))
        owners[least].append(number)
        loads[least] += costs[number]
    return owners


def _within(item: MediaItem, first: int, last: int) -> list[tuple[int, int, int]]:
    """The runs of an item between two positions: where they start and end, and at which of its vectors."""
    found, begin = [], 0
    if item.offset < last and item.end > first:
        for at, count in item.places():
            start, end = max(at, first), min(at + count, last)
            if start < end:
                found.append((start, end, begin + start - at))
            begin += count
    return found


def _weights(tower: Tower) -> list[Tensor]:
    """Matrices."""
    found = tower.parameters() if isinstance(tower, torch.nn.Module) else ()
    return [each for each in found if each.ndim > 1]
