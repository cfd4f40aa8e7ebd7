"""The engine core as a process: requests and step outputs travel over one ZMQ socket."""

import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from quire.config.engine import EngineConfig
from quire.config.env import Env
from quire.config.mm_caches import max_bytes
from quire.config.plugins import load_plugins
from quire.core.build import build_core
from quire.core.clients import Clients
from quire.core.engine_core import EngineCore
from quire.core.facts import CoreFacts, core_name
from quire.core.rpc import CoreRpc
from quire.core.stats_log import StatsLog
from quire.data.request import Request
from quire.data.stats import FrontStats, StepStats
from quire.data.step_plan import FinishReason, StepOutput, split_by_owner
from quire.data.wire import Abort, Add, ControlCall, Heartbeat, Hello, Missing, Ready, StepDone, ToCore
from quire.errors import EngineDead, QuireError
from quire.executor.worker_process import world_size
from quire.logs import get_logger
from quire.metrics.pages import MetricsLayout, MetricsPages
from quire.sched.mm_receiver_cache import ReceiverCache
from quire.system.memory_trim import trim_memory
from quire.system.platform import devices_of
from quire.system.process import SPARE_BYTES, adopt, tune_garbage_collector
from quire.system.shared_arena import ArenaReader

log = get_logger(__name__)

BEAT_S = 0.1
PAGE_S = 1.0
"""Seconds between two copies of the metrics to API server processes on other machines."""
RETRY_S = 0.02
"""Seconds to wait for messages when no step can be planned, messages are queued or a control call is open."""
TURN_S = 0.002
"""Minimum seconds for reading messages between two steps."""
TURN_SHARE = 0.25
"""Time for reading messages between two steps as a share of the last step's time, if more than `TURN_S`."""


def run_core(config: EngineConfig, facts: CoreFacts, parent: Connection) -> None:
    """Run the core process of `config.parallel.data_parallel_rank`. When the core is ready, None is sent to
    `parent`; if it cannot start, the reason is sent."""
    rank, size = config.parallel.data_parallel_rank or 0, config.parallel.data_parallel_size
    adopt(core_name(rank, size))
    began_at = time.monotonic()
    try:
        _take_devices(config, facts)
        load_plugins(config.broken_plugins)
        core, cache = build_core(config, token=facts.token)
    except QuireError as error:
        parent.send(f"engine {rank}: {error}" if size > 1 else str(error))
        sys.exit(1)
    metrics = MetricsPages(
        MetricsLayout.of(config),
        facts.metrics_file,
        engine=facts.page,
        num_engines=facts.num_pages,
    )
    metrics.start(config.scheduler.max_num_seqs)
    start_s = time.monotonic() - began_at
    ready = Ready(os.getpid(), cache.max_model_len, cache.num_blocks, cache.num_tokens, start_s)
    env = Env.read(os.environ)
    quiet = config.observability.disable_log_stats
    device = config.machine.device
    stats_log = StatsLog(env.log_stats_interval, metrics, quiet=quiet, rank=rank, device=device)
    kept_bytes = max_bytes(config.multimodal) if facts.keeps_media else 0
    server = CoreServer(core, facts.address, ready, metrics, stats_log, kept_bytes, token=facts.token)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    tune_garbage_collector()
    trim_memory(SPARE_BYTES)
    parent.send(None)
    try:
        server.run()
    except EngineDead as error:
        log.error("The engine core failed and is shutting down: %s", error)
        sys.exit(1)
    finally:
        core.close()


def _take_devices(config: EngineConfig, facts: CoreFacts) -> None:
    """Set CUDA_VISIBLE_DEVICES to the GPUs of this core if several cores share the machine. Must be called
    before torch is imported."""
    shared = os.environ.get("QUIRE_TEST_SHARE_GPU") == "1"
    if config.machine.device == "cuda" and facts.num_local > 1 and not shared:
        count = world_size(config.parallel)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = devices_of(
            facts.index, count, visible=visible, num_devices=config.machine.num_devices
        )


class CoreServer:
    """The main loop of an engine core process: reads client messages between steps, never during a step, and
    sends the outputs of steps."""

    def __init__(
        self,
        core: EngineCore,
        address: str,
        ready: Ready,
        metrics: MetricsPages,
        stats_log: StatsLog,
        kept_bytes: int = 0,
        *,
        token: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Build the server. `kept_bytes` is the size limit, in bytes, of the cache of media that the API
        server process has sent."""
        self.core = core
        self._clock = clock
        self.ready = ready
        self.metrics = metrics
        self.stats_log = stats_log
        self.clients = Clients(address, self._abort, token=token)
        self._step_s = 0.0
        self._is_stuck = False
        """Whether there is work, but no step of it can be planned."""
        self._progress_at = self._clock()
        """Last time at which a step finished, or at which there was no work to do."""
        self._next_beat = 0.0
        self._next_page = 0.0 if address.startswith("tcp:") else float("inf")
        self._running = True
        self.borrower = ArenaReader()
        self.receiver_cache = ReceiverCache(kept_bytes, self.borrower.take)
        self.rpc = CoreRpc(core, self.clients.send, self._send_finished, self.receiver_cache)

    def stop(self) -> None:
        self._running = False

    def run(self) -> None:
        while self._running:
            self.turn()

    def turn(self) -> None:
        """Run one iteration of the loop: read messages, run a step, send a heartbeat."""
        self._receive()
        self.rpc.turn()
        if self.core.has_work and not self.rpc.is_busy:
            self._step()
        elif not self.core.has_work:
            self._progress_at, self._is_stuck = self._clock(), False
        self.borrower.settle()
        self.clients.flush()
        self._beat()

    def _receive(self) -> None:
        """Read messages for a limited time, so that steps are not delayed; wait for messages if there is
        nothing to compute."""
        if self._is_idle:
            is_urgent = self._is_stuck or self.clients.queues or self.rpc.has_calls
            lockstep = self.core.step_queue.lockstep
            wait_s = RETRY_S if is_urgent else BEAT_S
            if self._is_stuck and self.core.scheduler.checks.is_awaiting:
                wait_s = 0.0  # a step waits for a grammar or an adapter
            self.clients.wait(wait_s, None if lockstep is None else lockstep.socket)
        until = self._clock() + max(TURN_S, TURN_SHARE * self._step_s)
        while (received := self.clients.receive()) is not None:
            self._handle(*received)
            if self._clock() >= until:
                return

    @property
    def _is_idle(self) -> bool:
        """Whether there is nothing to compute now."""
        is_stuck = self._is_stuck and not self.core.step_queue.is_called
        return not self.core.has_work or is_stuck or self.rpc.is_busy

    def _handle(self, client: bytes, message: ToCore) -> None:
        match message:
            case Add() if not all(self.receiver_cache.fill(request.media) for request in message.requests):
                self.clients.send(client, Missing(message.requests[0].id))
            case Add():
                for request in message.all():
                    self._add(client, request)
            case Abort(request_ids):
                self._abort(request_ids)
                self._observe(StepStats())
            case ControlCall():
                self.rpc.submit(client, message)
            case Hello():
                self.clients.send(client, self.ready)

    def _add(self, client: bytes, request: Request) -> None:
        """Add a request. A request that began in another core, whose max_model_len may be larger, is limited
        to that of this core. A request with an id in use replaces the old request: the API server process
        sent it again after a lost connection."""
        if request.id in self.clients.owner:
            self._abort([request.id])
        self.clients.owner[request.id] = client
        if request.pooling is None:
            request.limit = min(request.limit, self.ready.max_model_len)
            if len(request.tokens) >= request.limit:
                self._send_finished({request.id: FinishReason("length")})
                return
        self.core.add(request)

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in self.core.abort(request_ids):
            self.clients.owner.pop(request_id, None)

    def _step(self) -> None:
        began = self._clock()
        step = self.core.step(BEAT_S)
        self._is_stuck = step is None and self.core.has_work and not len(self.core.step_queue)
        if step is None:
            if self._is_stuck and self.core.scheduler.checks.is_awaiting:
                self._progress_at = self._clock()  # requests wait for a grammar or an adapter
            return
        self._progress_at = self._clock()
        self._step_s = self._progress_at - began
        self._observe(step.stats)
        self.stats_log.add(step.stats)
        self._send_output(step)

    def _send_finished(self, finished: dict[str, FinishReason]) -> None:
        """Notify clients that requests ended which the clients did not abort."""
        self._send_output(StepOutput([], [], finished=finished, at=self._clock()))
        self._observe(StepStats())

    def _send_output(self, step: StepOutput) -> None:
        for client, part in split_by_owner(step, self.clients.owner).items():
            self.clients.send(client, StepDone(part))
        for request_id in step.finished:
            self.clients.owner.pop(request_id, None)

    def _beat(self) -> None:
        """Send a heartbeat to all clients without queued messages, also to clients without requests."""
        now = self._clock()
        if now < self._next_beat:
            return
        self._next_beat = now + BEAT_S
        self.core.executor.watch()
        stats = StepStats()
        self._observe(stats)  # update the gauges after the loss of a client or a restart of the core
        self.stats_log.tick(stats)
        stalled_s = now - self._progress_at if self.core.has_work else 0.0
        beat = Heartbeat(stats, stalled_s, self.receiver_cache.num_resets)
        if now >= self._next_page:
            self._next_page = now + PAGE_S
            beat.page = self.metrics.own.tobytes()
        for client in self.clients.known - self.clients.queues.keys():
            self.clients.send(client, beat)

    def _observe(self, stats: StepStats) -> None:
        if (events := self.core.scheduler.kv.events) is not None:
            stats.num_dropped_events = events.take_dropped()
        self.metrics.observe(self.core.refresh(stats), FrontStats())
