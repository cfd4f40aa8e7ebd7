"""Ingress: Quire's HTTP application in Ray Serve, with the replicas of a fleet as engine cores."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ray import serve
from starlette.types import ASGIApp

from quire.checkpoint.hub import locate
from quire.config.engine import EngineConfig
from quire.config.env import Env
from quire.config.plugins import load_plugins
from quire.configure import download_options
from quire.entrypoints.api_process import make_engine
from quire.entrypoints.ray_args import FleetModel
from quire.entrypoints.ray_fleet import RayFleet
from quire.errors import RequestError
from quire.frontend.engine import AsyncEngine
from quire.frontend.fleet_link import Fleet
from quire.frontend.fleet_routes import FleetRoutes
from quire.frontend.model_pool import ModelPool, PoolModel
from quire.frontend.split_fleet import SplitFleet
from quire.memory import ModelMemory
from quire.metrics.api_keys import KeyPages
from quire.metrics.pages import MetricsLayout, MetricsPages
from quire.server.api_keys import key_names
from quire.server.app import Application
from quire.server.lora.registry import LoRARegistry
from quire.server.lora.service import locate_modules
from quire.server.settings import make_settings
from quire.server.several_models import ServedModel, models_app
from quire.system.process import tune_garbage_collector


class Ingress:
    """The routes of Quire's server. Requests are checked, tokenized and detokenized here. Their tokens come
    from replicas. When a replica dies, its requests continue on another one."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, models: Sequence[FleetModel], *handles: Any
    ) -> None:
        """Wait until each model has a replica, then build the application. `handles` are those of the
        deployments of each model: of its replicas, and if it has them of those that compute its prompts."""
        load_plugins()
        settings = [make_settings(model.server, env=Env.read(os.environ)) for model in models]
        names = key_names(settings[0].keys)
        keys = KeyPages(names) if names else None
        index = serve.get_replica_context().rank.rank
        served: list[ServedModel] = []
        fleets = map(RayFleet, handles)
        for model, section in zip(models, settings, strict=True):
            fleet, prefill = next(fleets), None if model.prefill is None else next(fleets)
            engine = await _open_engine(
                model, fleet, prefill, keys if not served else None, section.http.health_timeout, index
            )
            application = Application(engine, section, keys, LoRARegistry(modules=locate_modules(section)))
            await application.api.adapters.load_all()
            served.append(ServedModel(application, _pool_model(engine)))
        self._app: ASGIApp = served[0].application.asgi
        if len(served) > 1:
            pool = ModelPool([model.pool_model for model in served], budget_bytes=0)
            pool.start()
            self._app = models_app(served, pool, settings[0], keys)
        tune_garbage_collector()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app


async def _open_engine(
    model: FleetModel,
    replicas: RayFleet,
    prefill: RayFleet | None,
    keys: KeyPages | None,
    health_timeout_s: float,
    index: int,
) -> AsyncEngine:
    """Return the engine of a model, connected to its replicas, and to those that compute its prompts."""
    config = _with_local_files((await replicas.describe())[0], model)
    fleet: Fleet = replicas
    if prefill is not None:
        other = (await prefill.describe())[0]
        routes = FleetRoutes(
            block_size=other.cache.block_size,
            max_num_seqs=other.scheduler.max_num_seqs,
            policy=other.parallel.data_parallel_routing,
        )
        fleet = SplitFleet(prefill, replicas, routes)
    engine = make_engine(
        config,
        addresses={0: ""},
        token="",
        metrics=MetricsPages(MetricsLayout.of(config)),
        health_timeout_s=health_timeout_s,
        index=index,
        keys=keys,
        fleet=fleet,
    )
    engine.start()
    await engine.ready()
    return engine


def _with_local_files(config: EngineConfig, model: FleetModel) -> EngineConfig:
    """Return the configuration of a replica with the tokenizer's files of this machine, which are downloaded
    if the path of the replica does not exist here."""
    path = config.checkpoint.path
    if path.exists():
        return config
    values, env = model.engine, Env.read(os.environ)
    options = download_options(values, env)
    here = locate(values.get("model"), revision=values.get("revision"), load_format="dummy", **options)
    tokenizer = str(here) if config.model.tokenizer == str(path) else config.model.tokenizer
    return replace(
        config,
        checkpoint=replace(config.checkpoint, path=here),
        model=replace(config.model, tokenizer=tokenizer),
    )


class _FleetBackend:
    """The replicas of a model as an entry of a `ModelPool`. The pool cannot load, unload or put them to
    sleep, since Ray Serve starts and ends replicas."""

    is_loaded = True

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def load(self) -> None:
        pass

    async def wake_up(self) -> None:
        pass

    async def sleep(self, level: int) -> None:
        raise RequestError("models of Ray Serve do not sleep: min_replicas and max_replicas set their size")

    async def unload(self) -> None:
        raise RequestError("models of Ray Serve are not unloaded: remove them from its configuration")

    def check(self) -> None:
        self._engine.check()


def _pool_model(engine: AsyncEngine) -> PoolModel:
    name, memory = engine.facts.model_names[0], ModelMemory(0, 0)
    return PoolModel(name, _FleetBackend(engine), memory, pinned=True, can_sleep=False)
