"""Adapters: those that a worker has read, and which of them sit in the slots of its device."""

import threading
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import torch

from quire.config.engine import EngineConfig
from quire.config.sections import LoRASection
from quire.data.lora import AdapterFacts, LoRARequest
from quire.errors import ConfigError
from quire.layers.lora import AdapterSlots
from quire.loader.lora import LoRAReader, LoRAWeights
from quire.logs import get_logger
from quire.memory import human

log = get_logger(__name__)

_MOST_SPARES, _SPARE_BYTES, _QUIET_S = 4, 1 << 30, 1.0
"""Memory that waits for adapters to come: pieces, bytes in all, and when it is made."""


class _CachedAdapter(NamedTuple):
    path: str
    adapter: LoRAWeights


class _Spares(threading.Thread):
    """Pins memory for adapters to come, once none has been read for a while."""

    def __init__(self, slots: AdapterSlots, max_kept: int) -> None:
        super().__init__(name="quire-pinning", daemon=True)
        self.slots = slots
        self._max_kept, self._size = max_kept, slots.slot_size
        self._is_over = False
        self._asked = threading.Event()
        self._asked.set()
        self.start()

    def ask(self, size: int) -> None:
        """As many numbers as the last one had."""
        self._size = size
        self._asked.set()

    def end(self) -> None:
        """It holds the slots no longer than it has to."""
        self._is_over = True
        self._asked.set()

    def run(self) -> None:
        torch.cuda.set_device(self.slots.device.index or 0)
        while self._asked.wait() and not self._is_over:
            self._asked.clear()
            while self._asked.wait(_QUIET_S) and not self._is_over:
                self._asked.clear()
            if self._is_over:
                return
            most = max(_SPARE_BYTES // max(self._size * self.slots.dtype.itemsize, 1), 1)
            self.slots.keep_spares(min(most, _MOST_SPARES, self._max_kept), self._size)


class LoRAManager:
    """Adapters in host memory, those that were used last, and the way into slots. Reading may go on in other
    threads while steps run."""

    def __init__(self, slots: AdapterSlots, *, max_kept: int, layers: range | None = None) -> None:
        self.slots = slots
        self.max_kept = max(max_kept, slots.max_slots)
        self._reader = LoRAReader(slots, layers)
        self._kept: OrderedDict[str, _CachedAdapter] = OrderedDict()
        """By name, those that were used last at the end."""
        self._in_slots: dict[int, LoRARequest] = {}
        self._lock = threading.Lock()
        self._spares = _Spares(slots, self.max_kept) if slots.device.type == "cuda" else None

    def __len__(self) -> int:
        return len(self._kept)

    def fetch(self, lora: LoRARequest) -> AdapterFacts:
        """Read an adapter, unless it is here; what is in a slot stays."""
        if not lora.load_inplace and (found := self._find(lora)) is not None:
            return found.facts
        return self._read(lora).facts

    def put(self, slot: int, lora: LoRARequest) -> None:
        """Copy an adapter into a slot, in the order of the device's own work."""
        adapter = self._find(lora) or self._read(lora)
        self.slots.put(slot, adapter.factors, adapter.tables, adapter.own)
        with self._lock:
            self._in_slots[slot] = lora

    def drop(self, name: str) -> None:
        """Forget an adapter that nobody uses any more."""
        with self._lock:
            self._kept.pop(name, None)
            self._in_slots = {slot: lora for slot, lora in self._in_slots.items() if lora.name != name}

    def refill(self, slots: AdapterSlots) -> None:
        """What was in slots goes into these, which may be of a model that was loaded again."""
        self.slots, self._reader = slots, LoRAReader(slots, self._reader.layers)
        if self._spares is not None:
            self._spares.slots = slots
        for slot, lora in self._in_slots.items():
            self.put(slot, lora)

    def close(self) -> None:
        """Nothing is asked for any more."""
        if self._spares is not None:
            self._spares.end()
        self.slots.release()

    def _find(self, lora: LoRARequest) -> LoRAWeights | None:
        with self._lock:
            kept = self._kept.get(lora.name)
            if kept is None or kept.path != lora.path:
                return None
            self._kept.move_to_end(lora.name)
            return kept.adapter

    @torch.inference_mode()
    def _read(self, lora: LoRARequest) -> LoRAWeights:
        adapter = self._reader.read(lora.name, Path(lora.path), lora.within)
        if self._spares is not None:
            self._spares.ask(adapter.facts.num_bytes // self.slots.dtype.itemsize)
        with self._lock:
            self._kept[lora.name] = _CachedAdapter(lora.path, adapter)
            self._kept.move_to_end(lora.name)
            used = {each.name for each in self._in_slots.values()} | {lora.name}
            unused = [name for name in self._kept if name not in used]
            for name in unused[: max(len(self._kept) - self.max_kept, 0)]:
                del self._kept[name]
        return adapter


def slots_of(
    lora: LoRASection, dtype: torch.dtype, device: torch.device, *, no_own: str = ""
) -> AdapterSlots | None:
    """What was asked for; None: no adapters. `no_own` is why they cannot bring tokens of their own."""
    if not lora.enable_lora:
        return None
    own = dtype if lora.lora_dtype == "auto" else getattr(torch, lora.lora_dtype)
    if device.type == "cpu" and own == torch.float16:
        own = torch.float32  # no kernel reads the other there
    return AdapterSlots(
        max_slots=lora.max_loras,
        max_rank=lora.max_lora_rank,
        dtype=own,
        device=device,
        only=lora.lora_target_modules,
        divides=lora.fully_sharded_loras,
        whole=lora.lora_whole_modules,
        num_own=0 if no_own else lora.lora_extra_vocab_size,
        no_own=no_own,
    )


def why_no_own(config: EngineConfig) -> str:
    """Why adapters cannot bring tokens of their own; empty if they can."""
    if config.pooling is not None:
        return "a pooling model has none"
    if config.parallel.pipeline_parallel_size > 1:
        return "there are none with pipeline_parallel_size above 1"
    return "" if config.draft is None else "there are none where a model drafts tokens"


def check_slots(slots: AdapterSlots, free: int) -> None:
    """Refuse slots that there is no room for."""
    if slots.num_bytes <= free:
        return
    per_number = slots.max_slots * slots.dtype.itemsize
    experts = sum(point.size for point in slots.points.values() if point.num_experts) * per_number
    of_experts = f" ({human(experts)} of it for experts)" if experts else ""
    raise ConfigError(
        f"{slots.max_slots} slots for adapters of rank {slots.max_rank} take {human(slots.num_bytes)}"
        f"{of_experts}, and {human(free)} are free: lower max_loras or max_lora_rank, or name the layers "
        "that take adapters with lora_target_modules"
    )
