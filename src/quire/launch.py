"""The supervisor: binds the port, starts core and API processes, restarts what dies, ends cleanly."""

import argparse
import asyncio
import functools
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import uvloop

from quire.config.cli import FlagParser, add_engine_flags, given_from
from quire.config.engine import EngineConfig, Env, default_sampling
from quire.core.local import cache_info, configure, eos_ids, open_tokenizer
from quire.core.process import run_core
from quire.dist.process import adopt
from quire.errors import ConfigError, QuireError
from quire.frontend.chat import read_template
from quire.frontend.engine import AsyncEngine, EngineFacts
from quire.frontend.inputs import InputProcessor
from quire.logs import get_logger
from quire.metrics import EngineMetrics, Layout, MetricsPages
from quire.server.settings import ServerSettings, add_server_flags, server_settings
from quire.server.sockets import bind
from quire.version import __version__

log = get_logger(__name__)

BACKOFF_S = (0.2, 1.0, 2.0, 5.0, 10.0, 30.0)
STEADY_S = 60.0
"""A process that ran this long starts again at the first backoff."""
KILL_AFTER_S = 5.0


def make_engine(
    config: EngineConfig, *, address: str, metrics: MetricsPages, health_timeout_s: float, index: int = 0
) -> AsyncEngine:
    """The engine as an API process sees it: tokenizer and limits here, the core at `address`."""
    model, tokenizer = config.model, open_tokenizer(config)
    facts = EngineFacts(
        model_names=model.served_model_name,
        root=model.model,
        max_model_len=model.max_model_len,
        vocab=config.checkpoint.facts.vocab,
        max_logprobs=model.max_logprobs,
        max_num_seqs=config.scheduler.max_num_seqs,
        block_size=config.cache.block_size,
        default_sampling=default_sampling(config),
        chat_template=read_template(model.chat_template),
        version=__version__,
        start_time=time.time(),
    )
    inputs = InputProcessor(
        tokenizer=tokenizer,
        vocab=facts.vocab,
        max_model_len=facts.max_model_len,
        eos_ids=eos_ids(config, tokenizer),
        max_logprobs=facts.max_logprobs,
        seed=model.seed + index,
        max_prompt_len=config.scheduler.max_prompt_len,
    )
    named = EngineMetrics(metrics, model_name=facts.model_names[0], cache_info=cache_info(config, 0))
    return AsyncEngine(
        facts=facts,
        inputs=inputs,
        metrics=named,
        address=address,
        health_timeout_s=health_timeout_s,
        stream_interval=config.scheduler.stream_interval,
    )


def run_api(
    index: int,
    config: EngineConfig,
    settings: ServerSettings,
    listener: socket.socket,
    address: str,
    metrics_file: Path,
    parent: connection.Connection,
) -> None:
    """Entry of an API process. Tells `parent` when it is up, or in one line why it cannot be."""
    adopt(f"APIServer{index}" if settings.http.api_server_count > 1 else "APIServer")
    try:
        engine = make_engine(
            config,
            address=address,
            metrics=MetricsPages(Layout(config.model.max_model_len), metrics_file, page=index + 1),
            health_timeout_s=settings.http.health_timeout,
            index=index,
        )
        parent.send(None)
        uvloop.run(_answer(engine, settings, listener, announce=index == 0))
    except QuireError as error:
        parent.send(str(error))
        sys.exit(1)


async def _answer(
    engine: AsyncEngine, settings: ServerSettings, listener: socket.socket, *, announce: bool
) -> None:
    from quire.server.main import serve  # the web server is of no use to the supervisor, which waits for it

    engine.start()
    try:
        await serve(settings, engine, [listener], announce=announce)
    finally:
        engine.close()


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


@dataclass
class Child:
    """A process that is kept running."""

    name: str
    make: Callable[[connection.Connection], BaseProcess]
    process: BaseProcess | None = None
    says: connection.Connection | None = None
    was_up: bool = False
    started_at: float = 0.0
    num_failures: int = 0
    restart_at: float | None = field(default=None)

    def start(self) -> None:
        self.says, theirs = connection.Pipe(duplex=False)
        self.process = self.make(theirs)
        self.process.start()
        theirs.close()
        self.started_at = time.monotonic()
        self.restart_at = None

    def listen(self) -> None:
        """None when it is up, or why it cannot be: if it never was, that is the end."""
        while self.says is not None and self.says.poll():
            try:
                problem = self.says.recv()
            except EOFError:
                self.says = None
                return
            if problem is None:
                self.was_up = True
            elif self.num_failures == 0:
                raise ConfigError(problem)
            else:
                log.error("%s cannot start: %s", self.name, problem)

    def note_death(self) -> None:
        assert self.process is not None
        if time.monotonic() - self.started_at > STEADY_S:
            self.num_failures = 0
        delay = BACKOFF_S[min(self.num_failures, len(BACKOFF_S) - 1)]
        self.num_failures += 1
        self.restart_at = time.monotonic() + delay
        log.error(
            "%s (pid %s) ended with exit code %s; starting it again in %.1f s",
            self.name,
            self.process.pid,
            self.process.exitcode,
            delay,
        )
        self.process = None

    def end(self, how: int, timeout_s: float) -> None:
        """Ask it to end, and insist."""
        if self.process is None or not self.process.is_alive():
            return
        os.kill(self.process.pid or 0, how)
        self.process.join(timeout_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class Supervisor:
    def __init__(self, config: EngineConfig, settings: ServerSettings) -> None:
        self.config = config
        self.settings = settings
        self.listener = bind(settings.http)
        if not settings.http.uds:
            taken = replace(settings.http, port=self.listener.getsockname()[1])
            self.settings = replace(settings, http=taken)
        self.folder = Path(tempfile.mkdtemp(prefix="quire-"))
        self.context = multiprocessing.get_context("spawn")
        self.core = Child("the engine", self._make_core)
        self.apis = [
            Child(f"API server {index}", functools.partial(self._make_api, index))
            for index in range(settings.http.api_server_count)
        ]
        self.stopping = False

    @property
    def _address(self) -> str:
        return f"ipc://{self.folder}/core"

    @property
    def _metrics_file(self) -> Path:
        return self.folder / "metrics"

    def _make_core(self, parent: connection.Connection) -> BaseProcess:
        args = (self.config, self._address, self._metrics_file, parent)
        return self.context.Process(target=run_core, args=args, name="EngineCore")

    def _make_api(self, index: int, parent: connection.Connection) -> BaseProcess:
        args = (index, self.config, self.settings, self.listener, self._address, self._metrics_file, parent)
        return self.context.Process(target=run_api, args=args, name=f"APIServer{index}")

    def run(self) -> int:
        """Until a signal ends it. The exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        layout = Layout(self.config.model.max_model_len)
        MetricsPages.create(self._metrics_file, layout, 1 + len(self.apis))
        try:
            for child in (self.core, *self.apis):
                child.start()
            while not self.stopping:
                self._tend()
            return self._drain()
        finally:
            for child in (*self.apis, self.core):
                child.end(signal.SIGKILL, KILL_AFTER_S)
            self.listener.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            if self.settings.http.uds:
                Path(self.settings.http.uds).unlink(missing_ok=True)

    def _on_signal(self, *_: object) -> None:
        if self.stopping:  # asked twice: at once
            raise KeyboardInterrupt
        self.stopping = True

    def _tend(self) -> None:
        """Wait for something to happen, and see to it."""
        children = [self.core, *self.apis]
        waiting: list[Any] = [child.process.sentinel for child in children if child.process is not None]
        connection.wait(waiting + [child.says for child in children if child.says is not None], timeout=0.1)
        for child in children:
            code = child.process.exitcode if child.process is not None else None
            child.listen()  # after the look at the exit code: what it said last is then there to be heard
            if code is not None:
                if not child.was_up:
                    raise ConfigError(f"{child.name} could not start (exit code {code}); the log says why")
                child.note_death()
            if child.restart_at is not None and time.monotonic() >= child.restart_at:
                child.start()

    def _drain(self) -> int:
        """API servers finish what they have, then the core goes. The port is free as soon as they let go."""
        self.listener.close()
        log.info("Shutting down; running requests get %g s", self.settings.http.shutdown_timeout)
        deadline = time.monotonic() + self.settings.http.shutdown_timeout + KILL_AFTER_S
        for child in self.apis:
            if child.process is not None and child.process.is_alive():
                os.kill(child.process.pid or 0, signal.SIGTERM)
        for child in self.apis:
            child.end(signal.SIGTERM, max(deadline - time.monotonic(), 0.1))
        self.core.end(signal.SIGTERM, KILL_AFTER_S)
        return 0


def launch(config: EngineConfig, settings: ServerSettings) -> int:
    return Supervisor(config, settings).run()


def add_flags(parser: FlagParser) -> None:
    """The flags of `quire serve`."""
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="Same as --model.")
    add_server_flags(parser)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    given = given_from(args)
    if args.model_tag is not None and given.setdefault("model", args.model_tag) != args.model_tag:
        raise ConfigError(f"two models: {args.model_tag!r} and --model {given['model']!r}; give one")
    settings = server_settings(args, Env.read(os.environ))
    return launch(configure(given, usage="server"), settings)
