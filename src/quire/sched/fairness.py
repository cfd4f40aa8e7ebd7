"""Fair shares: the tokens of the engine, divided between tenants by their weights.

A tenant is a key of the API, a small number; 0 is everybody else. Its level is what was computed for it, by
its weight. Of those who wait the one with the lowest level is next: deficit round robin with the tokens that
were computed, where the classic form needs a guess of what a request will cost. Nobody saves up: who comes
back to the line starts no lower than those who stand in it.

That is enough while rows and blocks become free. Where one tenant has taken them all for long, a row of it
makes way (`in_the_way`).
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.data.plan import Ints
from quire.data.request import Request
from quire.sched.running import Running


class Capacity(NamedTuple):
    """What there is to hold, and what one request would take of it."""

    max_rows: int
    num_blocks: int
    wanted: int
    """Blocks."""
    block_size: int
    shares_prefixes: bool


class FairShare:
    """What each tenant has had."""

    def __init__(self) -> None:
        self.levels = np.zeros(1)
        """By tenant: computed tokens by weight."""
        self.weights = np.ones(1)

    def enter(self, request: Request, waiting: Collection[int]) -> None:
        """The first of a tenant's requests to wait, beside those of the tenants in `waiting`."""
        missing = request.tenant + 1 - len(self.levels)
        if missing > 0:
            self.levels = np.append(self.levels, np.zeros(missing))
            self.weights = np.append(self.weights, np.ones(missing))
        self.weights[request.tenant] = request.weight
        floor = min(map(self.levels.item, waiting)) if waiting else self.levels.max()
        self.levels[request.tenant] = max(self.levels[request.tenant], floor)

    def lowest(self, waiting: Collection[int]) -> int:
        return min(waiting, key=self.levels.item)

    def charge(self, tenants: Ints, num_tokens: Ints) -> None:
        self.levels += np.bincount(tenants, num_tokens, len(self.levels)) / self.weights

    def in_the_way(self, request: Request, running: Running, held: Ints, room: Capacity) -> int | None:
        """The row that makes way for a request which there is no room for; `held` are the blocks of the rows
        in order. It is one of a tenant with more than its share, for one that will not have more. What has to
        be computed again is less than what the one tenant is ahead of the other: so shares are reached
        without rows that come and go."""
        tenants = running.tenant[running.order]
        rows = self._sums(tenants, np.ones(len(tenants)))
        blocks = self._sums(tenants, held)
        here = rows > 0
        here[request.tenant] = True
        due = self.weights * here / self.weights[here].sum()
        mine = request.tenant
        after = max((rows[mine] + 1) / room.max_rows, (blocks[mine] + room.wanted) / room.num_blocks)
        if rows[mine] and after > due[mine]:
            return None
        share = np.maximum(rows / room.max_rows, blocks / room.num_blocks)
        beyond = (share > due) & (rows > 1) & (self.levels > self.levels[mine])
        if not beyond.any():
            return None
        theirs = int(np.argmax(np.where(beyond, self.levels, -np.inf)))
        candidates = running.order[1:][tenants[1:] == theirs]  # the oldest always gets through
        row = int(candidates[np.argmin(running.num_computed[candidates])])
        lost = int(running.num_computed[row])
        if room.shares_prefixes:  # its blocks can be found until somebody else fills them
            lost = min(lost, room.wanted * room.block_size)
        ahead = (self.levels[theirs] - self.levels[mine]) * self.weights[theirs]
        return row if ahead >= lost else None

    def most_beyond(self, tenants: Ints, held: Ints) -> int:
        """The tenant whose rows hold most blocks by its weight."""
        return int(np.argmax(self._sums(tenants, held) / self.weights))

    def _sums(self, tenants: Ints, values: NDArray[np.float64] | Ints) -> NDArray[np.float64]:
        sums: NDArray[np.float64] = np.bincount(tenants, values, len(self.levels)).astype(np.float64)
        return sums
