"""LowerTiers: what the KV manager needs from the tiers of the cache below the device."""

from collections.abc import Iterable
from typing import Any, Protocol

from quire.data.kv_tiers import BlockStores
from quire.data.kv_transfer import RemotePrefix
from quire.data.request import Request
from quire.data.stats import TierStats
from quire.sched.admission_checks import AdmissionCheck
from quire.sched.blocks import Block
from quire.sched.running import Running


class LowerTiers(AdmissionCheck, Protocol):
    """Interface of the KV cache tiers below the device: host memory and disk. A request waits while its
    blocks are copied from there to the device."""

    running: Running | None
    """The running requests, for which blocks are reserved."""

    @property
    def has_work(self) -> bool:
        """Whether blocks are being copied or wait to be copied."""

    @property
    def keeps_evicted(self) -> bool:
        """Whether evicted blocks are copied to host memory or disk."""

    def note_evicted(self, blocks: list[Block]) -> None:
        """Record blocks before their prefixes are evicted from the device."""

    def plan(self, step: int, fresh: Iterable[Block]) -> BlockStores | None:
        """Return the blocks that step number `step` copies to lower tiers before it computes; None: no
        blocks. `fresh` are the blocks on the device that the step fills."""

    def finish_step(self, step: int) -> None:
        """Record that step number `step` is done: the blocks that it copied are now available in lower
        tiers."""

    def forget_steps(self) -> None:
        """Forget the steps in flight, which have failed: their copies to lower tiers do not count."""

    def release_waiting(self, request: Request | None = None) -> bool:
        """Release the device blocks that are held for waiting requests, except those of `request`; return
        whether any block was released."""

    def take_stats(self) -> TierStats:
        """Return the statistics of copies to and from lower tiers since the last call."""

    def flush_stores(self) -> None:
        """Copy the blocks that wait for the next step to lower tiers now, because no step is planned."""

    def drain(self) -> None:
        """Wait for the copies to the device that are under way, up to a time limit, unless steps are in
        flight; then release all device blocks held for waiting requests or other engines."""

    def clear(self) -> None:
        """Forget all blocks in lower tiers."""

    def offer(self, request: Request, reason: str) -> dict[str, Any] | None:
        """Keep the prefix of a request that has ended for this reason, if another engine is to read it
        (`request.offers`). Return the `kv_transfer_params` for that engine, or None."""

    def release_remote(self, prefix: RemotePrefix) -> None:
        """Let another engine release a prefix that it keeps and that no request will read."""

    def close(self) -> None:
        """End the exchange of prefixes with other engines."""

    def weights_changed(self) -> None:
        """Stop writing blocks to disk and exchanging them with other engines, since files and other engines
        belong to the old weights."""
