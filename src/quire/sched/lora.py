"""Adapters: read before a request needs them, and in the slots of the device while it runs.

A request comes in once its adapter was read and has a slot; until then others pass it by. An adapter keeps
its slot while it has rows, and then until another needs it, the one that was used longest ago first. So that
nobody waits for ever behind an adapter that always has rows: who has had a slot for a turn (`TURN_S`), and
whose slot another waits for, lets in no more requests. Its rows end, the other gets the slot for a turn, and
those who came meanwhile wait for a slot like anybody else. Adapters get slots in the order in which the line
first looked at them: with S slots the n-th that waits has one after n / S turns, and the answers that were
under way at their ends.
"""

import itertools
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from quire.data.lora import AdapterFacts, LoRARequest
from quire.data.plan import LoRAAssignment
from quire.data.request import Request
from quire.errors import RequestError
from quire.logs import get_logger
from quire.sched.in_flight import StepInFlight

log = get_logger(__name__)

TURN_S = 0.5
"""How long an adapter has its slot before another may have it in turn."""
READ_S = 600.0
"""After which nobody waits any more for an adapter that is being read."""


class AdapterReaders(Protocol):
    """Those who read adapters, away from the steps, in the order in which they are told to."""

    def fetch(self, lora: LoRARequest) -> Future[AdapterFacts]:
        """On every worker, so that plans may put it into a slot."""

    def drop(self, name: str) -> None:
        """No plan will name it any more."""


@dataclass(slots=True, eq=False)
class Slot:
    """Room for one adapter on the device."""

    number: int
    holder: "AdapterRead | None" = None
    is_filled: bool = False
    """Whether the device has it, or will have with the plans that were made."""
    num_rows: int = 0
    since: float = 0.0
    """When the holder got it."""
    used: int = 0
    """The larger, the later."""
    next: "AdapterRead | None" = None
    """Who gets it when it has no more rows. Until then nobody comes in to the holder."""


@dataclass(slots=True, eq=False)
class AdapterRead:
    """What one reading brings, or will. Of a name that is read again there are two for a while: who runs with
    the older one goes on with it."""

    name: str
    lora: LoRARequest
    """As the workers know it: under a name that no other has."""
    waiting: dict[str, Request] = field(default_factory=dict)
    num_asking: int = 0
    """Operators who wait until it was read."""
    coming: Future[AdapterFacts] | None = None
    since: float = 0.0
    """When that began."""
    is_new: bool = False
    """Whether it was read again because somebody has asked for that, and nobody has run with it yet."""
    facts: AdapterFacts | None = None
    error: BaseException | None = None
    slot: Slot | None = None

    @property
    def is_used(self) -> bool:
        return bool(self.waiting) or self.num_asking > 0 or (self.slot is not None and self.slot.num_rows > 0)

    @property
    def is_settled(self) -> bool:
        return self.facts is not None or self.error is not None


class LoRAScheduler:
    """Holds requests until their adapter was read and has a slot."""

    def __init__(
        self,
        reader: AdapterReaders | None = None,
        *,
        max_slots: int = 0,
        max_read: int = 0,
        vocab: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_read` adapters stay in host memory, or one more than there are in slots. Without slots no
        request may have an adapter."""
        self.opened = False
        self.slots = [Slot(number) for number in range(max_slots)]
        self._reader = reader
        self._max_read = max_read
        self._vocab = vocab
        self.in_flight: Collection[StepInFlight] = ()
        """Plans without a result: the scheduler's own."""
        self._clock = clock
        self._newest: dict[tuple[str, str], AdapterRead] = {}
        """By name and place: what a request gets that comes now."""
        self._all: dict[str, AdapterRead] = {}
        """By the workers' name, the one that was used longest ago first."""
        self._of: dict[str, AdapterRead] = {}
        """By request."""
        self._unread: dict[AdapterRead, None] = {}
        """In the order in which they were asked for."""
        self._reading: dict[AdapterRead, Future[AdapterFacts]] = {}
        self._failed: list[AdapterRead] = []
        self._beyond: dict[str, str] = {}
        """Requests with token ids that their adapter does not have, and what they are told."""
        self._without: dict[AdapterRead, None] = {}
        """Those who were read and wait for a slot, in order."""
        self._filled: list[LoRAAssignment] = []
        """What the next plan puts into slots."""
        self._numbers = itertools.count(1)

    # ---- requests come and go

    def add(self, request: Request) -> None:
        if request.lora is None:
            return
        adapter = self._of[request.id] = self._get(request.lora)
        adapter.waiting[request.id] = request
        if adapter.facts is not None:
            self._mark(request, adapter.facts)
        self._read_on()

    def holds(self, request: Request, *, alone: bool = False) -> bool:
        adapter = self._of.get(request.id)
        if adapter is None:
            return False
        if request.id in self._beyond:
            return True
        if alone or adapter.facts is None:
            return adapter.facts is None
        if adapter.slot is not None:
            return adapter.slot.next is not None
        if self._vacant():
            return False
        self._without.setdefault(adapter)
        return True

    def enter(self, request: Request) -> None:
        adapter = self._of.get(request.id)
        if adapter is None:
            return
        del adapter.waiting[request.id]
        adapter.is_new = False
        self._all[adapter.lora.lora_name] = self._all.pop(adapter.lora.lora_name)
        slot = adapter.slot
        if slot is None:
            # One that is tried alone after a failure does not ask who else waits for a slot.
            slot = min(self._vacant() or self._idle(), key=lambda each: (each.holder is not None, each.used))
            self._hand_over(slot, adapter)
        slot.num_rows += 1
        slot.used = next(self._numbers)
        if not slot.is_filled:
            slot.is_filled = True
            self._filled.append(LoRAAssignment(slot.number, adapter.lora))

    def leave(self, request: Request) -> None:
        adapter = self._of.get(request.id)
        if adapter is None:
            return
        adapter.waiting[request.id] = request
        slot = adapter.slot
        assert slot is not None
        slot.num_rows -= 1
        if not slot.num_rows:
            self.opened = True
            if slot.next is not None:
                self._hand_over(slot, slot.next)

    def drop(self, request: Request) -> None:
        adapter = self._of.pop(request.id, None)
        self._beyond.pop(request.id, None)
        if adapter is None:
            return
        del adapter.waiting[request.id]
        if adapter.waiting:
            return
        adapter.is_new = False
        self._without.pop(adapter, None)
        self._claim_no_more(adapter)
        self.opened = True
        if adapter in self._unread and not adapter.num_asking:
            self._forget(adapter)

    def slot_of(self, request: Request) -> int:
        """Of a request with a row; -1: it has no adapter."""
        adapter = self._of.get(request.id)
        if adapter is None:
            return -1
        assert adapter.slot is not None
        return adapter.slot.number

    def take_filled(self) -> list[LoRAAssignment]:
        """What goes into slots with the plan that is being made."""
        filled, self._filled = self._filled, []
        return filled

    # ---- reading

    @property
    def coming(self) -> Collection[Future[AdapterFacts]]:
        return self._reading.values()

    @property
    def is_reading(self) -> bool:
        return any(not coming.done() for coming in self._reading.values())

    def settle(self) -> dict[str, str | None]:
        self.take_in()
        failed, self._failed = self._failed, []
        vain = {id: _why(adapter) for adapter in failed for id in adapter.waiting} | self._beyond
        if self._without:
            self._claim()
        return vain

    def take_in(self) -> None:
        """What was read since the last time."""
        for adapter, coming in list(self._reading.items()):
            if not coming.done() and self._clock() - adapter.since < READ_S:
                continue
            del self._reading[adapter]
            adapter.coming, adapter.error = None, _error_of(coming)
            if adapter.error is not None:
                quiet = isinstance(adapter.error, RequestError)
                log.error(
                    "Adapter %r cannot be read: %s", adapter.name, adapter.error, exc_info=not quiet or None
                )
                self._forget(adapter)
                self._fall_back(adapter)
                self._failed.append(adapter)
                continue
            adapter.facts, self.opened = coming.result(), True
            for request in adapter.waiting.values():
                self._mark(request, adapter.facts)
        self._read_on()

    def _mark(self, request: Request, facts: AdapterFacts) -> None:
        """Its prefixes are those of this adapter, and so are its tokens."""
        if request.adapter_digest != facts.digest:
            request.adapter_digest, request.block_keys = facts.digest, []
        last = self._vocab + facts.num_own - 1
        if request.top_id and request.top_id > last:
            self._beyond[request.id] = (
                f"Token id {request.top_id} is out of vocabulary: ids of this adapter are 0 to {last}"
            )
            self.opened = True

    def _fall_back(self, failed: AdapterRead) -> None:
        """Who was to be read again, and cannot be, stays as it was."""
        key = failed.name, failed.lora.lora_path
        alike = (
            each for each in self._all.values() if (each.name, each.lora.lora_path) == key and each.facts
        )
        for older in alike:
            self._newest.setdefault(key, older)

    def _get(self, lora: LoRARequest) -> AdapterRead:
        """The newest, unless it is to be read again. Those who ask for that before the first of them runs ask
        for the same."""
        found = self._newest.get((lora.lora_name, lora.lora_path))
        fresh = found is not None and (found.facts is None or found.is_new)
        return self._another(lora) if found is None or (lora.load_inplace and not fresh) else found

    def _another(self, lora: LoRARequest) -> AdapterRead:
        assert self._reader is not None, "nobody checked this request"
        name, own = lora.lora_name, lora.lora_name
        while own in self._all:
            own = f"{name}#{next(self._numbers)}"
        known_as = msgspec.structs.replace(lora, lora_name=own, load_inplace=False)
        adapter = AdapterRead(name, known_as, is_new=lora.load_inplace)
        self._all[own] = self._newest[name, lora.lora_path] = adapter
        self._unread[adapter] = None
        return adapter

    def _read_on(self) -> None:
        """Have the next ones read, as far as there is room for them in host memory."""
        if not self._unread or self._reader is None:
            return
        num_read = len(self._all) - len(self._unread)
        room = max(self._max_read, 1 + sum(slot.holder is not None for slot in self.slots))
        spare = (each for each in list(self._all.values()) if each.slot is None and self._may_go(each))
        for adapter in list(self._unread):
            if num_read >= room:
                oldest = next(spare, None)
                if oldest is None:
                    return
                self._forget(oldest)
                num_read -= 1
            del self._unread[adapter]
            adapter.coming = self._reading[adapter] = self._reader.fetch(adapter.lora)
            adapter.since = self._clock()
            num_read += 1

    def _may_go(self, adapter: AdapterRead) -> bool:
        """Nobody uses it, and no plan under way brings it into a slot."""
        if adapter in self._reading or adapter.is_used:
            return False
        coming = (each.adapter for flight in self.in_flight for each in flight.plan.adapters)
        return adapter.lora not in coming

    def _forget(self, adapter: AdapterRead) -> None:
        del self._all[adapter.lora.lora_name]
        key = adapter.name, adapter.lora.lora_path
        if self._newest.get(key) is adapter:
            del self._newest[key]
        if adapter.slot is not None:
            adapter.slot.holder, adapter.slot.is_filled, adapter.slot = None, False, None
        if adapter in self._unread:
            del self._unread[adapter]
        elif self._reader is not None:
            self._reader.drop(adapter.lora.lora_name)

    # ---- slots

    def _idle(self) -> list[Slot]:
        return [slot for slot in self.slots if not slot.num_rows]

    def _vacant(self) -> list[Slot]:
        """Those that nobody who waits is about to use."""
        return [slot for slot in self._idle() if slot.holder is None or not slot.holder.waiting]

    def _hand_over(self, slot: Slot, adapter: AdapterRead) -> None:
        former = slot.holder
        if former is not None:
            former.slot = None
            if former.waiting:
                self._without.setdefault(former)
        self._claim_no_more(adapter)
        self._without.pop(adapter, None)
        slot.holder, slot.next, slot.is_filled, slot.since = adapter, None, False, self._clock()
        adapter.slot = slot
        self.opened = True

    def _claim(self) -> None:
        """Slots for those who wait for one, out of those whose turn is over; the emptiest first."""
        now, num_vacant = self._clock(), len(self._vacant())
        claimed = [slot.next for slot in self.slots if slot.next is not None]
        for adapter in [each for each in self._without if each not in claimed][num_vacant:]:
            over = [slot for slot in self.slots if slot.next is None and now - slot.since >= TURN_S]
            over = [slot for slot in over if slot.num_rows or (slot.holder and slot.holder.waiting)]
            if not over:
                return
            slot = min(over, key=lambda each: each.num_rows)
            if slot.num_rows:
                slot.next = adapter
            else:
                self._hand_over(slot, adapter)

    def _claim_no_more(self, adapter: AdapterRead) -> None:
        for slot in self.slots:
            if slot.next is adapter:
                slot.next = None
                self.opened = True

    def empty_slots(self) -> None:
        """The device has none of them any more, or it is not known whether it has."""
        self._filled.clear()
        for slot in self.slots:
            slot.is_filled = False

    def forget_all(self) -> None:
        """Nor have the workers. What somebody waits for is read again."""
        assert not self.is_reading, "what comes would count as read"
        self.take_in()
        self.empty_slots()
        self._without.clear()
        for adapter in list(self._all.values()):
            if not adapter.is_used:
                self._forget(adapter)
            elif adapter.facts is not None:
                adapter.facts = None
                self._unread[adapter] = None

    # ---- operators

    def begin(self, lora: LoRARequest) -> AdapterRead:
        """Have it read; whoever asks says when he has seen the end of that."""
        found = self._newest.get((lora.lora_name, lora.lora_path))
        begun = found is not None and found not in self._unread
        adapter = self._another(lora) if found is None or (lora.load_inplace and begun) else found
        adapter.num_asking += 1
        self._read_on()
        return adapter

    def retire(self, name: str) -> bool:
        """Requests that come from now on have it read anew. Whether there was one of this name."""
        found = [key for key in self._newest if key[0] == name]
        for key in found:
            del self._newest[key]
        return bool(found)

    def sweep(self, name: str) -> bool:
        """Let go of what has retired or was read again, of this name, and is not used; if that is all."""
        newest = set(self._newest.values())
        old = [each for each in self._all.values() if each.name == name and each not in newest]
        for adapter in old:
            if self._may_go(adapter):
                self._forget(adapter)
        return all(adapter.lora.lora_name not in self._all for adapter in old)

    @property
    def names(self) -> list[str]:
        """Of those that were read."""
        return sorted({each.name for each in self._all.values() if each.facts is not None})

    @property
    def running_names(self) -> list[str]:
        return _sorted(slot.holder for slot in self.slots if slot.num_rows)

    @property
    def waiting_names(self) -> list[str]:
        return _sorted(each for each in self._all.values() if each.waiting)


def _sorted(adapters: Iterable[AdapterRead | None]) -> list[str]:
    return sorted({each.name for each in adapters if each is not None})


def _error_of(coming: Future[AdapterFacts]) -> BaseException | None:
    if not coming.done():
        return RequestError(f"it was not read within {READ_S:g} s", param="lora_request")
    return coming.exception()


def _why(adapter: AdapterRead) -> str | None:
    """What a user is told, who has asked for it."""
    if not isinstance(adapter.error, RequestError):
        return None
    return f"Loading lora {adapter.name} failed: {adapter.error}"
