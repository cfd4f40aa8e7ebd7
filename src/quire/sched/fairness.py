"""Fair shares: the engine's tokens are divided between tenants by their weights.

A tenant stands for an API key and has a small number; 0 stands for all other requests. Its level is the
number of tokens computed for it, divided by its weight. The waiting tenant with the lowest level is next.
This is deficit round robin with computed tokens, so that the cost of a request need not be guessed. Credit
cannot be saved: a tenant that returns to the queue starts no lower than the tenants that wait in it.

The order of the queue suffices while rows and blocks become free. If one tenant has occupied them all for
long, one of its rows is preempted (`row_to_preempt`)."""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.data.request import Request
from quire.data.step_plan import Ints
from quire.sched.running import Running


class Capacity(NamedTuple):
    """Rows and blocks of the engine, and the blocks that one request needs."""

    max_rows: int
    num_blocks: int
    needed_blocks: int
    block_size: int
    shares_prefixes: bool


class FairShare:
    """Records the level (computed tokens divided by weight) of each tenant, by which tenants take turns."""

    def __init__(self) -> None:
        self.levels = np.zeros(1)
        """By tenant: computed tokens divided by weight."""
        self.weights = np.ones(1)

    def enter(self, request: Request, waiting: Collection[int]) -> None:
        """Raise the level of a request's tenant, which had no request in the queue, to at least the lowest
        level of the tenants in `waiting`."""
        missing = request.tenant + 1 - len(self.levels)
        if missing > 0:
            self.levels = np.append(self.levels, np.zeros(missing))
            self.weights = np.append(self.weights, np.ones(missing))
        self.weights[request.tenant] = request.weight
        floor = min(map(self.levels.item, waiting)) if waiting else self.levels.max()
        self.levels[request.tenant] = max(self.levels[request.tenant], floor)

    def lowest_tenant(self, waiting: Collection[int]) -> int:
        return min(waiting, key=self.levels.item)

    def charge(self, tenants: Ints, num_tokens: Ints) -> None:
        self.levels += np.bincount(tenants, num_tokens, len(self.levels)) / self.weights

    def row_to_preempt(
        self, request: Request, running: Running, num_held: Ints, capacity: Capacity
    ) -> int | None:
        """Return the row to preempt for a request that does not fit, or None. `num_held` has the number of
        blocks of each row of `running.order`. The tenant of the preempted row is above its fair share and
        leads the request's tenant by at least the tokens to recompute, so rows are not preempted back and
        forth. The request's tenant stays within its own share, unless it has no row."""
        tenants = running.tenant[running.order]
        rows = self._by_tenant(tenants, np.ones(len(tenants)))
        blocks = self._by_tenant(tenants, num_held)
        is_present = rows > 0
        is_present[request.tenant] = True
        fair_share = self.weights * is_present / self.weights[is_present].sum()
        tenant = request.tenant
        share_after = max(
            (rows[tenant] + 1) / capacity.max_rows,
            (blocks[tenant] + capacity.needed_blocks) / capacity.num_blocks,
        )
        if rows[tenant] and share_after > fair_share[tenant]:
            return None
        used_share = np.maximum(rows / capacity.max_rows, blocks / capacity.num_blocks)
        is_over = (used_share > fair_share) & (rows > 1) & (self.levels > self.levels[tenant])
        if not is_over.any():
            return None
        victim = int(np.argmax(np.where(is_over, self.levels, -np.inf)))
        candidates = running.order[1:][tenants[1:] == victim]  # the oldest row is never preempted
        row = int(candidates[np.argmin(running.num_computed[candidates])])
        num_recomputed = int(running.num_computed[row])
        if capacity.shares_prefixes:  # its blocks stay in the prefix cache until they are reused
            num_recomputed = min(num_recomputed, capacity.needed_blocks * capacity.block_size)
        lead = (self.levels[victim] - self.levels[tenant]) * self.weights[victim]
        return row if lead >= num_recomputed else None

    def largest_holder(self, tenants: Ints, num_held: Ints) -> int:
        """Return the tenant that holds the most blocks relative to its weight. `tenants` has the tenant of
        each row, and `num_held` its number of blocks."""
        return int(np.argmax(self._by_tenant(tenants, num_held) / self.weights))

    def _by_tenant(self, tenants: Ints, values: NDArray[np.float64] | Ints) -> NDArray[np.float64]:
        sums: NDArray[np.float64] = np.bincount(tenants, values, len(self.levels)).astype(np.float64)
        return sums
