"""Router: which core a request goes to. It knows numbers only: no sockets, no clock."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CAPACITY = 1 << 17
"""Prefixes remembered: with the depths below, those of thousands of long prompts."""
SLACK_ROWS = 1 / 16
"""How far the core that knows all of a prompt may be ahead of the least busy one: this part of the sequences
that it runs at once,"""
SLACK_SHARE = 0.1
"""and this part of what the other has."""
MIN_SHARE = 0.05
"""A smaller part of a prompt is not worth a thought."""
PRESSURE = 6.0
"""How much a waiting request counts when the cache is full; nothing while it is half empty."""

_EVEN = 32
"""Blocks up to which every one is a depth to remember; beyond, a 16th to a 32nd of it apart."""
_FACTOR, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


class PrefixKeys:
    """Keys of the beginnings of prompts. Equal beginnings have equal keys."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._depths: NDArray[np.int64] = np.empty(0, np.int64)
        self._powers: NDArray[np.uint64] = np.empty(0, np.uint64)

    def of(self, token_ids: Sequence[int], extra: str | None) -> tuple[list[int], list[int]]:
        """Depths in tokens and the key of each, shallow to deep. The last token is never cached."""
        num_blocks = (len(token_ids) - 1) // self.block_size
        if num_blocks < 1:
            return [], []
        self._grow(num_blocks)
        depths = self._depths[: int(np.searchsorted(self._depths, num_blocks, "right"))] * self.block_size
        ids = np.array(token_ids[: int(depths[-1])], np.uint64)
        mixed = (ids + np.uint64(1)) * _MIX
        sums = np.cumsum((mixed ^ (mixed >> np.uint64(29))) * self._powers[: len(ids)])
        own = np.uint64(hash(extra) & (2**64 - 1))
        return depths.tolist(), (sums[depths - 1] ^ own).tolist()

    def _grow(self, num_blocks: int) -> None:
        if len(self._powers) >= num_blocks * self.block_size:
            return
        num_blocks = 1 << num_blocks.bit_length()
        depths = np.arange(1, num_blocks + 1)
        apart = 1 << np.maximum(np.floor(np.log2(depths)).astype(np.int64) - _EVEN.bit_length() + 2, 0)
        self._depths = depths[depths % apart == 0]
        self._powers = np.cumprod(np.full(num_blocks * self.block_size, _FACTOR), dtype=np.uint64)


@dataclass(slots=True)
class _Core:
    """What is known of a core's load."""

    own: int = 0
    """Sequences that this process has there, always exact."""
    others: int = 0
    """Those of other processes, when the core last told."""
    num_waiting: int = 0
    kv_usage: float = 0.0

    @property
    def load(self) -> float:
        """In sequences. Of two that are equal in that, the one with more room in its cache is less busy."""
        pressure = PRESSURE * max(0.0, self.kv_usage - 0.5)
        return self.own + self.others + self.num_waiting * pressure + self.kv_usage


class Router:
    """Which core a request goes to: where its prefix is cached, unless that one is busier than the others.

    Cores tell how much they have to do, and nothing of their caches: what is remembered is where prompts
    were sent. Nothing is added up that is not taken back by name, so that no count can drift.
    """

    def __init__(
        self,
        num_cores: int,
        *,
        block_size: int,
        max_num_seqs: int,
        policy: str = "affinity",
        capacity: int = CAPACITY,
        first: int = 0,
    ) -> None:
        """`max_num_seqs` run at once in each core. `first` is where turns begin, so that several processes do
        not all begin with the same core."""
        self.policy = policy
        self.cores = [_Core() for _ in range(num_cores)]
        self._keys = PrefixKeys(block_size)
        self._slack = SLACK_ROWS * max_num_seqs
        self._capacity = capacity
        self._turn = first
        self._placed: dict[str, tuple[int, int]] = {}
        """By request: core and number of sequences."""
        self._known: dict[int, tuple[int, ...]] = {}
        """By the key of a prefix: the cores that were sent it, its home first. Longest unused first."""

    def place(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        among: Sequence[int],
        extra: str | None = None,
        num_sequences: int = 1,
    ) -> int:
        """The core for a request, out of those that can be asked; it counts there until `end`."""
        assert among and request_id not in self._placed
        core = among[0]
        if self.policy == "round_robin":
            core = min(among, key=self._rotated)
            self._turn = (core + 1) % len(self.cores)
        elif self.policy == "load" or len(self.cores) == 1:
            core = self._least(among)
        else:
            depths, keys = self._keys.of(token_ids, extra)
            core = self._nearest(depths, keys, len(token_ids), among)
            self._remember(keys, core)
        self._placed[request_id] = core, num_sequences
        self.cores[core].own += num_sequences
        return core

    def end(self, request_id: str) -> None:
        """The request is over, however."""
        if (placed := self._placed.pop(request_id, None)) is not None:
            self.cores[placed[0]].own -= placed[1]

    def hear(self, core: int, *, num_running: int, num_waiting: int, kv_usage: float) -> None:
        """What a core said of itself: it counts requests of all processes."""
        known = self.cores[core]
        known.others = max(num_running + num_waiting - known.own, 0)
        known.num_waiting, known.kv_usage = num_waiting, kv_usage

    def lose(self, core: int) -> None:
        """A core is gone, with its requests and its cache."""
        self._placed = {id: placed for id, placed in self._placed.items() if placed[0] != core}
        self.cores[core] = _Core()
        without = ((key, tuple(x for x in cores if x != core)) for key, cores in self._known.items())
        self._known = {key: cores for key, cores in without if cores}

    def forget_prefixes(self) -> None:
        self._known.clear()

    # ---- the choice

    def _rotated(self, core: int) -> int:
        return (core - self._turn) % len(self.cores)

    def _least(self, among: Sequence[int]) -> int:
        """The least busy; of equals each in its turn."""
        core = min(among, key=lambda each: (self.cores[each].load, self._rotated(each)))
        self._turn = (core + 1) % len(self.cores)
        return core

    def _nearest(self, depths: list[int], keys: list[int], length: int, among: Sequence[int]) -> int:
        """The core that has most of the prompt and is not too far ahead of the least busy."""
        loads = {core: self.cores[core].load for core in among}
        least = min(loads.values())
        slack = self._slack + SLACK_SHARE * least
        tried: tuple[int, ...] = ()
        for depth, key in zip(reversed(depths), reversed(keys), strict=True):
            share = depth / length
            if share < MIN_SHARE:
                break
            cores = self._known.get(key, ())
            if cores == tried:
                continue
            for core in cores:
                if core not in tried and core in loads and loads[core] <= least + slack * share:
                    return core
            tried = cores
        return self._least(among)

    def _remember(self, keys: list[int], core: int) -> None:
        """A core that helps out does not become the home: its copy is the one that is left to age."""
        known = self._known
        for key in keys:
            cores = known.pop(key, ())
            known[key] = cores if core in cores else (*cores, core)
        while len(known) > self._capacity:
            del known[next(iter(known))]
