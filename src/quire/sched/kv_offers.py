"""KVOffers: prefixes that a prefill engine keeps for the decode engines that read them.

A prefix is kept from the end of its request until it was read, or for a limited time. The scheduler adds and
releases prefixes; a thread reads their entries for other engines."""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from quire.data.kv_tiers import is_state
from quire.data.request import Request
from quire.logs import get_logger
from quire.sched.blocks import Block
from quire.sched.kv_manager import Hit, KVManager
from quire.sched.tier_index import IN_LOWER_TIER

log = get_logger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class HeldEntries:
    """KV blocks and SSM state checkpoints on the device that are held for a request without a row."""

    pages: list[Block] = field(default_factory=list)
    states: list[Block] = field(default_factory=list)

    @classmethod
    def of(cls, kv: KVManager, request: Request, hit: Hit) -> "HeldEntries":
        """Return the entries of a request's hit that are on the device."""
        blocks = (block for table in hit.blocks for block in table)
        pages = [block for block in blocks if block is not None and block is not IN_LOWER_TIER]
        key = kv.state_key(request, hit)
        state = None if key is None else kv.pool.find(key)
        return cls(pages, [] if state is None else [state])

    def share(self, kv: KVManager) -> None:
        kv.pool.share(self.pages)
        if kv.states is not None:
            kv.states.pool.share(self.states)

    def release(self, kv: KVManager) -> None:
        kv.pool.release(self.pages)
        if kv.states is not None:
            kv.states.pool.release(self.states)


@dataclass(frozen=True, slots=True)
class OfferAddress:
    """The address at which other engines read the prefixes of this one."""

    engine_id: str
    host: str
    port: int


@dataclass(slots=True)
class _Offer:
    """A prefix kept for another engine."""

    held: HeldEntries
    until: float
    """Time at which the prefix is dropped, in seconds of the clock."""
    ended: set[int] = field(default_factory=set)
    """Ranks of the other engine that will read nothing more of the prefix."""
    ids: dict[bytes, int] = field(init=False)
    """Block id of each entry on the device, by key."""

    def __post_init__(self) -> None:
        entries = (*self.held.pages, *self.held.states)
        self.ids = {block.key: block.id for block in entries if block.key is not None}


class KVOffers:
    """The prefixes that this engine keeps for other engines. The name of a prefix consists of its request id
    and a random part."""

    def __init__(
        self,
        kv: KVManager,
        address: OfferAddress,
        *,
        seconds: float,
        tp_size: int = 1,
        num_ranks: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Build the offers. A prefix is kept for at most `seconds`, or until all ranks of an engine with as
        many ranks as this one have read it. `tp_size` is the size of tensor parallelism."""
        self._kv = kv
        self.address = address
        self._seconds = seconds
        self._tp_size, self._num_ranks = tp_size, num_ranks
        self._clock = clock
        self._offers: dict[str, _Offer] = {}
        """Prefixes by name, in the order in which they expire."""
        self._lock = threading.Lock()
        """Held while entries are read, and while a prefix is removed."""
        self.num_expired = 0
        """Number of prefixes that were not read in time, since the last report."""
        self.on_close: Callable[[], None] = lambda: None
        """Ends the thread that reads entries."""

    def __len__(self) -> int:
        return len(self._offers)

    # ---- in the thread of the scheduler

    def offer(self, request: Request) -> dict[str, Any]:
        """Keep the cached prefix of a request's prompt for another engine. Return the `kv_transfer_params` by
        which that engine finds it. The request must not hold a row any more."""
        kv, prompt_len = self._kv, request.prompt_len
        prompt = msgspec.structs.replace(
            request,
            tokens=request.tokens[:prompt_len],
            block_keys=request.block_keys[: prompt_len // kv.block_size],
        )
        hit = kv.lookup(prompt)
        held = HeldEntries.of(kv, prompt, hit)
        name = f"{request.id}-{secrets.token_hex(8)}"  # clients choose request ids; names must not be guessed
        if hit.num_tokens:
            held.share(kv)
            self._offers[name] = _Offer(held, self._clock() + self._seconds)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[block.id for block in table if block is not None] for table in hit.blocks],
            "remote_engine_id": self.address.engine_id,
            "remote_request_id": name,
            "remote_host": self.address.host,
            "remote_port": self.address.port,
            "tp_size": self._tp_size,
            "remote_num_tokens": hit.num_tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
        }

    def settle(self) -> bool:
        """Release the prefixes that were read or have expired; return whether there were any."""
        now = self._clock()
        read = {name for name, offer in self._offers.items() if len(offer.ended) == self._num_ranks}
        over = [name for name, offer in self._offers.items() if name in read or offer.until <= now]
        for name in over:
            if name not in read:
                self.num_expired += 1
                self._drop(name, f"it was not read within {self._seconds:g} s")
            else:
                self._release(name)
        return bool(over)

    def withdraw_oldest(self, reason: str) -> bool:
        """Release the prefix that is kept for the longest time; return whether there was one."""
        name = next(iter(self._offers), None)
        if name is not None:
            self._drop(name, reason)
        return name is not None

    def withdraw_all(self, reason: str) -> None:
        self.settle()
        while self.withdraw_oldest(reason):
            pass

    def _drop(self, name: str, reason: str) -> None:
        log.warning(
            "Released the KV cache of request %s, which was kept for another engine: %s", name, reason
        )
        self._release(name)

    def _release(self, name: str) -> None:
        with self._lock:
            offer = self._offers.pop(name)
        offer.held.release(self._kv)

    # ---- in the thread that answers other engines

    def read(
        self, name: str, keys: Sequence[bytes], copy: Callable[[list[int], bool], T]
    ) -> tuple[list[int], T | None]:
        """Call `copy` with the block ids of the prefix's entries that have one of the keys, and with whether
        they are SSM states. Return the indices of the keys found, and the result of `copy`. The entries are
        not released meanwhile."""
        with self._lock:
            offer = self._offers.get(name)
            ids = {} if offer is None else offer.ids
            places = [place for place, key in enumerate(keys) if key in ids]
            if not places:
                return [], None
            return places, copy([ids[keys[place]] for place in places], is_state(keys[places[0]]))

    def end(self, name: str, rank: int = 0) -> None:
        """Note that a rank of the other engine will read nothing more of a prefix. The prefix is released
        when all of its ranks have ended."""
        if (offer := self._offers.get(name)) is not None:
            offer.ended.add(rank)
