"""An engine for one process alone: its core is a child, and nothing listens."""

import asyncio
import multiprocessing
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing import connection
from pathlib import Path

from quire.api_process import make_engine
from quire.config.engine import EngineConfig
from quire.core.process import run_core
from quire.errors import ConfigError
from quire.frontend.engine import AsyncEngine
from quire.metrics import Layout, MetricsPages


@asynccontextmanager
async def private_engine(config: EngineConfig) -> AsyncIterator[AsyncEngine]:
    """An engine for this process alone: its core is a child, and nothing listens."""
    folder = Path(tempfile.mkdtemp(prefix="quire-"))
    address, metrics_file = f"ipc://{folder}/core", folder / "metrics"
    layout = Layout(config.model.max_model_len)
    MetricsPages.create(metrics_file, layout, num_pages=2)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    core = context.Process(target=run_core, args=(config, address, metrics_file, theirs), name="EngineCore")
    core.start()
    theirs.close()
    engine = make_engine(
        config,
        address=address,
        metrics=MetricsPages(layout, metrics_file, page=1),
        health_timeout_s=float("inf"),
    )
    try:
        if (problem := await asyncio.to_thread(_first_word, ours)) is not None:
            raise ConfigError(problem)
        engine.start()
        await engine.ready()
        yield engine
    finally:
        engine.close()
        core.kill()
        core.join()
        shutil.rmtree(folder, ignore_errors=True)


def _first_word(core: connection.Connection) -> str | None:
    """None when the core is ready, else why it is not."""
    try:
        problem: str | None = core.recv()
    except EOFError:
        return "the engine could not start; its log says why"
    return problem
