"""RoutedExperts: the experts of all tokens in the KV cache, so that cached prompts can return theirs."""

import numpy as np
from numpy.typing import NDArray

from quire.data.routed_experts import RoutedRows, StepRoutes
from quire.sched.kv_manager import KVManager
from quire.sched.running import RowIds, Running


class RoutedExperts:
    """Routed experts by slot (token position) of the KV cache. The slots are those of the layer group with
    full attention: a request keeps the blocks of this group until it ends."""

    def __init__(self, kv: KVManager, num_experts: int) -> None:
        self._kv = kv
        self._group = kv.windows.index(None)
        self._dtype = np.uint8 if num_experts <= 256 else np.uint16
        self._by_slot: NDArray[np.uint8 | np.uint16] | None = None
        """[slots, MoE layers, experts per token]; None before the first step."""

    def _learn(self, routes: StepRoutes) -> None:
        """Store the experts that the router chose for the tokens of a step, by cache slot."""
        if self._by_slot is None:
            num_slots = len(self._kv.pool.blocks) * self._kv.block_size
            self._by_slot = np.zeros((num_slots, *routes.experts.shape[1:]), self._dtype)
        is_token = routes.slots >= 0
        self._by_slot[routes.slots[is_token]] = routes.experts[is_token]

    def take(self, routes: StepRoutes | None, running: Running, rows: RowIds) -> dict[str, RoutedRows]:
        """Record the experts of a step; steps come in order. Return by request id the experts of `rows` that
        were not returned before. The last token of a row has none: it is not computed yet."""
        taken = {}
        if routes is not None:
            self._learn(routes)
        for row, end in zip(rows.tolist(), (running.num_known[rows] - 1).tolist(), strict=True):
            request = running.request(row)
            first = max(request.num_routed, request.params.routed_experts_prompt_start)
            if first < end:
                taken[request.id] = RoutedRows.of(self._of(row, first, end))
                request.num_routed = end
        return taken

    def _of(self, row: int, first: int, end: int) -> NDArray[np.uint8 | np.uint16]:
        """Return the experts of a row's tokens from position `first` up to `end`: [tokens, MoE layers,
        experts per token]."""
        assert self._by_slot is not None, "no step has returned experts"
        table, size = self._kv.tables[self._group][row], self._kv.block_size
        blocks = table[first // size : -(-end // size)]
        ids = np.array([0 if block is None else block.id for block in blocks])
        slots = (ids[:, None] * size + np.arange(size)).ravel()
        return self._by_slot[slots[first % size :][: end - first]]
