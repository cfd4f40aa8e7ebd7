"""Preemption: the choice of the row to preempt when blocks run out, and the warning about it."""

import time

import numpy as np

from quire.logs import get_logger, printable
from quire.sched.running import RowIds, Running
from quire.sched.tier_protocol import LowerTiers

log = get_logger(__name__)

WARN_INTERVAL_S = 10.0
_WARNING = (
    "Sequence group %s is preempted by PreemptionMode.RECOMPUTE mode because there is not enough KV cache"
    " space. This can affect the end-to-end performance. Increase gpu_memory_utilization or"
    " tensor_parallel_size to provide more KV cache memory. Increasing pipeline_parallel_size, or"
    " decreasing max_num_seqs, max_num_batched_tokens or max_model_len, helps, too."
    " total_cumulative_preemption_cnt=%d"
)


def choose_victim(running: Running, policy: str, among: RowIds | None = None) -> int:
    """Return the row to preempt: of the quarter of rows that was admitted last, the one with the fewest
    computed tokens, which is the cheapest to recompute.

    The oldest row is spared unless it is alone, so that one request always finishes. Under the priority
    policy only rows of the least urgent priority are considered; with fair shares only the rows `among`."""
    candidates = running.order[1:] if len(running) > 1 else running.order
    if among is not None and len(beyond := among[among != running.order[0]]):
        candidates = beyond
    elif policy == "priority":
        urgency = np.array([running.request(row).priority for row in running.order.tolist()])
        candidates = running.order[urgency == urgency.max()]
    latest = candidates[-max(1, len(candidates) // 4) :]
    return int(latest[np.argmin(running.num_computed[latest])])


class PreemptionWarning:
    """Warns the user about preemptions and names remedies."""

    def __init__(self) -> None:
        self._next = 0.0

    def __call__(self, request_id: str, num_preemptions: int, tiers: LowerTiers | None = None) -> None:
        """Log the warning, at most once per `WARN_INTERVAL_S`. It says whether evicted blocks are copied to
        one of the lower `tiers` of the KV cache."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + WARN_INTERVAL_S
        swaps = tiers is not None and tiers.keeps_evicted
        log.warning(
            _WARNING.replace("RECOMPUTE", "SWAP") if swaps else _WARNING,
            printable(request_id),
            num_preemptions,
        )
