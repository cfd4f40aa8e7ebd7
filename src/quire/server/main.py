"""Run the HTTP server on its sockets until a graceful shutdown."""

import asyncio
import contextlib
import functools
import logging
import signal
import socket
from collections.abc import Callable, Iterator, Sequence

import uvicorn
from starlette.routing import Route
from starlette.types import ASGIApp

from quire.config.server_sections import LogSection
from quire.errors import ConfigError
from quire.frontend.engine import AsyncEngine
from quire.logs import get_logger
from quire.metrics.api_keys import KeyPages
from quire.server.app import Application
from quire.server.http.accept import (
    ConnectionAcceptor,
    ConnectionHandle,
    ConnectionReceiver,
    ConnectionSource,
)
from quire.server.http.exposure import exposures
from quire.server.http.log_config import apply_log_config
from quire.server.http.protocol import HttpLimits, HttpProtocol
from quire.server.http.refusals import OpenConnections, RefusalLog
from quire.server.http.sockets import bind
from quire.server.lora.registry import LoRARegistry
from quire.server.settings import ServerSettings, paths

logger = get_logger(__name__)

_GRACE_S = 5.0
"""Seconds in which the requests that a shutdown has aborted send their last chunk."""


class _Server(uvicorn.Server):
    """uvicorn server that leaves signals to its caller and calls `on_serving` when it accepts connections."""

    def __init__(
        self, config: uvicorn.Config, *, source: ConnectionSource, on_serving: Callable[[], object]
    ) -> None:
        super().__init__(config)
        self._source = source
        self._on_serving = on_serving

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._source.start(self._make_protocol, self.config.ssl)
        self._on_serving()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._source.stop()
        await super().shutdown(sockets)

    def _make_protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            on_closed=self._source.count_closed,
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _PathFilter(logging.Filter):
    """Log filter that drops the access log lines of some paths, such as /health."""

    def __init__(self, unlogged: frozenset[str]) -> None:
        super().__init__()
        self._unlogged = unlogged

    def filter(self, record: logging.LogRecord) -> bool:
        target = record.args[2] if isinstance(record.args, tuple) and len(record.args) > 2 else ""
        return str(target).partition("?")[0] not in self._unlogged


async def serve(
    settings: ServerSettings,
    engine: AsyncEngine,
    connections: Sequence[socket.socket] | ConnectionHandle | None = None,
    *,
    stop: asyncio.Event | None = None,
    announce: bool = True,
    on_serving: Callable[[Application], object] = lambda _: None,
    keys: KeyPages | None = None,
    registry: LoRARegistry | None = None,
) -> None:
    """Build the application of one model and serve it, see `serve_models`. `on_serving` is called with the
    application when the server accepts connections."""
    application = Application(engine, settings, keys, registry)
    await serve_models(
        settings,
        application.asgi,
        [application],
        connections,
        stop=stop,
        announce=announce,
        on_serving=functools.partial(on_serving, application),
    )


async def serve_models(
    settings: ServerSettings,
    app: ASGIApp,
    applications: Sequence[Application],
    connections: Sequence[socket.socket] | ConnectionHandle | None = None,
    *,
    stop: asyncio.Event | None = None,
    announce: bool = True,
    on_serving: Callable[[], object] = lambda: None,
) -> None:
    """Serve `app` until `stop` is set; if `stop` is None, until SIGTERM or SIGINT.

    `connections`: listening sockets, or a handle through which the supervisor process passes connections; if
    it is None, the server binds the address of the settings. At shutdown, the running requests of the
    `applications` (one per model) have `shutdown_timeout` seconds to finish; then they are aborted.
    `on_serving` is called when the server accepts connections."""
    config, stop = _config(app, settings), stop or _stop_on_signals()
    if isinstance(connections, ConnectionHandle):
        source: ConnectionSource = ConnectionReceiver(connections)
    else:
        source = ConnectionAcceptor([bind(settings.http)] if connections is None else connections)
    server = _Server(config, source=source, on_serving=on_serving)
    if announce:
        _announce(settings, applications)
    serving = asyncio.create_task(server.serve(sockets=[]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        await _drain(server, applications, serving, settings.http.shutdown_timeout)
    finally:
        stopping.cancel()
        server.should_exit = server.force_exit = True
        await serving


def _announce(settings: ServerSettings, applications: Sequence[Application]) -> None:
    """Log the server's address, the parsers that chat templates select, warnings about access without an API
    key and, at level `debug`, the routes."""
    logger.info("Starting Quire server on %s", settings.address)
    if not settings.http.uds:
        logger.info("Chat and live view: %s/", settings.address.replace("://0.0.0.0", "://localhost"))
    for application in applications:
        for kind, name in application.api.parsers.detected._asdict().items():
            if name:
                logger.info("The chat template selects the %s parser %r", kind.removesuffix("s"), name)
    for risk, remedy in exposures(settings):
        logger.warning("%s; %s", risk, remedy)
    for route in applications[0].routes.routes:
        if isinstance(route, Route):
            logger.debug("Route: %s, Methods: %s", route.path, ", ".join(sorted(route.methods or ())))


async def _drain(
    server: _Server, applications: Sequence[Application], serving: "asyncio.Task[None]", timeout_s: float
) -> None:
    """Shut down gracefully: refuse new connections, let the running requests finish, and abort those that
    take longer than `timeout_s`."""
    if num_answering := sum(len(application.api.running_requests) for application in applications):
        logger.info("Draining: %d requests have %g s to finish", num_answering, timeout_s)
    server.should_exit = True
    for application in applications:
        application.feed.close()
    await asyncio.wait((serving,), timeout=timeout_s)
    num_answering = sum(len(application.api.running_requests) for application in applications)
    if not serving.done() and num_answering:
        logger.warning("Aborting %d requests that exceed --shutdown-timeout", num_answering)
    for application in applications:
        application.api.running_requests.abort()
    await asyncio.wait((serving,), timeout=_GRACE_S)


def _config(app: ASGIApp, settings: ServerSettings) -> uvicorn.Config:
    http, log = settings.http, settings.log
    # Must come before uvicorn.Config, which removes the access log's handler if the log is disabled.
    _configure_logs(log)
    config = uvicorn.Config(
        app,
        http=functools.partial(  # type: ignore[arg-type]
            HttpProtocol,
            limits=HttpLimits.of(http),
            open_connections=OpenConnections.limited_by(http),
            refusals=RefusalLog(),
        ),
        ws="none",
        lifespan="off",
        root_path=http.root_path,
        log_config=None,
        log_level=log.uvicorn_log_level,
        access_log=not log.disable_uvicorn_access_log,
        timeout_keep_alive=settings.keep_alive_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=int(http.shutdown_timeout + _GRACE_S) + 1,
        server_header=False,
        ssl_keyfile=http.ssl_keyfile,
        ssl_certfile=http.ssl_certfile,
        ssl_ca_certs=http.ssl_ca_certs,
        ssl_cert_reqs=http.ssl_cert_reqs,
        ssl_ciphers=http.ssl_ciphers or "TLSv1",
    )
    try:
        config.load()
    except OSError as error:
        raise ConfigError(
            f"ssl_certfile={http.ssl_certfile!r} and ssl_keyfile={http.ssl_keyfile!r} cannot be used: {error}"
        ) from None
    return config


def _configure_logs(log: LogSection) -> None:
    """Give uvicorn's loggers the format of Quire's, or apply `log_config_file`."""
    if log.log_config_file is not None:
        apply_log_config(log.log_config_file)
    else:
        for name in ("uvicorn.error", "uvicorn.access"):
            uvicorn_logger = logging.getLogger(name)
            uvicorn_logger.handlers = list(logging.getLogger("quire").handlers)
            uvicorn_logger.propagate = False
    if unlogged := paths(log.disable_access_log_for_endpoints):
        logging.getLogger("uvicorn.access").addFilter(_PathFilter(unlogged))


def _stop_on_signals() -> asyncio.Event:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
