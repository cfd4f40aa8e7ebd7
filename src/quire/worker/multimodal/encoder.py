"""The multimodal encoder on the device: encodes images, videos and audio, and provides their embeddings."""

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
from quire.data.step_plan import StepPlan
from quire.errors import EngineError
from quire.layers.cross_attention import CrossAttentionCache
from quire.memory import max_vectors
from quire.models.towers import GraphableTower, Tower, is_tensor_parallel
from quire.parallel.group import ALONE, Group
from quire.sampling.transfer import to_device
from quire.system.shared_arena import ArenaView
from quire.worker.cuda.encoder_graphs import MOST_VECTORS, TowerGraphs
from quire.worker.memory import Needs, measure_peak
from quire.worker.multimodal.embeds import EmbedsBuffer
from quire.worker.rows import Rows

_EMBEDS = "embeds"
"""Name of the array of a media item that the client sent as embeddings; the encoder does not run for it."""
_PLACES_PER_VECTOR = 4
"""Estimated patches or frames of an encoder per output embedding."""
_COPIES = 4
"""Estimated number of tensors, each as large as the output of the widest layer, that exist at the same time.
It is used where memory cannot be measured."""
_GRAPH_COPIES = 4
"""Memory limit of all encoder graphs, as a multiple of the largest graph. They share their temporary memory;
each has its own inputs and outputs."""


class MediaEncoder:
    """An encoder of images, videos and audio, with a cache of the embeddings of these items, by item key."""

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
        """Build the encoder around its model, the `tower`. An embedding has `hidden` elements, and the same
        number again for each of the `levels` decoder layers that add further encoder outputs to their hidden
        states. Embeddings are multiplied by `scale`. Each rank of `group` encodes some of the items."""
        self.tower = tower
        self.hidden, self.width = hidden, hidden * (1 + levels)
        self.scale = scale
        self.dtype = dtype
        self.device = device
        self.group = group
        self.cache: dict[bytes, Tensor] = {}
        self._window = ArenaView()
        self._graphs = graphs

    # ---- steps

    def step(self, plan: StepPlan, all_rows: Rows) -> tuple[Tensor, Tensor] | None:
        """Encode the items of a step; return indices [K] and embeddings [K, width] of placeholder tokens."""
        for key in plan.evicted_media:
            self.cache.pop(key, None)
        if plan.encodes:
            self._encode(plan.encodes)
        return self._collect_embeds(plan, all_rows) if all_rows.items else None

    def _encode(self, items: list[MediaItem]) -> None:
        """Encode items; items of the same modality are encoded in one batch."""
        encoded: dict[bytes, Tensor] = {}
        by_modality: dict[str, list[MediaItem]] = {}
        for item in items:
            if item.stored is not None:
                item = structs.replace(item, arrays=unpack(self._window.read(item.stored)))
            if item.arrays is None:
                raise EngineError(f"the data of {item.modality} {item.key.hex()[:16]} is missing")
            if _EMBEDS in item.arrays:
                embeds = self._on_device(item.arrays[_EMBEDS])
                encoded[item.key] = self._check_shape(item, self._widen(embeds))
            else:
                by_modality.setdefault(item.modality, []).append(item)
        encode = self._run if self.group.size == 1 else self._run_sharded
        for modality, batch in by_modality.items():
            encoded |= zip((item.key for item in batch), encode(modality, batch), strict=True)
        self.cache |= encoded if self.scale == 1 else {key: x * self.scale for key, x in encoded.items()}

    def _run(self, modality: str, items: Sequence[MediaItem]) -> list[Tensor]:
        inputs = [self._load_inputs(item.arrays or {}) for item in items]
        if self._graphs is None:
            vectors = self.tower.encode(modality, inputs)
        else:
            vectors = self._graphs.encode(modality, inputs, sum(item.num_vectors for item in items))
        encoded = zip(items, vectors, strict=True)
        return [self._check_shape(item, part.to(self.dtype)) for item, part in encoded]

    def _load_inputs(self, arrays: Arrays) -> dict[str, Tensor]:
        inputs = {name: self._on_device(array) for name, array in arrays.items()}
        if (table := inputs.pop(TABLE, None)) is None:
            return inputs
        return {name: pixel_values(array, table.to(self.dtype)) for name, array in inputs.items()}

    def _check_shape(self, item: MediaItem, vectors: Tensor) -> Tensor:
        """Check the shape of an item's embeddings. If they are a view, return a copy, since the view would
        keep a larger tensor in memory."""
        if vectors.shape != (item.num_vectors, self.width):
            shape, expected = tuple(vectors.shape), (item.num_vectors, self.width)
            raise EngineError(
                f"the {item.modality} {item.key.hex()[:16]} has embeddings of shape {shape}, not {expected}"
            )
        return vectors if vectors.untyped_storage().nbytes() == vectors.nbytes else vectors.clone()

    def _on_device(self, array: Array) -> Tensor:
        numbers = array.numbers()
        dtype: torch.dtype = getattr(torch, array.dtype)
        tensor = torch.empty(array.shape, dtype=dtype, pin_memory=self.device.type == "cuda")
        tensor.numpy()[...] = numbers
        tensor = tensor.to(self.device, non_blocking=True)
        return tensor.view(torch.bfloat16) if dtype == torch.uint16 else tensor

    def _widen(self, vectors: Tensor) -> Tensor:
        """Pad embeddings [n, hidden] with zeros to the width [n, width] of those with further encoder
        outputs."""
        missing = self.width - self.hidden if vectors.shape[-1] == self.hidden else 0
        return torch.nn.functional.pad(vectors.to(self.dtype), (0, missing))

    def _collect_embeds(self, plan: StepPlan, all_rows: Rows) -> tuple[Tensor, Tensor] | None:
        """Return the token indices [K] and embeddings [K, width] of a step; None without any. The items of a
        row are dropped when all of them are computed."""
        ends = np.cumsum(plan.num_tokens)
        tokens, vectors = [], []
        for place in np.flatnonzero(np.isin(plan.rows, list(all_rows.items))).tolist():
            row, count = int(plan.rows[place]), int(plan.num_tokens[place])
            items, first = all_rows.items[row], int(all_rows.num_computed[row])
            at = int(ends[place]) - count - first
            for item in items:
                for start, end, begin in _find_spans(item, first, first + count):
                    tokens.append(np.arange(at + start, at + end))
                    vectors.append(self.cache[item.key][begin : begin + end - start])
            if items[-1].end <= first + count:
                del all_rows.items[row]
        if not vectors:
            return None
        return to_device(np.concatenate(tokens), self.device), torch.cat(vectors)

    def concat_embeds(
        self, embeds: tuple[Tensor, Tensor] | None, media: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor] | None:
        if embeds is None or media is None:
            return embeds or media
        return torch.cat([embeds[0], media[0]]), torch.cat([self._widen(embeds[1]), media[1]])

    def embeds_buffer(self, num_tokens: int) -> EmbedsBuffer:
        return EmbedsBuffer(num_tokens, self.width, self.dtype, self.device)

    def clear(self) -> None:
        self.cache.clear()
        if self._graphs is not None:
            self._graphs.forget()

    # ---- several devices

    def _run_sharded(self, modality: str, items: list[MediaItem]) -> list[Tensor]:
        """Encode the items on several ranks, balanced by cost; all ranks get all embeddings. If one rank
        fails, all ranks fail, since they compute the same step."""
        shapes = [{name: array.shape for name, array in (item.arrays or {}).items()} for item in items]
        owners = balance_items([self.tower.cost(modality, shape) for shape in shapes], self.group.size)
        counts = [sum(items[n].num_vectors for n in share) for share in owners]
        output, failed = torch.zeros(max(counts) + 1, self.width, dtype=self.dtype, device=self.device), None
        share = [items[number] for number in owners[self.group.rank]]
        try:
            if share:
                torch.cat(self._run(modality, share), out=output[: counts[self.group.rank]])
        except Exception as error:
            failed = error
            output[-1, 0] = 1
        gathered = self.group.gather(output, 0).view(self.group.size, -1, self.width)
        if failed is not None:
            raise failed
        if bool(gathered[:, -1, 0].any()):
            raise EngineError("another rank could not encode its items")
        parts: dict[int, Tensor] = {}
        for rank, numbers in enumerate(owners):
            sizes = [items[number].num_vectors for number in numbers]
            parts |= zip(numbers, gathered[rank, : counts[rank]].split(sizes), strict=True)
        return [parts[number].clone() for number in range(len(items))]

    # ---- memory

    def add_needs(self, needs: Needs, config: EngineConfig) -> Needs:
        """Return the memory needs with the memory to encode a step's items and to cache and copy
        embeddings."""
        largest, most = config.largest_items, max_vectors(config)
        peak = max((self._peak(modality, size, most) for modality, size in largest.items()), default=0)
        row_bytes = self.width * self.dtype.itemsize
        copied = config.scheduler.max_num_batched_tokens * row_bytes
        vectors, activations = most * row_bytes, needs.activations + copied
        needs = replace(needs, vectors=vectors, activations=activations).with_peak(peak)
        if self._graphs is not None:
            graph_vectors = min(most, MOST_VECTORS)
            peaks = (
                self._peak(modality, min(size, graph_vectors), graph_vectors)
                for modality, size in largest.items()
            )
            self._graphs.max_bytes = _GRAPH_COPIES * max(peaks, default=0)
            needs = replace(needs, graphs=needs.graphs + self._graphs.max_bytes)
        return needs

    def _peak(self, modality: str, largest: int, num_vectors: int) -> int:
        """Return the peak bytes of encoding `num_vectors` embeddings, at most `largest` of one item. It is
        measured on a GPU and estimated on a CPU."""
        if self.device.type != "cuda":
            widest = max((max(weight.shape) for weight in _matrices(self.tower)), default=self.width)
            return num_vectors * _PLACES_PER_VECTOR * _COPIES * widest * self.dtype.itemsize
        count = max(num_vectors // max(largest, 1), 1)

        @torch.inference_mode()
        def encode() -> None:
            arrays = self.tower.blank(modality, largest)
            item = {name: array.to(self.device) for name, array in arrays.items()}
            self.tower.encode(modality, [item] * count)

        return measure_peak(encode)


def pixel_values(pixels: Tensor, table: Tensor) -> Tensor:
    """Convert pixels from bytes [..., 3, height, width] to floats, by a table [3, 256] of the values per
    channel. Pixels of other dtypes are returned unchanged."""
    if pixels.dtype != torch.uint8:
        return pixels
    values = torch.empty(pixels.shape, dtype=table.dtype, device=table.device)
    for channel, numbers in enumerate(table):
        values[..., channel, :, :] = numbers[pixels[..., channel, :, :].int()]
    return values


class CrossEncoder(MediaEncoder):
    """An encoder for cross attention, where items have no placeholder tokens. Instead of embeddings it caches
    the keys and values of each item in a slot, by item key."""

    def __init__(self, cross_cache: CrossAttentionCache, tower: Tower, **settings: Any) -> None:
        super().__init__(tower, **settings)
        self.cross_cache = cross_cache
        self._slots: dict[bytes, int] = {}

    def step(self, plan: StepPlan, all_rows: Rows) -> None:
        """Encode the items of a step and assign their slots to the rows."""
        for key in plan.evicted_media:
            self._slots.pop(key, None)
        if plan.encodes:
            self._encode(plan.encodes)
        encoded, self.cache = self.cache, {}
        slots = range(self.cross_cache.num_slots) if encoded else ()
        free = sorted({*slots}.difference(self._slots.values()))
        for key, vectors in encoded.items():
            if key not in self._slots:
                self._slots[key] = free.pop()
            self.cross_cache.write(vectors, self._slots[key])
        if new := [row for row in plan.rows.tolist() if row in all_rows.items]:
            self.cross_cache.assign(new, [self._slots[all_rows.items.pop(row)[0].key] for row in new])

    def clear(self) -> None:
        super().clear()
        self._slots.clear()

    def add_needs(self, needs: Needs, config: EngineConfig) -> Needs:
        """Return the memory needs with the memory to encode a step's items; the slots are counted as row
        states."""
        (modality, largest), *_ = config.largest_items.items()
        return needs.with_peak(self._peak(modality, largest, max_vectors(config)))


def tower_group(config: EngineConfig, group: Group) -> Group:
    """Return the ranks over which the layers of the encoder are sharded; `ALONE` if each rank has all of
    them."""
    media, mode = config.checkpoint.facts.media, config.multimodal.mm_encoder_tp_mode
    return group if media is not None and is_tensor_parallel(media, mode, group.size) else ALONE


def open_encoder(config: EngineConfig, model: Any, group: Group, device: torch.device) -> MediaEncoder | None:
    media, tower = config.checkpoint.facts.media, getattr(model, "tower", None)
    if media is None or tower is None:
        return None
    graphs = None
    if config.multimodal.cudagraph_mm_encoder and device.type == "cuda" and not config.model.enforce_eager:
        # Ranks that shard an encoder would have to capture the same batches, but each checks its own memory.
        is_whole = tower_group(config, group).size == 1
        graphs = TowerGraphs(tower) if is_whole and isinstance(tower, GraphableTower) else None
    kind: Callable[..., MediaEncoder] = (
        partial(CrossEncoder, model.cross_cache) if media.num_cross_states else MediaEncoder
    )
    return kind(
        tower,
        hidden=config.checkpoint.facts.size_out,
        levels=media.levels,
        scale=media.scale,
        dtype=getattr(torch, config.model.dtype),
        device=device,
        group=ALONE if tower_group(config, group) is group else group,
        graphs=graphs,
    )


def balance_items(costs: Sequence[int], count: int) -> list[list[int]]:
    """Assign items to `count` ranks: in the order of falling cost, each to the rank with the smallest load so
    far."""
    owners: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        least = loads.index(min(loads))
        owners[least].append(number)
        loads[least] += costs[number]
    return owners


def _find_spans(item: MediaItem, first: int, last: int) -> list[tuple[int, int, int]]:
    """Return the spans of an item's placeholder tokens at positions in [first, last), as (start, end, index
    of the first embedding)."""
    spans, begin = [], 0
    if item.offset < last and item.end > first:
        for at, count in item.places():
            start, end = max(at, first), min(at + count, last)
            if start < end:
                spans.append((start, end, begin + start - at))
            begin += count
    return spans


def _matrices(tower: Tower) -> list[Tensor]:
    weights = tower.parameters() if isinstance(tower, torch.nn.Module) else ()
    return [weight for weight in weights if weight.ndim > 1]
