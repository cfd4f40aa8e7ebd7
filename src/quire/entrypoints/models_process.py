"""The API process of a server with several models, and the engine cores of each model as its children."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path

import psutil
import uvloop

from quire.entrypoints.api_process import announce_ready, api_process
from quire.entrypoints.child_cores import POLL_S, ChildCores
from quire.entrypoints.models_config import ConfiguredModel
from quire.errors import EngineError, QuireError
from quire.frontend.engine import AsyncEngine
from quire.frontend.model_pool import ModelPool, PoolModel
from quire.logs import get_logger
from quire.memory import model_memory
from quire.metrics.api_keys import KeyPages
from quire.server.api_keys import key_names
from quire.server.lora.registry import LoRARegistry
from quire.server.lora.service import locate_modules
from quire.server.settings import ServerSettings
from quire.system.process import tune_garbage_collector

log = get_logger(__name__)


class ModelCores:
    """The engine cores of one model, which are started, put to sleep and ended on demand."""

    def __init__(self, cores: ChildCores) -> None:
        self._cores = cores
        self.engine: AsyncEngine = cores.engine
        self.is_loaded = False
        self.on_first_load: Callable[[], Awaitable[None]] | None = None
        """Function that is called once, when the engine cores run for the first time. If it raises, loading
        the model fails."""
        self._is_awake = False
        self._has_started = False
        self._watcher: asyncio.Task[None] | None = None

    async def load(self) -> None:
        self._cores.start()
        await self._cores.wait_until_up()
        if self._has_started:
            self.engine.connect()
        else:
            self.engine.start()
            self._has_started = True
        await self._cores.wait_until_ready()
        if self.on_first_load is not None:
            await self.on_first_load()
            self.on_first_load = None
        self.is_loaded = self._is_awake = True
        self._watcher = asyncio.create_task(self._watch())

    async def wake_up(self) -> None:
        """Restore the memory that the cores released for `sleep`; restart the cores if that fails."""
        try:
            await self.engine.operation.wake_up()
            self._is_awake = True
        except EngineError as error:
            log.warning("Waking up a model failed (%s); its engine cores are restarted", error)
            await self.unload()
            await self.load()

    async def sleep(self, level: int) -> None:
        self._is_awake = False
        await self.engine.operation.sleep(level, "wait")

    async def unload(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        self.is_loaded = self._is_awake = False
        self.engine.disconnect()
        await asyncio.to_thread(self._cores.end)

    def check(self) -> None:
        self.engine.check()

    async def _watch(self) -> None:
        """Restart dead cores of an awake model. A sleeping model with a dead core is unloaded instead."""
        while True:
            await asyncio.sleep(POLL_S)
            if self._cores.restart_dead(restarts=self._is_awake) and not self._is_awake:
                self._watcher = None
                log.error("An engine core of a sleeping model died; the next request loads the model again")
                await self.unload()
                return


def run_models(
    models: Sequence[ConfiguredModel],
    settings: ServerSettings,
    budget_bytes: int,
    listener: socket.socket,
    key_file: Path,
    folder: Path,
    parent: connection.Connection,
) -> None:
    """Serve HTTP in the API process of several models, whose engine cores together may use `budget_bytes` of
    memory. Send None to `parent` when the server is ready, or a one-line error."""
    with api_process("APIServer", parent, models[0].config.broken_plugins):
        names = key_names(settings.keys)
        keys = KeyPages(names, key_file, process=0) if names else None
        cores = [
            ModelCores(
                ChildCores(
                    model.config,
                    folder / f"model{number}",
                    health_timeout_s=settings.http.health_timeout,
                    cores_return=True,
                    keys=keys if number == 0 else None,
                )
            )
            for number, model in enumerate(models)
        ]
        uvloop.run(_serve(models, cores, settings, budget_bytes, listener, keys, parent))


async def _serve(
    models: Sequence[ConfiguredModel],
    cores: Sequence[ModelCores],
    settings: ServerSettings,
    budget_bytes: int,
    listener: socket.socket,
    keys: KeyPages | None,
    parent: connection.Connection,
) -> None:
    from quire.server.app import Application  # the supervisor imports this file, but no web server
    from quire.server.main import serve_models
    from quire.server.several_models import ServedModel, models_app

    served = []
    for model, backend in zip(models, cores, strict=True):
        registry = LoRARegistry(modules=locate_modules(model.settings))
        application = Application(backend.engine, model.settings, registry=registry)
        if registry.all():
            backend.on_first_load = application.api.adapters.load_all
        served.append(ServedModel(application, _pool_model(model, backend)))
    section = settings.models
    pool = ModelPool(
        [model.pool_model for model in served],
        budget_bytes=budget_bytes,
        sleep_after_s=section.models_sleep_after,
        discard_after_s=section.models_discard_after,
        host_free_bytes=lambda: psutil.virtual_memory().available,
    )

    def on_serving() -> None:
        pool.start()
        tune_garbage_collector()
        parent.send(None)

    announcing = asyncio.create_task(_announce(pool))
    app = models_app(served, pool, settings, keys)
    applications = [model.application for model in served]
    try:
        await serve_models(settings, app, applications, [listener], on_serving=on_serving)
    finally:
        announcing.cancel()
        with suppress(QuireError):
            await pool.close()
        for backend in cores:
            backend.engine.close()


def _pool_model(model: ConfiguredModel, backend: ModelCores) -> PoolModel:
    return PoolModel(
        model.name,
        backend,
        model_memory(model.config),
        pinned=model.pinned,
        can_sleep=model.config.model.enable_sleep_mode,
        keeps_weights=model.config.machine.device == "cpu",
    )


async def _announce(pool: ModelPool) -> None:
    """Wait until the models to load at the start are loaded, then log that the server is ready."""
    await pool.started.wait()
    announce_ready()
