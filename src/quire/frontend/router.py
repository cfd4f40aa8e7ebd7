"""Router: which core a request goes to. It knows numbers only: no sockets, no clock."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.frontend.prefix_map import Keys, PrefixKeys, PrefixMap

SLACK_ROWS = 1 / 16
"""How far the core that knows all of a prompt may be ahead of the least busy one: this part of the sequences
that it runs at once,"""
SLACK_SHARE = 0.1
"""and this part of what the other has."""
MIN_SHARE = 0.05
"""A smaller part of a prompt is not worth a thought."""
PRESSURE = 6.0
"""How much a waiting request counts when the cache is full; nothing while it is half empty."""


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
        prefixes: PrefixMap | None = None,
        first: int = 0,
    ) -> None:
        """`max_num_seqs` run at once in each core. `prefixes` may be shared with other processes; `first` is
        where turns begin, so that they do not all begin with the same core."""
        self.policy = policy
        self.cores = [_Core() for _ in range(num_cores)]
        self._keys = PrefixKeys(block_size)
        self._slack = SLACK_ROWS * max_num_seqs
        self._turn = first
        self._placed: dict[str, tuple[int, int]] = {}
        """By request: core and number of sequences."""
        self._prefixes = prefixes or PrefixMap()

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
            core = self._nearest(depths, keys, len(token_ids), among) if depths else self._least(among)
            if depths:
                self._prefixes.note(keys, core)
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
        self._prefixes.drop(core)

    def forget_prefixes(self) -> None:
        self._prefixes.clear()

    # ---- the choice

    def _rotated(self, core: int) -> int:
        return (core - self._turn) % len(self.cores)

    def _least(self, among: Sequence[int]) -> int:
        """The least busy; of equals each in its turn."""
        core = min(among, key=lambda each: (self.cores[each].load, self._rotated(each)))
        self._turn = (core + 1) % len(self.cores)
        return core

    def _nearest(self, depths: list[int], keys: Keys, length: int, among: Sequence[int]) -> int:
        """The core that has most of the prompt and is not too far ahead of the least busy."""
        loads = {core: self.cores[core].load for core in among}
        least = min(loads.values())
        slack = self._slack + SLACK_SHARE * least
        tried: list[int] = []
        for place, cores in self._prefixes.find(keys):
            share = depths[place] / length
            if share < MIN_SHARE:
                break
            if cores == tried:
                continue
            for core in cores:
                if core not in tried and core in loads and loads[core] <= least + slack * share:
                    return core
            tried = cores
        return self._least(among)
