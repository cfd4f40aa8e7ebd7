"""The core as a process: requests come in and steps go out over one ZMQ socket."""

import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from quire.config.engine import EngineConfig
from quire.config.env import Env
from quire.core.clients import Clients
from quire.core.engine_core import EngineCore, build_core
from quire.core.stats_log import StatsLog
from quire.data.plan import StepOutput
from quire.data.stats import FrontStats, StepStats
from quire.data.wire import Abort, Add, Beat, Call, Hello, Ready, Reply, Stepped, ToCore
from quire.dist.process import adopt, calm_collector
from quire.errors import EngineDead, QuireError
from quire.logs import get_logger
from quire.metrics import Layout, MetricsPages

log = get_logger(__name__)

BEAT_S = 0.25
RETRY_S = 0.02
"""How long to wait for something to change when nothing can be planned, or a client is behind."""
TURN_S = 0.002
"""What taking in messages may take of the time between two steps,"""
TURN_SHARE = 0.25
"""or this part of the last step, if that is more."""


def run_core(config: EngineConfig, address: str, metrics_file: Path, parent: Connection) -> None:
    """Entry of the core process. Tells `parent` when it is ready, or in one line why it cannot be."""
    adopt("EngineCore")
    try:
        core, cache = build_core(config)
    except QuireError as error:
        parent.send(str(error))
        sys.exit(1)
    metrics = MetricsPages(Layout(config.model.max_model_len), metrics_file, page=0)
    ready = Ready(os.getpid(), cache.max_model_len, cache.num_blocks, cache.num_tokens)
    env = Env.read(os.environ)
    stats_log = StatsLog(env.log_stats_interval, metrics, quiet=config.observability.disable_log_stats)
    server = CoreServer(core, address, ready, metrics, stats_log)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    calm_collector()
    parent.send(None)
    try:
        server.run()
    except EngineDead as error:
        log.error("The engine ends: %s", error)
        sys.exit(1)
    finally:
        core.close()


class CoreServer:
    """Takes in messages between steps, never during one, and sends out what the steps brought."""

    def __init__(
        self, core: EngineCore, address: str, ready: Ready, metrics: MetricsPages, stats_log: StatsLog
    ) -> None:
        self.core = core
        self.ready = ready
        self.metrics = metrics
        self.stats_log = stats_log
        self.clients = Clients(address, self._abort)
        self._step_s = 0.0
        self._is_stuck = False
        """There is work, and none of it can be planned."""
        self._progress_at = time.monotonic()
        """When a step ended, or there was no work."""
        self._next_beat = 0.0
        self._running = True
        self._calls: dict[str, Callable[[], Any]] = {
            "reset_prefix_cache": core.reset_prefix_cache,
            "block_map": core.block_map,
        }

    def stop(self) -> None:
        self._running = False

    def run(self) -> None:
        while self._running:
            self.turn()

    def turn(self) -> None:
        """Messages, a step, a beat."""
        self._receive()
        if self.core.has_work:
            self._step()
        else:
            self._progress_at, self._is_stuck = time.monotonic(), False
        self.clients.flush()
        self._beat()

    def _receive(self) -> None:
        """Some of what has arrived, so that steps get their turn; with nothing to compute, wait for it."""
        if not self.core.has_work or self._is_stuck:
            in_a_hurry = self._is_stuck or self.clients.queues
            self.clients.wait(RETRY_S if in_a_hurry else BEAT_S)
        until = time.monotonic() + max(TURN_S, TURN_SHARE * self._step_s)
        while (received := self.clients.receive()) is not None:
            self._handle(*received)
            if time.monotonic() >= until:
                return

    def _handle(self, client: bytes, message: ToCore) -> None:
        match message:
            case Add():
                for request in message.all():
                    self.clients.owner[request.id] = client
                    self.core.add(request)
            case Abort(request_ids):
                self._abort(request_ids)
                self._observe(StepStats())
            case Call(number, method):
                self.clients.send(client, Reply(number, self._calls[method]()))
            case Hello():
                self.clients.known.add(client)
                self.clients.send(client, self.ready)

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in self.core.abort(request_ids):
            self.clients.owner.pop(request_id, None)

    def _step(self) -> None:
        began = time.monotonic()
        step = self.core.step(BEAT_S)
        self._is_stuck = step is None and self.core.has_work and not len(self.core.pipeline)
        if step is None:
            return
        self._progress_at = time.monotonic()
        self._step_s = self._progress_at - began
        self._observe(step.stats)
        self.stats_log.add(step.stats)
        for client, part in split_by_client(step, self.clients.owner).items():
            self.clients.send(client, Stepped(part))
        for request_id in step.finished:
            self.clients.owner.pop(request_id, None)

    def _beat(self) -> None:
        """Sent to all, whatever else was: an API process without requests wants to know, too. One that is
        behind would only get more of what it does not take."""
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + BEAT_S
        self.core.executor.watch()
        stats = StepStats()
        self._observe(stats)  # gauges: nobody else sees that a client died, or the core before this one
        self.stats_log.tick(stats)
        stalled_s = now - self._progress_at if self.core.has_work else 0.0
        for client in self.clients.known - self.clients.queues.keys():
            self.clients.send(client, Beat(stats, stalled_s))

    def _observe(self, stats: StepStats) -> None:
        self.metrics.observe(self.core.refresh(stats), FrontStats())


def split_by_client(step: StepOutput, client_of: dict[str, bytes]) -> dict[bytes, StepOutput]:
    """The step as each client sees it. With one client that is the step itself."""
    clients = {client_of[id] for id in [*step.request_ids, *step.finished, *step.admitted] if id in client_of}
    if len(clients) == 1:
        return {clients.pop(): step}
    parts = {client: StepOutput([], [], stats=step.stats, at=step.at) for client in clients}
    for id, token_id in zip(step.request_ids, step.token_ids, strict=True):
        part = parts[client_of[id]]
        part.request_ids.append(id)
        part.token_ids.append(token_id)
    for name in ("finished", "logprobs", "prompt_logprobs", "pooled", "admitted"):
        for id, value in getattr(step, name).items():
            getattr(parts[client_of[id]], name)[id] = value
    return parts
