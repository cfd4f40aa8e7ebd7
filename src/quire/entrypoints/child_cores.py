"""Engine cores as child processes, and an engine with such cores that opens no network port."""

import asyncio
import functools
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from quire.config.data_parallel import local_ranks
from quire.config.engine import EngineConfig
from quire.config.mm_caches import engine_holds_values
from quire.core.child import KILL_AFTER_S, clear_gauges, core_child
from quire.core.facts import CoreFacts
from quire.entrypoints.api_process import make_engine
from quire.errors import ConfigError
from quire.frontend.core_relay import CoreRelay
from quire.frontend.engine import AsyncEngine
from quire.metrics.api_keys import KeyPages
from quire.metrics.pages import MetricsLayout, MetricsPages
from quire.system.child import Child
from quire.system.cluster_token import new_token
from quire.system.scratch import Scratch

POLL_S = 0.2


class ChildCores:
    """The engine cores of one model as child processes, and the client to them."""

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        *,
        health_timeout_s: float = float("inf"),
        cores_return: bool = False,
        keys: KeyPages | None = None,
    ) -> None:
        """Prepare the engine cores; no process is started yet. `folder` gets their sockets and the metrics
        file. With `cores_return`, requests of a dead core wait until `restart_dead` has started it again;
        otherwise they fail."""
        self.config = config
        ranks = local_ranks(config.parallel)
        if len(ranks) != config.parallel.data_parallel_size:
            raise ConfigError("here all data-parallel ranks of a model must run on this machine")
        self._health_timeout_s, self._cores_return, self._keys = health_timeout_s, cores_return, keys
        self._metrics_file, self._layout = folder / "metrics", MetricsLayout.of(config)
        MetricsPages.create(self._metrics_file, self._layout, num_api=1, num_engines=len(ranks))
        keeps_media = engine_holds_values(
            config.multimodal, config.parallel, num_api=1, num_engines=len(ranks)
        )
        self._token = new_token()
        self._facts = {
            rank: CoreFacts(
                f"ipc://{folder}/core{rank}",
                self._metrics_file,
                token=self._token,
                page=rank,
                num_pages=len(ranks),
                index=rank,
                num_local=len(ranks),
                keeps_media=keeps_media,
            )
            for rank in ranks
        }
        self.children: dict[int, Child] = {}

    @functools.cached_property
    def engine(self) -> AsyncEngine:
        """Return the client of the cores. It is built on first use, while the processes are starting."""
        num_engines = len(self._facts)
        return make_engine(
            self.config,
            addresses={rank: facts.address for rank, facts in self._facts.items()},
            token=self._token,
            metrics=MetricsPages(self._layout, self._metrics_file, process=1, num_engines=num_engines),
            health_timeout_s=self._health_timeout_s,
            cores_return=self._cores_return,
            keys=self._keys,
        )

    def relay(self, on_end: Callable[[], object]) -> CoreRelay:
        """Return a relay, which is used instead of the client `engine`: it passes requests of other machines
        to the only core. `on_end` is called when the core has ended."""
        (facts,) = self._facts.values()
        return CoreRelay(facts.address, self._token, health_timeout_s=self._health_timeout_s, on_end=on_end)

    def start(self) -> None:
        """Start a process for each core."""
        for rank, facts in self._facts.items():
            self.children[rank] = core_child(self.config, rank, facts, len(self._facts))
            self.children[rank].start()

    async def wait_until_up(self) -> None:
        """Wait until every process reports that it runs; raise a ConfigError if one cannot start."""
        for child in self.children.values():
            await child.await_up()

    async def wait_until_ready(self, client: AsyncEngine | CoreRelay | None = None) -> None:
        """Wait until the client, by default `engine`, is connected to all cores. Raise a ConfigError if a
        core ends before."""
        ready = asyncio.ensure_future((client or self.engine).ready())
        try:
            while not (await asyncio.wait((ready,), timeout=POLL_S))[0]:
                for child in self.children.values():
                    if not child.is_alive:
                        raise ConfigError(f"{child.name} ended while it was starting; see the log")
        finally:
            ready.cancel()

    def restart_dead(self, *, restarts: bool = True) -> bool:
        """Check the cores and return whether one is still dead. With `restarts`, the dead cores whose backoff
        has passed are started again first."""
        dead = False
        for rank, child in self.children.items():
            if child.look():
                clear_gauges(self._layout, self._facts[rank])
            if restarts and child.restart_at is not None and time.monotonic() >= child.restart_at:
                child.start()
            dead = dead or child.process is None
        return dead

    def end(self) -> None:
        """Terminate all core processes, and return when they have ended."""
        for child in self.children.values():
            child.end(signal.SIGTERM, KILL_AFTER_S)
        for rank in self.children:
            clear_gauges(self._layout, self._facts[rank])
        self.children = {}


@asynccontextmanager
async def private_engine(config: EngineConfig) -> AsyncIterator[AsyncEngine]:
    """Yield a ready engine, and clean up all of its processes and files afterwards."""
    with ExitStack() as stack:
        cores = ChildCores(config, stack.enter_context(Scratch()).path)
        stack.callback(cores.end)
        cores.start()
        engine = cores.engine
        await cores.wait_until_up()
        engine.start()
        stack.callback(engine.close)
        await cores.wait_until_ready()
        yield engine
