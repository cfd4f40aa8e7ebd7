"""LoRA scheduling: adapters are read before requests need them and hold a slot while requests use them.

A request is admitted once its adapter is read and has a slot on the device; until then later requests
overtake it. An adapter keeps its slot while it has rows, and then until another adapter needs the slot; the
least recently used adapter is evicted first. An adapter that always has rows must not block the others for
ever. After `TURN_S` in a slot that another adapter waits for, it admits no more requests. When its rows have
ended, the waiting adapter gets the slot, and newer requests of the first adapter wait for a slot in turn.
Slots are assigned in the order in which the queue first considered the adapters. With S slots, the n-th
waiting adapter gets a slot after n / S turns, each prolonged by the outputs that are still running at its
end."""

import itertools
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from quire.data.lora import AdapterFacts, LoRARequest
from quire.data.request import Request
from quire.data.step_plan import LoRAAssignment
from quire.errors import RequestError
from quire.logs import get_logger
from quire.sched.in_flight import StepInFlight

log = get_logger(__name__)

TURN_S = 0.5
"""Seconds that an adapter keeps its slot before another may claim it."""
READ_S = 600.0
"""Seconds after which the reading of an adapter counts as failed."""


class AdapterReaders(Protocol):
    """Reads adapters in the background, in the order of the calls."""

    def fetch(self, lora: LoRARequest) -> Future[AdapterFacts]:
        """Start to read an adapter on every worker, so that plans may put it into a slot; do not wait."""

    def drop(self, name: str) -> None:
        """Release an adapter that no further plan uses."""


@dataclass(slots=True, eq=False)
class Slot:
    """A slot for one adapter on the device."""

    number: int
    holder: "AdapterRead | None" = None
    is_filled: bool = False
    """Whether the device has the weights of the slot's adapter, or will have them once the submitted plans
    have run."""
    num_rows: int = 0
    since: float = 0.0
    """Time at which the holder got the slot."""
    used: int = 0
    """Sequence number of the last use; larger is later."""
    next: "AdapterRead | None" = None
    """Adapter that gets the slot when the holder's rows have ended; the holder admits no more requests."""


@dataclass(slots=True, eq=False)
class AdapterRead:
    """One reading of an adapter, done or pending. While an adapter is read again there are two readings:
    running requests continue with the older one."""

    name: str
    lora: LoRARequest
    """The LoRA request with the unique adapter name that the workers use."""
    waiting: dict[str, Request] = field(default_factory=dict)
    num_calls: int = 0
    """Number of operator calls that wait until the adapter is read."""
    future: Future[AdapterFacts] | None = None
    since: float = 0.0
    """Time at which the reading began."""
    is_new: bool = False
    """Whether the adapter is read again (`load_inplace`), and no request has used this reading yet."""
    facts: AdapterFacts | None = None
    error: BaseException | None = None
    slot: Slot | None = None

    @property
    def is_used(self) -> bool:
        return bool(self.waiting) or self.num_calls > 0 or (self.slot is not None and self.slot.num_rows > 0)

    @property
    def is_settled(self) -> bool:
        return self.facts is not None or self.error is not None


class LoRAScheduler:
    """Holds requests back until their adapter is read and has a slot."""

    def __init__(
        self,
        reader: AdapterReaders | None = None,
        *,
        max_slots: int = 0,
        max_read: int = 0,
        vocab: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Build the scheduler. At most `max_read` adapters stay in host memory, or one more than are in slots
        if that is more. Without slots no request may have an adapter."""
        self.needs_recheck = False
        self.slots = [Slot(number) for number in range(max_slots)]
        self._reader = reader
        self._max_read = max_read
        self._vocab = vocab
        self.in_flight: Collection[StepInFlight] = ()
        """Steps without a result; shared with the scheduler."""
        self._clock = clock
        self._newest_by_key: dict[tuple[str, str], AdapterRead] = {}
        """The reading that a new request gets, by name and path."""
        self._by_worker_name: dict[str, AdapterRead] = {}
        """All readings by the workers' name, the least recently used first."""
        self._by_request: dict[str, AdapterRead] = {}
        """The reading that each request uses, by request id."""
        self._unread: dict[AdapterRead, None] = {}
        """Readings that have not begun, in the order in which they were requested."""
        self._reading: dict[AdapterRead, Future[AdapterFacts]] = {}
        self._failed: list[AdapterRead] = []
        self._out_of_vocab: dict[str, str] = {}
        """Requests with token ids beyond the vocabulary of their adapter, and their error messages."""
        self._without_slot: dict[AdapterRead, None] = {}
        """Adapters that are read and wait for a slot, in order."""
        self._assignments: list[LoRAAssignment] = []
        """Slot assignments of the next plan."""
        self._numbers = itertools.count(1)

    # ---- adding and removing requests

    def add(self, request: Request) -> None:
        if request.lora is None:
            return
        adapter = self._by_request[request.id] = self._reading_for(request.lora)
        adapter.waiting[request.id] = request
        if adapter.facts is not None:
            self._apply_facts(request, adapter.facts)
        self._start_reading()

    def hold_back(self, request: Request, *, alone: bool = False) -> bool:
        adapter = self._by_request.get(request.id)
        if adapter is None:
            return False
        if request.id in self._out_of_vocab:
            return True
        if alone or adapter.facts is None:
            return adapter.facts is None
        if adapter.slot is not None:
            return adapter.slot.next is not None
        if self._free_slots():
            return False
        self._without_slot.setdefault(adapter)
        return True

    def enter(self, request: Request) -> None:
        adapter = self._by_request.get(request.id)
        if adapter is None:
            return
        del adapter.waiting[request.id]
        adapter.is_new = False
        self._by_worker_name[adapter.lora.lora_name] = self._by_worker_name.pop(adapter.lora.lora_name)
        slot = adapter.slot
        if slot is None:
            # A suspect that runs alone after a failure takes any idle slot.
            slot = min(
                self._free_slots() or self._idle_slots(),
                key=lambda slot: (slot.holder is not None, slot.used),
            )
            self._assign_slot(slot, adapter)
        slot.num_rows += 1
        slot.used = next(self._numbers)
        if not slot.is_filled:
            slot.is_filled = True
            self._assignments.append(LoRAAssignment(slot.number, adapter.lora))

    def leave(self, request: Request) -> None:
        adapter = self._by_request.get(request.id)
        if adapter is None:
            return
        adapter.waiting[request.id] = request
        slot = adapter.slot
        assert slot is not None
        slot.num_rows -= 1
        if not slot.num_rows:
            self.needs_recheck = True
            if slot.next is not None:
                self._assign_slot(slot, slot.next)

    def drop(self, request: Request) -> None:
        adapter = self._by_request.pop(request.id, None)
        self._out_of_vocab.pop(request.id, None)
        if adapter is None:
            return
        del adapter.waiting[request.id]
        if adapter.waiting:
            return
        adapter.is_new = False
        self._without_slot.pop(adapter, None)
        self._withdraw_claim(adapter)
        self.needs_recheck = True
        if adapter in self._unread and not adapter.num_calls:
            self._forget(adapter)

    def slot_of(self, request: Request) -> int:
        """Return the slot of a request with a row; -1 if it has no adapter."""
        adapter = self._by_request.get(request.id)
        if adapter is None:
            return -1
        assert adapter.slot is not None
        return adapter.slot.number

    def take_assignments(self) -> list[LoRAAssignment]:
        """Remove and return the slot assignments for the plan that is being made."""
        filled, self._assignments = self._assignments, []
        return filled

    # ---- reading

    @property
    def futures(self) -> Collection[Future[AdapterFacts]]:
        return self._reading.values()

    @property
    def is_reading(self) -> bool:
        return any(not future.done() for future in self._reading.values())

    def settle(self) -> dict[str, str | None]:
        self.collect_reads()
        failed, self._failed = self._failed, []
        errors = {
            id: _error_message(adapter) for adapter in failed for id in adapter.waiting
        } | self._out_of_vocab
        if self._without_slot:
            self._claim()
        return errors

    def collect_reads(self) -> None:
        """Collect the adapter reads that have ended since the last call or have taken too long: their
        requests may be admitted, or fail. Then start more reads."""
        for adapter, future in list(self._reading.items()):
            if not future.done() and self._clock() - adapter.since < READ_S:
                continue
            del self._reading[adapter]
            adapter.future, adapter.error = None, _read_error(future)
            if adapter.error is not None:
                quiet = isinstance(adapter.error, RequestError)
                log.error(
                    "LoRA adapter %r cannot be read: %s",
                    adapter.name,
                    adapter.error,
                    exc_info=not quiet or None,
                )
                self._forget(adapter)
                self._restore_older(adapter)
                self._failed.append(adapter)
                continue
            adapter.facts, self.needs_recheck = future.result(), True
            for request in adapter.waiting.values():
                self._apply_facts(request, adapter.facts)
        self._start_reading()

    def _apply_facts(self, request: Request, facts: AdapterFacts) -> None:
        """Set the adapter's digest for the prefix cache, and check token ids against its vocabulary."""
        if request.adapter_digest != facts.digest:
            request.adapter_digest, request.block_keys = facts.digest, []
        last = self._vocab + facts.num_extra_vocab - 1
        if request.top_id and request.top_id > last:
            self._out_of_vocab[request.id] = (
                f"Token id {request.top_id} is out of vocabulary: ids of this adapter are 0 to {last}"
            )
            self.needs_recheck = True

    def _restore_older(self, failed: AdapterRead) -> None:
        """Restore the older reading of an adapter that could not be read again."""
        key = failed.name, failed.lora.lora_path
        same_name = (
            adapter
            for adapter in self._by_worker_name.values()
            if (adapter.name, adapter.lora.lora_path) == key and adapter.facts
        )
        for older in same_name:
            self._newest_by_key.setdefault(key, older)

    def _reading_for(self, lora: LoRARequest) -> AdapterRead:
        """Return the newest reading, or a new one if the adapter shall be read again. Reload requests share
        one reading until it is used."""
        newest = self._newest_by_key.get((lora.lora_name, lora.lora_path))
        fresh = newest is not None and (newest.facts is None or newest.is_new)
        return self._add_reading(lora) if newest is None or (lora.load_inplace and not fresh) else newest

    def _add_reading(self, lora: LoRARequest) -> AdapterRead:
        assert self._reader is not None, "request was not validated"
        name, worker_name = lora.lora_name, lora.lora_name
        while worker_name in self._by_worker_name:
            worker_name = f"{name}#{next(self._numbers)}"
        worker_lora = msgspec.structs.replace(lora, lora_name=worker_name, load_inplace=False)
        adapter = AdapterRead(name, worker_lora, is_new=lora.load_inplace)
        self._by_worker_name[worker_name] = self._newest_by_key[name, lora.lora_path] = adapter
        self._unread[adapter] = None
        return adapter

    def _start_reading(self) -> None:
        """Start to read the next adapters, evicting unused ones if host memory is full."""
        if not self._unread or self._reader is None:
            return
        num_read = len(self._by_worker_name) - len(self._unread)
        max_read = max(self._max_read, 1 + sum(slot.holder is not None for slot in self.slots))
        spare = (
            entry
            for entry in list(self._by_worker_name.values())
            if entry.slot is None and self._is_evictable(entry)
        )
        for adapter in list(self._unread):
            if num_read >= max_read:
                oldest = next(spare, None)
                if oldest is None:
                    return
                self._forget(oldest)
                num_read -= 1
            del self._unread[adapter]
            adapter.future = self._reading[adapter] = self._reader.fetch(adapter.lora)
            adapter.since = self._clock()
            num_read += 1

    def _is_evictable(self, adapter: AdapterRead) -> bool:
        """Whether an adapter is unused and no step in flight puts it into a slot."""
        if adapter in self._reading or adapter.is_used:
            return False
        in_flight = (assignment.adapter for flight in self.in_flight for assignment in flight.plan.adapters)
        return adapter.lora not in in_flight

    def _forget(self, adapter: AdapterRead) -> None:
        del self._by_worker_name[adapter.lora.lora_name]
        key = adapter.name, adapter.lora.lora_path
        if self._newest_by_key.get(key) is adapter:
            del self._newest_by_key[key]
        if adapter.slot is not None:
            adapter.slot.holder, adapter.slot.is_filled, adapter.slot = None, False, None
        if adapter in self._unread:
            del self._unread[adapter]
        elif self._reader is not None:
            self._reader.drop(adapter.lora.lora_name)

    # ---- slots

    def _idle_slots(self) -> list[Slot]:
        return [slot for slot in self.slots if not slot.num_rows]

    def _free_slots(self) -> list[Slot]:
        """Return the slots whose adapter has no rows, except those that a waiting request of the same adapter
        is about to use."""
        return [slot for slot in self._idle_slots() if slot.holder is None or not slot.holder.waiting]

    def _assign_slot(self, slot: Slot, adapter: AdapterRead) -> None:
        previous = slot.holder
        if previous is not None:
            previous.slot = None
            if previous.waiting:
                self._without_slot.setdefault(previous)
        self._withdraw_claim(adapter)
        self._without_slot.pop(adapter, None)
        slot.holder, slot.next, slot.is_filled, slot.since = adapter, None, False, self._clock()
        adapter.slot = slot
        self.needs_recheck = True

    def _claim(self) -> None:
        """Give adapters that wait for a slot a claim on the slots of holders that have had their turn
        (`TURN_S`), first on slots with the fewest rows."""
        now, num_free = self._clock(), len(self._free_slots())
        with_claims = [slot.next for slot in self.slots if slot.next is not None]
        for adapter in [entry for entry in self._without_slot if entry not in with_claims][num_free:]:
            over = [slot for slot in self.slots if slot.next is None and now - slot.since >= TURN_S]
            over = [slot for slot in over if slot.num_rows or (slot.holder and slot.holder.waiting)]
            if not over:
                return
            slot = min(over, key=lambda entry: entry.num_rows)
            if slot.num_rows:
                slot.next = adapter
            else:
                self._assign_slot(slot, adapter)

    def _withdraw_claim(self, adapter: AdapterRead) -> None:
        for slot in self.slots:
            if slot.next is adapter:
                slot.next = None
                self.needs_recheck = True

    def empty_slots(self) -> None:
        """Mark all slots as empty, because the device may have lost their weights."""
        self._assignments.clear()
        for slot in self.slots:
            slot.is_filled = False

    def forget_all(self) -> None:
        """Forget all adapters that were read, since the workers have lost them. Adapters in use are read
        again."""
        assert not self.is_reading, "readings are in flight"
        self.collect_reads()
        self.empty_slots()
        self._without_slot.clear()
        for adapter in list(self._by_worker_name.values()):
            if not adapter.is_used:
                self._forget(adapter)
            elif adapter.facts is not None:
                adapter.facts = None
                self._unread[adapter] = None

    # ---- operators

    def begin(self, lora: LoRARequest) -> AdapterRead:
        """Start to read an adapter for an operator, and count the caller until it decrements `num_calls`."""
        newest = self._newest_by_key.get((lora.lora_name, lora.lora_path))
        begun = newest is not None and newest not in self._unread
        adapter = self._add_reading(lora) if newest is None or (lora.load_inplace and begun) else newest
        adapter.num_calls += 1
        self._start_reading()
        return adapter

    def retire(self, name: str) -> bool:
        """Make later requests read the adapter of this name anew. Return whether there was an adapter of this
        name."""
        keys = [key for key in self._newest_by_key if key[0] == name]
        for key in keys:
            del self._newest_by_key[key]
        return bool(keys)

    def sweep(self, name: str) -> bool:
        """Evict the retired adapters of this name that no request uses. Return whether none of them is
        left."""
        newest = set(self._newest_by_key.values())
        old = [
            adapter
            for adapter in self._by_worker_name.values()
            if adapter.name == name and adapter not in newest
        ]
        for adapter in old:
            if self._is_evictable(adapter):
                self._forget(adapter)
        return all(adapter.lora.lora_name not in self._by_worker_name for adapter in old)

    @property
    def names(self) -> list[str]:
        """Return the names of the adapters that are read."""
        return _sorted_names(adapter for adapter in self._by_worker_name.values() if adapter.facts)

    @property
    def running_names(self) -> list[str]:
        return _sorted_names(slot.holder for slot in self.slots if slot.num_rows)

    @property
    def waiting_names(self) -> list[str]:
        return _sorted_names(adapter for adapter in self._by_worker_name.values() if adapter.waiting)


def _sorted_names(adapters: Iterable[AdapterRead | None]) -> list[str]:
    return sorted({adapter.name for adapter in adapters if adapter is not None})


def _read_error(future: Future[AdapterFacts]) -> BaseException | None:
    if not future.done():
        return RequestError(f"it was not read within {READ_S:g} s", param="lora_request")
    return future.exception()


def _error_message(adapter: AdapterRead) -> str | None:
    """Return the error message for the client; None for an internal error."""
    if not isinstance(adapter.error, RequestError):
        return None
    return f"Loading lora {adapter.name} failed: {adapter.error}"
