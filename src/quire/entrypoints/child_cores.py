"""An engine for a single process: its cores are child processes, and no port is opened."""

import asyncio
import functools
import multiprocessing
import signal
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from multiprocessing import connection
from multiprocessing.process import BaseProcess

from quire.config.data_parallel import local_ranks
from quire.config.engine import EngineConfig
from quire.config.mm_caches import engine_holds_values
from quire.core.process import CoreAddress, config_of_rank, core_name, run_core
from quire.entrypoints.api_process import make_engine
from quire.errors import ConfigError
from quire.frontend.engine import AsyncEngine
from quire.metrics import MetricsLayout, MetricsPages
from quire.system.child import Child
from quire.system.cluster_token import new_token
from quire.system.scratch import Scratch

KILL_AFTER_S = 5.0
LOOK_S = 0.2


@asynccontextmanager
async def private_engine(config: EngineConfig) -> AsyncIterator[AsyncEngine]:
    """Yield a ready engine, and clean up all of its processes and files afterwards."""
    with ExitStack() as stack:
        folder = stack.enter_context(Scratch()).path
        metrics_file, layout = folder / "metrics", MetricsLayout.of(config)
        ranks = local_ranks(config.parallel)
        if len(ranks) != config.parallel.data_parallel_size:
            raise ConfigError("without a server all data-parallel ranks must run on this machine")
        MetricsPages.create(metrics_file, layout, num_api=1, num_engines=len(ranks))
        keeps_media = engine_holds_values(
            config.multimodal, config.parallel, num_api=1, num_engines=len(ranks)
        )
        token = new_token()
        core_addresses = {
            rank: CoreAddress(
                f"ipc://{folder}/core{rank}",
                metrics_file,
                token=token,
                page=rank,
                num_pages=len(ranks),
                index=rank,
                num_local=len(ranks),
                keeps_media=keeps_media,
            )
            for rank in ranks
        }

        def make_core(rank: int, parent: connection.Connection) -> BaseProcess:
            args = (config_of_rank(config, rank), core_addresses[rank], parent)
            name = core_name(rank, len(ranks))
            return multiprocessing.get_context("spawn").Process(target=run_core, args=args, name=name)

        cores = []
        for rank in ranks:
            name = "the engine" if len(ranks) == 1 else f"engine {rank}"
            cores.append(Child(name, functools.partial(make_core, rank)))
            stack.callback(cores[-1].end, signal.SIGTERM, KILL_AFTER_S)
            cores[-1].start()
        engine = make_engine(
            config,
            addresses={rank: seat.address for rank, seat in core_addresses.items()},
            token=token,
            metrics=MetricsPages(layout, metrics_file, process=1, num_engines=len(ranks)),
            health_timeout_s=float("inf"),
            cores_return=False,
        )
        for core in cores:
            await core.await_up()
        engine.start()
        stack.callback(engine.close)
        await _wait_until_ready(engine, cores)
        yield engine


async def _wait_until_ready(engine: AsyncEngine, cores: list[Child]) -> None:
    ready = asyncio.ensure_future(engine.ready())
    try:
        while not (await asyncio.wait((ready,), timeout=LOOK_S))[0]:
            for core in cores:
                if core.process is None or not core.process.is_alive():
                    raise ConfigError(f"{core.name} ended while it was starting; see the log for the cause")
    finally:
        ready.cancel()
