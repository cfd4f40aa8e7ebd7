"""Publishes KV events over ZMQ, in a thread."""

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from quire.checkpoint.layout import cache_specs
from quire.config.engine import EngineConfig
from quire.config.env import Env
from quire.config.kv_events import KVEventSettings, endpoint_of
from quire.data.kv_events import EventEncoder, KVEvent
from quire.errors import ConfigError
from quire.logs import get_logger
from quire.sched.kv_events import GroupKind, KVEvents
from quire.sched.kv_manager import KVManager

log = get_logger(__name__)

REPLAY_POLL_S = 0.1
"""Seconds between two checks of the replay socket while there are no events."""
REPLAYS_PER_CLIENT = 4
"""Replays that are queued for a client; further replays are dropped. ZMQ counts messages as read only after
half of the limit was read. A client that reads one replay before it requests the next therefore needs
three."""
CLOSE_S = 1.0
"""Seconds that `close()` waits for a full queue, and then for the thread to send the last events."""
_SEQUENCE_BYTES = 8
_END = (b"", b"\xff" * _SEQUENCE_BYTES, b"")
"""Frames after the last batch of a replay: no topic, the sequence number -1, and no payload."""

Batch = tuple[int, float, Sequence[KVEvent]]
"""Sequence number, wall-clock time in seconds, and events."""


class EventPublisher:
    """A thread with a PUB socket, and a ROUTER socket for replays. The engine core only puts batches into a
    queue: neither a slow subscriber nor a slow thread delays its steps."""

    def __init__(
        self,
        settings: KVEventSettings,
        *,
        rank: int = 0,
        short_hashes: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the sockets of a data-parallel rank, and start the thread."""
        self._clock = clock
        self._encoder = EventEncoder(
            rank=rank, as_arrays=settings.encoding == "array", short_hashes=short_hashes
        )
        self._topic = settings.topic.encode()
        self._queue: queue.Queue[Batch | None] = queue.Queue(settings.max_queue_size)
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=settings.buffer_steps)
        """Sequence numbers and payloads of the last batches."""
        self._next = 0
        self.num_dropped = self._num_reported = 0
        """Batches that were dropped because the queue was full; those that `take_dropped` has returned."""
        self._context = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        try:
            endpoint = endpoint_of(settings.endpoint, rank)
            self._pub = self._open(zmq.PUB, endpoint, settings.hwm, binds=_is_bound(endpoint))
            if settings.replay_endpoint is not None:
                replay = endpoint_of(settings.replay_endpoint, rank)
                most = REPLAYS_PER_CLIENT * (settings.buffer_steps + 1)
                self._replay = self._open(zmq.ROUTER, replay, most, binds=True)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        log.info("KV events are published at %s", endpoint)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _open(self, kind: int, endpoint: str, hwm: int, *, binds: bool) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set_hwm(hwm)
        try:
            (socket.bind if binds else socket.connect)(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"kv_events_config: {endpoint} cannot be opened ({error.strerror}): choose another address,"
                " or end the process that has it"
            ) from error
        return socket

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Queue a batch of events, or drop it if the queue is full. A dropped batch leaves a gap in the
        sequence numbers, so that subscribers notice."""
        batch = self._next, self._clock(), events
        self._next += 1
        try:
            self._queue.put_nowait(batch)
        except queue.Full:
            self.num_dropped += 1
            if self.num_dropped & (self.num_dropped - 1) == 0:  # powers of two
                log.warning(
                    "%d batches of KV events were dropped: the queue is full; raise max_queue_size (%d) in"
                    " kv_events_config",
                    self.num_dropped,
                    self._queue.maxsize,
                )

    def take_dropped(self) -> int:
        count, self._num_reported = self.num_dropped - self._num_reported, self.num_dropped
        return count

    def close(self) -> None:
        """Send the queued batches and close the sockets, within a limited time."""
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:
            log.warning(
                "Shutting down: queued KV events are dropped, because they could not be sent within %g s",
                CLOSE_S,
            )
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        """Send batches and answer replays until the queue ends."""
        try:
            while True:
                try:
                    batch = self._queue.get(timeout=None if self._replay is None else REPLAY_POLL_S)
                except queue.Empty:
                    self._answer_replays()
                    continue
                if batch is None:
                    break
                self._send(batch)
                self._answer_replays()
        except Exception:
            log.exception("Publishing KV events failed: this engine core publishes no more until a restart")
        finally:
            self._context.destroy(linger=int(CLOSE_S * 1000))

    def _send(self, batch: Batch) -> None:
        number, at, events = batch
        payload = self._encoder.encode(at, events)
        self._buffer.append((number, payload))
        self._pub.send_multipart([self._topic, number.to_bytes(_SEQUENCE_BYTES, "big"), payload])

    def _answer_replays(self) -> None:
        """Answer the replay requests that have arrived: send all kept batches from a sequence number on."""
        while self._replay is not None and self._replay.poll(0):
            peer, *frames = self._replay.recv_multipart()
            if len(frames) != 2 or frames[0] or len(frames[1]) != _SEQUENCE_BYTES:
                log.warning("A replay request of KV events is not an empty frame and 8 bytes; it is ignored")
                continue
            first = int.from_bytes(frames[1], "big")
            answers = [
                (self._topic, number.to_bytes(_SEQUENCE_BYTES, "big"), payload)
                for number, payload in self._buffer
                if number >= first
            ]
            for answer in (*answers, _END):
                self._replay.send_multipart([peer, b"", *answer])


def _is_bound(endpoint: str) -> bool:
    """Whether the publisher binds the endpoint, as in vLLM; else it connects to a proxy at the endpoint."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def open_publisher(config: EngineConfig) -> EventPublisher | None:
    """Return the publisher of an engine; None if KV events or prefix caching are off."""
    settings = KVEventSettings.of(config.observability.kv_events_config)
    if settings is None or not config.cache.enable_prefix_caching:
        return None
    env = Env.read(os.environ)
    rank = config.parallel.data_parallel_rank or 0
    return EventPublisher(settings, rank=rank, short_hashes=env.kv.kv_events_use_int_block_hashes)


def report_events(config: EngineConfig, kv: KVManager, publisher: EventPublisher) -> None:
    """Let a KV manager report its changes to a publisher."""
    latent = any(spec is not None and spec.kind == "latent" for spec in cache_specs(config.checkpoint.facts))
    kinds: list[GroupKind | None] = [
        _kind_of(window, latent=latent) if kv.has_pages else None for window in kv.windows
    ]
    if kv.states is not None:
        kinds.append(GroupKind("mamba"))
    kv.events = KVEvents(publisher, block_size=kv.block_size, kinds=kinds)


def _kind_of(window: int | None, *, latent: bool) -> GroupKind:
    if window is not None:
        return GroupKind("sliding_window_mla" if latent else "sliding_window", window)
    return GroupKind("mla_attention" if latent else "full_attention")
