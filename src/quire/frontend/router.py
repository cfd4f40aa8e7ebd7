"""Routing of requests to data-parallel engine cores; pure bookkeeping without sockets or clock."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quire.frontend.prefix_map import Keys, PrefixKeys, PrefixMap, key_of_session

SLACK_ROWS = 1 / 16
"""Fraction of max_num_seqs by which the load of a core with the whole prompt cached may exceed the load of
the least busy core."""
SESSION_SLACK_ROWS = 1 / 2
"""Fraction of max_num_seqs by which the load of a session's core may exceed the least load."""
SLACK_SHARE = 0.1
"""Fraction of the least busy core's load that is added to the slack of SLACK_ROWS."""
MIN_SHARE = 0.05
"""Smallest cached fraction of a prompt that affects routing."""
PRESSURE = 6.0
"""Weight of a waiting request in the load, multiplied by the KV cache usage above one half."""


class Prefix(NamedTuple):
    """The prefixes of a prompt: their lengths in tokens (`depths`), their keys, and the length of the
    prompt."""

    depths: list[int]
    keys: Keys
    length: int


NO_PREFIX = Prefix([], np.empty(0, np.uint64), 0)


@dataclass(slots=True)
class _Core:
    """Load of an engine core, as far as this process knows it."""

    num_local: int = 0
    """Sequences that this process has sent to the core, always exact."""
    num_remote: float = 0
    """Sequences that other processes have sent to the core, as last reported."""
    num_waiting: float = 0
    kv_usage: float = 0.0

    @property
    def load(self) -> float:
        """Return the load in sequences. The KV cache usage (0 to 1) is added, so that it decides between
        equal numbers."""
        pressure = PRESSURE * max(0.0, self.kv_usage - 0.5)
        return self.num_local + self.num_remote + self.num_waiting * pressure + self.kv_usage


class Router:
    """Chooses for a request the core that has its prefix cached, unless this core is much busier than others.

    Cores report their load, not their caches: the router remembers where prompts were sent. Requests are
    counted and removed by id, so that no count can drift.
    """

    def __init__(
        self,
        num_cores: int,
        *,
        block_size: int,
        max_num_seqs: int,
        policy: str = "affinity",
        prefixes: PrefixMap | None = None,
        first: int = 0,
    ) -> None:
        """Create a router for `num_cores` cores without load. `max_num_seqs` is that of one core. `prefixes`
        may be shared with other processes; `first` is the first core of the rotation, which should differ
        between processes."""
        self.policy = policy
        self.cores = [_Core() for _ in range(num_cores)]
        self._keys = PrefixKeys(block_size)
        self._slack = SLACK_ROWS * max_num_seqs
        self._session_slack = SESSION_SLACK_ROWS * max_num_seqs
        self._next_core = first
        self._placed: dict[str, tuple[int, int]] = {}
        """Core and number of sequences by request."""
        self._prefixes = prefixes or PrefixMap()
        self._evicted: PrefixMap | None = None
        """Prefixes that have left the caches of cores; None until a core reports any."""

    def place(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        among: Sequence[int],
        extra: str | None = None,
        session: str | None = None,
        num_sequences: int = 1,
    ) -> int:
        """Return the core in `among` for a request, and count the request on it until `end`. The requests of
        a session stay on one core. `extra` is what a cached prefix depends on besides the tokens."""
        assert among and request_id not in self._placed
        prefix = NO_PREFIX if len(self.cores) == 1 else self.prefix_of(token_ids, extra)
        core = self.choose(prefix, among=among, session=session)
        self.assign(request_id, core, prefix, session=session, num_sequences=num_sequences)
        return core

    def prefix_of(self, token_ids: Sequence[int], extra: str | None) -> Prefix:
        """Return the prefixes of a prompt with their keys; none if the routing policy does not use
        prefixes."""
        if self.policy != "affinity":
            return NO_PREFIX
        return Prefix(*self._keys.of(token_ids, extra), len(token_ids))

    def choose(self, prefix: Prefix, *, among: Sequence[int], session: str | None = None) -> int:
        """Return the core in `among` that the routing policy prefers for a prompt with these prefixes."""
        if self.policy == "round_robin":
            core = min(among, key=self._rotated)
            self._next_core = (core + 1) % len(self.cores)
            return core
        if self.policy == "load" or len(self.cores) == 1:
            return self._least(among)
        home = None if session is None else self._home(session, among)
        if home is not None:
            return home
        return self._nearest(prefix, among) if prefix.depths else self._least(among)

    def assign(
        self,
        request_id: str,
        core: int,
        prefix: Prefix,
        *,
        session: str | None = None,
        num_sequences: int = 1,
    ) -> None:
        """Count a request on a core until `end`, and remember its prefix and its session there."""
        if prefix.depths:
            self._prefixes.note(prefix.keys, core)
            if self._evicted is not None:
                self._evicted.forget(prefix.keys, core)
        if session is not None and self.policy == "affinity":
            self._prefixes.note(key_of_session(session), core)
        self._placed[request_id] = core, num_sequences
        self.cores[core].num_local += num_sequences

    def end(self, request_id: str) -> None:
        if (placed := self._placed.pop(request_id, None)) is not None:
            self.cores[placed[0]].num_local -= placed[1]

    def update_load(self, core: int, *, num_running: float, num_waiting: float, kv_usage: float) -> None:
        """Set the load that a core has reported: the numbers of running and waiting sequences of all
        processes, and the used share of the KV cache (0 to 1)."""
        load = self.cores[core]
        load.num_remote = max(num_running + num_waiting - load.num_local, 0)
        load.num_waiting, load.kv_usage = num_waiting, kv_usage

    def lose(self, core: int) -> None:
        """Forget the requests and the recorded prefixes of a core that died."""
        self._placed = {id: placed for id, placed in self._placed.items() if placed[0] != core}
        self.cores[core] = _Core()
        self._prefixes.drop(core)
        if self._evicted is not None:
            self._evicted.drop(core)

    def add_core(self) -> int:
        self.cores.append(_Core())
        return len(self.cores) - 1

    def num_cached(self, core: int, prefix: Prefix) -> int:
        """Return the number of tokens of a prompt that a core has cached, as far as it is known. Only some
        lengths have keys, so up to a 16th of the prompt may be cached in addition."""
        evicted = {} if self._evicted is None else dict(self._evicted.find(prefix.keys))
        known = (
            prefix.depths[place]
            for place, cores in self._prefixes.find(prefix.keys)
            if core in cores and core not in evicted.get(place, ())
        )
        return next(known, 0)

    def note_cached(self, core: int, stored: Keys, removed: Keys) -> None:
        """Record prefixes that have entered and left the cache of a core."""
        if self._evicted is None:
            self._evicted = PrefixMap()
        self._prefixes.note(stored, core)
        self._evicted.forget(stored, core)
        self._evicted.note(removed, core)

    def forget_prefixes(self) -> None:
        self._prefixes.clear()

    # ---- the choice

    def _rotated(self, core: int) -> int:
        return (core - self._next_core) % len(self.cores)

    def _least(self, among: Sequence[int]) -> int:
        """Return the least busy core; equal cores take turns."""
        core = min(among, key=lambda core: (self.cores[core].load, self._rotated(core)))
        self._next_core = (core + 1) % len(self.cores)
        return core

    def _home(self, session: str, among: Sequence[int]) -> int | None:
        """Return the core of a session; None if it is unavailable or much busier than the least busy core."""
        eligible = self.not_much_busier(among)
        for _, cores in self._prefixes.find(key_of_session(session)):
            for core in cores:
                if core in eligible:
                    return core
        return None

    def not_much_busier(self, among: Sequence[int]) -> list[int]:
        """Return the cores that a session may use: their load is not far above the least load."""
        least = min(self.cores[core].load for core in among)
        return [core for core in among if self.cores[core].load <= least + self._session_slack]

    def _nearest(self, prefix: Prefix, among: Sequence[int]) -> int:
        """Return the core with most of the prompt cached, if its load is near that of the least busy core. A
        core counts while it has half of a prefix: caches evict the ends of prefixes first, and conversations
        that move at each eviction evict each other everywhere."""
        loads = {core: self.cores[core].load for core in among}
        least = min(loads.values())
        slack = self._slack + SLACK_SHARE * least
        evicted = {} if self._evicted is None else dict(self._evicted.find(prefix.keys))
        tried: list[int] = []
        for place, cores in self._prefixes.find(prefix.keys):
            share = prefix.depths[place] / prefix.length
            if share < MIN_SHARE:
                break
            half = bisect_left(prefix.depths, prefix.depths[place] / 2)
            cores = [core for core in cores if core not in evicted.get(half, ())]
            if cores == tried:
                continue
            for core in cores:
                if core not in tried and core in loads and loads[core] <= least + slack * share:
                    return core
            tried = cores
        return self._least(among)
