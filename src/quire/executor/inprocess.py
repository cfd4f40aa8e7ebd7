"""The executor of a single device: the worker lives in this very process."""

from quire.capacity import CacheSize
from quire.config.engine import EngineConfig
from quire.data.plan import StepPlan
from quire.executor import Pending
from quire.worker.worker import Worker


class InProcessExecutor:
    """A worker in this process, called directly."""

    def __init__(self, config: EngineConfig) -> None:
        self._worker = Worker(config)

    def start(self) -> CacheSize:
        """Load the model and set up its cache; how large the cache came out."""
        return self._worker.start()

    def submit(self, plan: StepPlan) -> Pending:
        return self._worker.submit(plan)

    def watch(self) -> None:
        """It is here."""

    def close(self) -> None:
        self._worker.close()
