"""The executor of a single device: the worker lives in this very process."""

import os
import sys

import torch

from quire.capacity import CacheSize
from quire.comm.world import World, join
from quire.config.engine import EngineConfig
from quire.config.experts import meeting_of, steps_together
from quire.config.ranks import Rank
from quire.data.plan import StepPlan
from quire.executor import Pending
from quire.worker.worker import Worker


class InProcessExecutor:
    """A worker in this process, called directly."""

    def __init__(self, config: EngineConfig) -> None:
        self._worker = Worker(config, _meet(config))

    def start(self) -> CacheSize:
        """Load the model and set up its cache; how large the cache came out."""
        return self._worker.start()

    def submit(self, plan: StepPlan) -> Pending:
        return self._worker.submit(plan)

    def watch(self) -> None:
        """It is here."""

    def close(self) -> None:
        self._worker.close()


def _meet(config: EngineConfig) -> World:
    """Alone, or with the devices of other engines that have some of the experts."""
    parallel = config.parallel
    if not steps_together(parallel):
        return World()
    if parallel.data_parallel_address.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    rank, device = Rank(dp=parallel.data_parallel_rank or 0), torch.device(config.machine.device)
    return join(parallel, rank, meeting_of(parallel), device, parallel.distributed_timeout_seconds)
