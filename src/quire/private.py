"""An engine for one process alone: its core is a child, and nothing listens."""

import asyncio
import multiprocessing
import signal
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from multiprocessing import connection
from multiprocessing.process import BaseProcess

from quire.api_process import make_engine
from quire.config.engine import EngineConfig
from quire.core.process import run_core
from quire.dist.child import Child
from quire.dist.scratch import Scratch
from quire.errors import ConfigError
from quire.frontend.engine import AsyncEngine
from quire.metrics import Layout, MetricsPages

KILL_AFTER_S = 5.0
LOOK_S = 0.2


@asynccontextmanager
async def private_engine(config: EngineConfig) -> AsyncIterator[AsyncEngine]:
    """An engine that is up. Whatever happens, nothing of it is left afterwards."""
    with ExitStack() as stack:
        folder = stack.enter_context(Scratch()).path
        address, metrics_file = f"ipc://{folder}/core", folder / "metrics"
        layout = Layout(config.model.max_model_len)
        MetricsPages.create(metrics_file, layout, num_pages=2)

        def make_core(parent: connection.Connection) -> BaseProcess:
            args = (config, address, metrics_file, parent)
            return multiprocessing.get_context("spawn").Process(target=run_core, args=args, name="EngineCore")

        core = Child("the engine", make_core)
        stack.callback(core.end, signal.SIGKILL, KILL_AFTER_S)
        core.start()
        engine = make_engine(
            config,
            address=address,
            metrics=MetricsPages(layout, metrics_file, page=1),
            health_timeout_s=float("inf"),
        )
        await core.await_up()
        engine.start()
        stack.callback(engine.close)
        await _until_ready(engine, core)
        yield engine


async def _until_ready(engine: AsyncEngine, core: Child) -> None:
    ready = asyncio.ensure_future(engine.ready())
    try:
        while not (await asyncio.wait((ready,), timeout=LOOK_S))[0]:
            if core.process is None or not core.process.is_alive():
                raise ConfigError(f"{core.name} ended while it was starting; the log says why")
    finally:
        ready.cancel()
