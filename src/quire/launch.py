"""The supervisor: binds the port, starts core and API processes, restarts what dies, ends cleanly."""

import argparse
import functools
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from quire.api_process import run_api
from quire.config.cli import FlagParser, add_engine_flags, given_from
from quire.config.engine import EngineConfig
from quire.config.env import Env
from quire.core.process import run_core
from quire.dist.child import Child
from quire.dist.platform import hardware_threads, thread_advice
from quire.dist.scratch import Scratch
from quire.errors import ConfigError
from quire.logs import get_logger
from quire.metrics import Layout, MetricsPages
from quire.prepare import configure
from quire.server.settings import ServerSettings, add_server_flags, server_settings
from quire.server.sockets import bind
from quire.server.spread import Dealer

log = get_logger(__name__)

KILL_AFTER_S = 5.0


class Supervisor:
    """Keeps one core and N API processes running until it is told to stop."""

    def __init__(self, config: EngineConfig, settings: ServerSettings) -> None:
        self.config = config
        self.settings = settings
        self.listener = bind(settings.http)
        if not settings.http.uds:
            taken = replace(settings.http, port=self.listener.getsockname()[1])
            self.settings = replace(settings, http=taken)
        self.scratch = Scratch()
        count = settings.http.api_server_count
        self.dealer = Dealer(self.listener, self.scratch.path / "closed", count) if count > 1 else None
        self.context = multiprocessing.get_context("spawn")
        self.core = Child("the engine", self._make_core)
        self.apis = [
            Child(f"API server {index}", functools.partial(self._make_api, index)) for index in range(count)
        ]
        self.stopping = False

    @property
    def _address(self) -> str:
        return f"ipc://{self.scratch.path}/core"

    @property
    def _metrics_file(self) -> Path:
        return self.scratch.path / "metrics"

    def _make_core(self, parent: connection.Connection) -> BaseProcess:
        args = (self.config, self._address, self._metrics_file, parent)
        return self.context.Process(target=run_core, args=args, name="EngineCore")

    def _make_api(self, index: int, parent: connection.Connection) -> BaseProcess:
        entrance = self.listener if self.dealer is None else self.dealer.open(index)
        args = (index, self.config, self.settings, entrance, self._address, self._metrics_file, parent)
        return self.context.Process(target=run_api, args=args, name=f"APIServer{index}")

    def run(self) -> int:
        """Until a signal ends it. The exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._advise()
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
            self._close_entrance()
            self.scratch.remove()
            if self.settings.http.uds:
                Path(self.settings.http.uds).unlink(missing_ok=True)

    def _advise(self) -> None:
        parallel = self.config.parallel
        advice = thread_advice(
            self.config.machine.device,
            num_threads=hardware_threads(),
            num_api=len(self.apis),
            num_workers=parallel.tensor_parallel_size
            * parallel.pipeline_parallel_size
            * parallel.data_parallel_size,
        )
        if advice is not None:
            log.warning(advice)

    def _close_entrance(self) -> None:
        self.listener.close()
        if self.dealer is not None:
            self.dealer.close()

    def _on_signal(self, *_: object) -> None:
        if self.stopping:  # asked twice: at once
            raise KeyboardInterrupt
        self.stopping = True

    def _tend(self) -> None:
        """Wait for something to happen, and see to it."""
        children = [self.core, *self.apis]
        waiting: list[Any] = [child.process.sentinel for child in children if child.process is not None]
        waiting += [child.says for child in children if child.says is not None]
        waiting += self.dealer.awaited if self.dealer is not None else ()
        connection.wait(waiting, timeout=0.1)
        for child in children:
            child.look()
            if child.restart_at is not None and time.monotonic() >= child.restart_at:
                child.start()
        if self.dealer is not None:
            self._deal(self.dealer)

    def _deal(self, dealer: Dealer) -> None:
        """Connections to the API processes that serve."""
        for index, child in enumerate(self.apis):
            if child.is_up:
                dealer.admit(index)
            elif child.process is None:
                dealer.drop(index)
        dealer.deal()

    def _drain(self) -> int:
        """API servers finish what they have, then the core goes. The port is free as soon as they let go."""
        self._close_entrance()
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
