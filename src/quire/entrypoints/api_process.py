"""An API process: the HTTP server with an engine client; the engine cores run in other processes."""

import asyncio
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from quire.config.engine import EngineConfig
from quire.config.env import Env
from quire.config.generation import default_sampling
from quire.config.mm_caches import cache_kind
from quire.config.plugins import installed_stat_loggers, load_plugins
from quire.configure import cache_info, open_grammars, open_tokenizer, settings_of
from quire.data.latency_target import LatencyTarget
from quire.errors import QuireError
from quire.frontend.chat import read_template
from quire.frontend.engine import AsyncEngine
from quire.frontend.engine_facts import EngineFacts
from quire.frontend.fleet_link import Fleet
from quire.frontend.multimodal import media_reader
from quire.frontend.open_inputs import open_inputs
from quire.frontend.prefix_map import PrefixMap
from quire.frontend.stat_loggers import StatLoggers
from quire.frontend.tracing import tracer_of
from quire.logs import get_logger
from quire.metrics.api_keys import KeyPages
from quire.metrics.engine import EngineMetrics
from quire.metrics.pages import MetricsLayout, MetricsPages
from quire.server.api_keys import key_names
from quire.server.http.accept import ConnectionHandle
from quire.server.lora.registry import LoRARegistry
from quire.server.settings import ServerSettings
from quire.system.memory_trim import trim_memory
from quire.system.process import (
    SPARE_BYTES,
    adopt,
    imports_frozen,
    parent_age_s,
    shorten_thread_switches,
    tune_allocator,
    tune_garbage_collector,
)
from quire.version import __version__

if TYPE_CHECKING:
    from quire.server.app import Application

log = get_logger(__name__)

FLEET_ENGINES = 2
"""Number of engines that is assumed for the replicas of a Ray Serve deployment: any number above one, since
the number of replicas may change."""
FIRST_MESSAGE_S = 0.3
"""Seconds to wait for the first message of the engine cores before the server accepts connections."""


def make_engine(
    config: EngineConfig,
    *,
    addresses: Mapping[int, str | Path],
    token: str,
    metrics: MetricsPages,
    health_timeout_s: float,
    prefixes: PrefixMap | None = None,
    index: int = 0,
    cores_return: bool = True,
    keys: KeyPages | None = None,
    num_api: int = 1,
    media_memory: str = "",
    fleet: Fleet | None = None,
) -> AsyncEngine:
    """Build the client of the engine cores for the API process number `index` of `num_api`. `addresses` are
    the socket addresses of the cores by rank; one entry stands for all replicas of a `fleet`. Cores accept
    only clients with their `token`. `prefixes` maps cached prefixes for all API processes. With
    `cores_return`, requests of a dead core wait until it is restarted; otherwise they fail. `media_memory`
    is the path of the shared media cache; empty for none."""
    facts = _build_facts(config, num_cores=len(addresses))
    num_engines = len(addresses) if fleet is None else FLEET_ENGINES
    cache = cache_kind(config.multimodal, config.parallel, num_api=num_api, num_engines=num_engines)
    tokenizer = open_tokenizer(config)
    inputs = open_inputs(
        config,
        tokenizer,
        open_grammars(config, tokenizer, max_bytes=SPARE_BYTES, only_checks=True),
        media_reader(config, tokenizer, cache=cache, shared_memory=media_memory),
        max_model_len=facts.max_model_len,
        seed=config.model.seed + index,
    )
    inputs.media.processor_cache.count = metrics.observe_media
    engine_metrics = EngineMetrics(
        metrics,
        model_name=facts.model_names[0],
        cache_info=cache_info(config, num_blocks=0, num_tokens=0),
        first_engine=next(iter(addresses)),
        keys=keys,
        max_loras=config.lora.max_loras if config.lora.enable_lora else None,
    )
    engine = AsyncEngine(
        facts=facts,
        inputs=inputs,
        metrics=engine_metrics,
        addresses=addresses,
        token=token,
        health_timeout_s=health_timeout_s,
        fleet=fleet,
        stream_interval=config.scheduler.stream_interval,
        routing=config.parallel.data_parallel_routing if config.cache.enable_prefix_caching else "load",
        prefixes=prefixes,
        first=index,
        cores_return=cores_return,
        resumes=config.scheduler.resume_requests,
        settings=settings_of(config),
        tracer=tracer_of(config),
    )
    observe_by(engine, config, list(addresses), installed_stat_loggers())
    return engine


def observe_by(
    engine: AsyncEngine, config: EngineConfig, ranks: list[int], factories: Mapping[str, Any]
) -> None:
    """Pass the statistics of the engine to stat loggers with vLLM's interface, unless they are disabled."""
    if factories and not config.observability.disable_log_stats:
        interval_s = Env.read(os.environ).log_stats_interval
        engine.observers.append(StatLoggers(factories, LazyVllmConfig(config), ranks, interval_s))


class LazyVllmConfig:
    """The configuration with vLLM's sections and names. Reading one imports torch, which API processes do not
    need otherwise."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        from quire.worker.extensions import VllmConfig

        return getattr(VllmConfig(self._config), name)


def _build_facts(config: EngineConfig, num_cores: int) -> EngineFacts:
    model = config.model
    return EngineFacts(
        model_names=model.served_model_name,
        root=model.model,
        max_model_len=model.max_model_len,
        vocab=config.checkpoint.facts.vocab,
        max_logprobs=model.max_logprobs,
        max_num_seqs=config.scheduler.max_num_seqs * num_cores,
        block_size=config.cache.block_size,
        default_sampling=default_sampling(config),
        chat_template=read_template(model.chat_template),
        version=__version__,
        start_time=time.time(),
        target=LatencyTarget.of(config.scheduler.slo_ttft_ms, config.scheduler.slo_itl_ms),
        slo_max_wait=config.scheduler.slo_max_wait,
    )


def run_api(
    index: int,
    config: EngineConfig,
    settings: ServerSettings,
    connections: socket.socket | ConnectionHandle,
    addresses: Mapping[int, str | Path],
    token: str,
    metrics_file: Path,
    prefix_file: Path,
    key_file: Path,
    adapters_file: Path,
    media_memory: str,
    parent: connection.Connection,
) -> None:
    """Serve HTTP in this API process until it is stopped. `connections` is the listening socket, or the
    handle that receives accepted connections. Send None to `parent` when the server is ready, or a one-line
    error. `addresses` and `token` belong to the engine cores."""
    name = f"APIServer{index}" if (settings.http.api_server_count or 1) > 1 else "APIServer"
    with api_process(name, parent, config.broken_plugins):
        names = key_names(settings.keys)
        keys = KeyPages(names, key_file, process=index) if names else None
        engine = make_engine(
            config,
            addresses=addresses,
            token=token,
            metrics=MetricsPages(
                MetricsLayout.of(config), metrics_file, process=index + 1, num_engines=len(addresses)
            ),
            health_timeout_s=settings.http.health_timeout,
            prefixes=PrefixMap(prefix_file),
            index=index,
            keys=keys,
            num_api=settings.http.api_server_count or 1,
            media_memory=media_memory,
        )
        uvloop.run(
            _serve(
                engine,
                settings,
                connections,
                is_first=index == 0,
                parent=parent,
                keys=keys,
                registry=LoRARegistry(adapters_file),
            )
        )


@contextmanager
def api_process(name: str, parent: connection.Connection, broken_plugins: Sequence[str]) -> Iterator[None]:
    """Set up an API process, with `name` in its log lines. If its server fails, send the reason to the
    supervisor and end the process."""
    adopt(name)
    tune_allocator()
    trim_memory(SPARE_BYTES)
    shorten_thread_switches()
    try:
        load_plugins(broken_plugins)
        yield
    except QuireError as error:
        parent.send(str(error))
        sys.exit(1)
    except Exception as error:
        log.exception("The API server ended with an error")
        parent.send(f"the API server failed: {type(error).__name__}: {' '.join(str(error).split())}")
        sys.exit(1)


async def _serve(
    engine: AsyncEngine,
    settings: ServerSettings,
    connections: socket.socket | ConnectionHandle,
    *,
    is_first: bool,
    parent: connection.Connection,
    keys: KeyPages | None,
    registry: LoRARegistry,
) -> None:
    # The web server is imported after the tokenizer was read, into the memory that this has freed.
    with imports_frozen():
        from quire.server.main import serve

    engine.start()
    with suppress(TimeoutError):  # so that requests are not refused if the cores are ready already
        await asyncio.wait_for(engine.ready(), FIRST_MESSAGE_S)
    started: asyncio.Future[Application] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        serve(
            settings,
            engine,
            connections if isinstance(connections, ConnectionHandle) else [connections],
            announce=is_first,
            on_serving=started.set_result,
            keys=keys,
            registry=registry,
        )
    )
    loads_adapters = is_first and bool(registry.all()) and not registry.is_loaded
    reporting = asyncio.create_task(_report_ready(started, engine if loads_adapters else None, parent))
    announcing = asyncio.create_task(_announce(started, engine)) if is_first else None
    try:
        await asyncio.wait((serving, reporting), return_when=asyncio.FIRST_COMPLETED)
        if reporting.done() and reporting.exception() is not None:
            serving.cancel()
            await asyncio.wait((serving,))
            reporting.result()
        await serving
    finally:
        reporting.cancel()
        if announcing is not None:
            announcing.cancel()
        engine.close()


async def _announce(started: "asyncio.Future[Application]", engine: AsyncEngine) -> None:
    await started
    await engine.ready()
    announce_ready()


def announce_ready() -> None:
    """Log that requests can be answered, and also vLLM's message `Application startup complete.`, which
    scripts wait for."""
    log.info("Ready, %.1f s after the server was started", parent_age_s())
    log.info("Application startup complete.")


async def _report_ready(
    started: "asyncio.Future[Application]", adapter_engine: AsyncEngine | None, parent: connection.Connection
) -> None:
    """Send None to `parent` once this process accepts requests and `adapter_engine`, if set, has loaded the
    LoRA adapters of the command line."""
    application = await started
    tune_garbage_collector()
    if adapter_engine is not None:
        await adapter_engine.ready()
        await application.api.adapters.load_all()
    parent.send(None)
