"""LowerTiers: what the KV manager needs from the tiers of the cache below the device."""

from collections.abc import Iterable
from typing import Any, Protocol

from quire.data.kv_tiers import BlockStores
from quire.data.request import Request
from quire.data.stats import TierStats
from quire.sched.admission_checks import AdmissionCheck
from quire.sched.blocks import Block
from quire.sched.running import Running


class LowerTiers(AdmissionCheck, Protocol):
    """The tiers of the KV cache below the device: host memory and disk. A request waits while its blocks are
    copied from there to the device."""

    running: Running | None
    """The running requests, for which blocks are reserved."""

    @property
    def has_work(self) -> bool:
        """Whether blocks are being copied or wait to be copied."""

    def note_evicted(self, blocks: list[Block]) -> None:
        """Record blocks before their prefixes are evicted from the device."""

    def plan(self, step: int, fresh: Iterable[Block]) -> BlockStores | None:
        """Return the blocks that a planned step stores before it computes. `fresh` are the blocks that it
        fills."""

    def finish_step(self, step: int) -> None:
        """Note that a step is done."""

    def forget_steps(self) -> None:
        """Forget the steps in flight, which have failed."""

    def release_waiting(self, request: Request | None = None) -> bool:
        """Release the blocks of waiting requests, except those of `request`; return whether there were
        any."""

    def take_stats(self) -> TierStats:
        """Return the counts since the last call."""

    def flush_stores(self) -> None:
        """Copy the blocks that wait for the next step now, because no step is planned."""

    def drain(self) -> None:
        """Wait for the copies under way, unless steps are in flight, and release all held blocks."""

    def clear(self) -> None:
        """Forget all blocks."""

    def offer(self, request: Request, reason: str) -> dict[str, Any] | None:
        """Keep the prefix of a request that has ended for this reason, if another engine is to read it
        (`request.offers`). Return the `kv_transfer_params` for that engine, or None."""

    def close(self) -> None:
        """End the exchange of prefixes with other engines."""

    def weights_changed(self) -> None:
        """Stop writing blocks to disk and exchanging them with other engines, since files and other engines
        belong to the old weights."""
