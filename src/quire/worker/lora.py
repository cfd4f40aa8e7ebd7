"""LoRAManager: the LoRA adapters of a worker, in host memory and in the slots of the device."""

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
"""Limits of the pinned memory that is kept for adapters to be read later (number of buffers, bytes), and the
seconds without a read after which it is pinned."""


class _CachedAdapter(NamedTuple):
    path: str
    adapter: LoRAWeights


class _Spares(threading.Thread):
    """A thread that pins host memory for adapters to be read later. It waits until no adapter has been read
    for `_QUIET_S` seconds."""

    def __init__(self, slots: AdapterSlots, max_cached: int) -> None:
        super().__init__(name="quire-pinning", daemon=True)
        self.slots = slots
        self.max_cached, self._size = max_cached, slots.slot_size
        self._is_over = False
        self._requested = threading.Event()
        self._requested.set()
        self.start()

    def request(self, size: int) -> None:
        """Request buffers for adapters of `size` elements, the size of the adapter read last."""
        self._size = size
        self._requested.set()

    def end(self) -> None:
        """Stop the thread, so that it releases the slots."""
        self._is_over = True
        self._requested.set()

    def run(self) -> None:
        torch.cuda.set_device(self.slots.device.index or 0)
        while self._requested.wait() and not self._is_over:
            self._requested.clear()
            while self._requested.wait(_QUIET_S) and not self._is_over:
                self._requested.clear()
            if self._is_over:
                return
            most = max(_SPARE_BYTES // max(self._size * self.slots.dtype.itemsize, 1), 1)
            self.slots.pin_spares(min(most, _MOST_SPARES, self.max_cached), self._size)


class LoRAManager:
    """Keeps the most recently used adapters in host memory, and copies adapters into the slots of the device.
    Other threads may read adapters while steps run."""

    def __init__(self, slots: AdapterSlots, *, max_cached: int, layers: range | None = None) -> None:
        self.slots = slots
        self.max_cached = max(max_cached, slots.max_slots)
        self._reader = LoRAReader(slots, layers)
        self._cached: OrderedDict[str, _CachedAdapter] = OrderedDict()
        """Adapters by name, the most recently used last."""
        self._in_slots: dict[int, LoRARequest] = {}
        self._lock = threading.Lock()
        self._spares = _Spares(slots, self.max_cached) if slots.device.type == "cuda" else None

    def __len__(self) -> int:
        return len(self._cached)

    def fetch(self, lora: LoRARequest) -> AdapterFacts:
        """Read an adapter into host memory, unless it is there already, and return its facts. The slots of
        the device do not change."""
        if not lora.load_inplace and (adapter := self._find(lora)) is not None:
            return adapter.facts
        return self._read(lora).facts

    def put(self, slot: int, lora: LoRARequest) -> None:
        """Copy an adapter into a slot of the device, between the submitted steps and the next ones."""
        adapter = self._find(lora) or self._read(lora)
        self.slots.put(slot, adapter.factors, adapter.tables, adapter.vocab_rows)
        with self._lock:
            self._in_slots[slot] = lora

    def drop(self, name: str) -> None:
        """Drop an adapter that no request uses any more."""
        with self._lock:
            self._cached.pop(name, None)
            self._in_slots = {slot: lora for slot, lora in self._in_slots.items() if lora.name != name}

    def refill(self, slots: AdapterSlots) -> None:
        """Copy the adapters of all slots into new slots, which may belong to a reloaded model."""
        self.slots, self._reader = slots, LoRAReader(slots, self._reader.layers)
        if self._spares is not None:
            self._spares.slots = slots
        for slot, lora in self._in_slots.items():
            self.put(slot, lora)

    def close(self) -> None:
        """Free the slots and stop pinning memory."""
        if self._spares is not None:
            self._spares.end()
        self.slots.release()

    def _find(self, lora: LoRARequest) -> LoRAWeights | None:
        with self._lock:
            cached = self._cached.get(lora.name)
            if cached is None or cached.path != lora.path:
                return None
            self._cached.move_to_end(lora.name)
            return cached.adapter

    @torch.inference_mode()
    def _read(self, lora: LoRARequest) -> LoRAWeights:
        adapter = self._reader.read(lora.name, Path(lora.path), lora.within)
        if self._spares is not None:
            self._spares.request(adapter.facts.num_bytes // self.slots.dtype.itemsize)
        with self._lock:
            self._cached[lora.name] = _CachedAdapter(lora.path, adapter)
            self._cached.move_to_end(lora.name)
            used = {request.name for request in self._in_slots.values()} | {lora.name}
            unused = [name for name in self._cached if name not in used]
            for name in unused[: max(len(self._cached) - self.max_cached, 0)]:
                del self._cached[name]
        return adapter


def slots_of(
    lora: LoRASection, dtype: torch.dtype, device: torch.device, *, no_extra_vocab: str = ""
) -> AdapterSlots | None:
    """Build the adapter slots of the configuration; None if LoRA is off. `no_extra_vocab` is the reason why
    adapters cannot add tokens."""
    if not lora.enable_lora:
        return None
    slot_dtype = dtype if lora.lora_dtype == "auto" else getattr(torch, lora.lora_dtype)
    if device.type == "cpu" and slot_dtype == torch.float16:
        slot_dtype = torch.float32  # no CPU kernel reads float16
    return AdapterSlots(
        max_slots=lora.max_loras,
        max_rank=lora.max_lora_rank,
        dtype=slot_dtype,
        device=device,
        only=lora.lora_target_modules,
        fully_sharded=lora.fully_sharded_loras,
        whole_modules=lora.lora_whole_modules,
        max_extra_vocab=0 if no_extra_vocab else lora.lora_extra_vocab_size,
        no_extra_vocab=no_extra_vocab,
    )


def no_extra_vocab_reason(config: EngineConfig) -> str:
    """Return the reason why adapters cannot add tokens; empty if they can."""
    if config.pooling is not None:
        return "a pooling model takes no additional tokens"
    if config.parallel.pipeline_parallel_size > 1:
        return "pipeline_parallel_size above 1 does not support them"
    return "" if config.draft is None else "speculative decoding with a draft model does not support them"


def check_slots(slots: AdapterSlots, free: int) -> None:
    """Raise ConfigError if there is not enough free memory for the slots."""
    if slots.num_bytes <= free:
        return
    per_number = slots.max_slots * slots.dtype.itemsize
    experts = sum(layer.size for layer in slots.layers.values() if layer.num_experts) * per_number
    of_experts = f" ({human(experts)} of it for experts)" if experts else ""
    raise ConfigError(
        f"{slots.max_slots} slots for adapters of rank {slots.max_rank} take {human(slots.num_bytes)}"
        f"{of_experts}, and {human(free)} are free: lower max_loras or max_lora_rank, or name the layers "
        "that take adapters with lora_target_modules"
    )
