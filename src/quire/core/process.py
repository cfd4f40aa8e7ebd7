"""The core as a process: requests come in and steps go out over one ZMQ socket."""

import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq

from quire.config.engine import EngineConfig, Env
from quire.core.engine_core import EngineCore, build_core
from quire.core.stats_log import StatsLog
from quire.data.plan import StepOutput
from quire.data.stats import FrontStats, StepStats
from quire.data.wire import Abort, Add, Beat, Call, Hello, Ready, Reply, Stepped, decode_to_core, encode
from quire.dist.process import adopt
from quire.errors import QuireError
from quire.logs import get_logger
from quire.metrics import Layout, MetricsPages

log = get_logger(__name__)

BEAT_S = 0.25


def run_core(config: EngineConfig, address: str, metrics_file: Path, parent: Connection) -> None:
    """Entry of the core process. Tells `parent` when it is ready, or in one line why it cannot be."""
    adopt("EngineCore")
    try:
        core, cache = build_core(config)
    except QuireError as error:
        parent.send(str(error))
        sys.exit(1)
    metrics = MetricsPages(Layout(config.model.max_model_len), metrics_file, page=0)
    ready = Ready(os.getpid(), cache.max_model_len, cache.num_blocks)
    env = Env.read(os.environ)
    stats_log = StatsLog(env.log_stats_interval, metrics, quiet=config.observability.disable_log_stats)
    server = CoreServer(core, address, ready, metrics, stats_log)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    parent.send(None)
    server.run()


class CoreServer:
    """Takes in messages between steps, never during one. A client is an API process, by its identity."""

    def __init__(
        self, core: EngineCore, address: str, ready: Ready, metrics: MetricsPages, stats_log: StatsLog
    ) -> None:
        self.core = core
        self.ready = ready
        self.metrics = metrics
        self.stats_log = stats_log
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.bind(address)
        self._clients: set[bytes] = set()
        self._client_of: dict[str, bytes] = {}
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
            self._receive()
            if self.core.has_work:
                self._send_step(self.core.step())
            self._beat()

    def _receive(self) -> None:
        """Everything that has arrived; with nothing to compute, wait for something to arrive."""
        if not self.core.has_work:
            try:
                self.socket.poll(int(BEAT_S * 1000))
            except zmq.ZMQError:
                return
        while True:
            try:
                client, data = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(client, decode_to_core(data))

    def _handle(self, client: bytes, message: Hello | Add | Abort | Call) -> None:
        match message:
            case Add(requests):
                for request in requests:
                    self._client_of[request.id] = client
                    self.core.add(request)
            case Abort(request_ids):
                finished = self.core.abort(request_ids)
                for request_id in finished:
                    self._client_of.pop(request_id, None)
                self._observe(StepStats())
            case Call(number, method):
                self._send(client, Reply(number, self._calls[method]()))
            case Hello():
                self._clients.add(client)
                self._send(client, self.ready)

    def _send_step(self, step: StepOutput) -> None:
        self._observe(step.stats)
        self.stats_log.add(step.stats)
        for client, part in split_by_client(step, self._client_of).items():
            self._send(client, Stepped(part))
        for request_id in step.finished:
            self._client_of.pop(request_id, None)

    def _beat(self) -> None:
        """Sent to all, whatever else was: an API process without requests wants to know, too."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            stats = StepStats()
            self._observe(stats)  # gauges: nobody else sees that a client died, or the core before this one
            self.stats_log.tick(stats)
            for client in list(self._clients):
                self._send(client, Beat(stats))

    def _observe(self, stats: StepStats) -> None:
        self.metrics.observe(self.core.refresh(stats), FrontStats())

    def _send(self, client: bytes, message: Ready | Stepped | Beat | Reply) -> None:
        try:
            self.socket.send_multipart([client, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            self._drop(client)

    def _drop(self, client: bytes) -> None:
        """An API process is gone: so are those who waited for its requests."""
        self._clients.discard(client)
        lost = [request_id for request_id, owner in self._client_of.items() if owner == client]
        for request_id in self.core.abort(lost):
            del self._client_of[request_id]


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
    for name in ("finished", "logprobs", "prompt_logprobs", "admitted"):
        for id, value in getattr(step, name).items():
            getattr(parts[client_of[id]], name)[id] = value
    return parts
