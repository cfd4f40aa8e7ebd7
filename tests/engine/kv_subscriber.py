"""A subscriber of KV events over ZMQ, written from the published format: live messages and replays."""

import time
from collections.abc import Callable, Iterator

import zmq
from mirror import Mirror

LIMIT_S = 120.0
"""Seconds after which a test fails that waits for a message."""
END = b"\xff" * 8


class Subscriber:
    """A SUB socket, a socket for replays, and the blocks that follow from the events."""

    def __init__(self, endpoint: str, replay_endpoint: str = "", topic: str = "", hwm: int = 0) -> None:
        self.context = zmq.Context()
        self.live: zmq.Socket[bytes] = self.context.socket(zmq.SUB)
        self.live.set_hwm(hwm)
        self.live.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.live.connect(endpoint)
        self.asking: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
        if replay_endpoint:
            self.asking.connect(replay_endpoint)
        self.mirror = Mirror()
        self.next = 0
        """Sequence number of the next batch."""

    def close(self) -> None:
        self.context.destroy(linger=0)

    def receive(self) -> tuple[bytes, int, bytes]:
        """Return the topic, the sequence number and the payload of the next live message."""
        assert self.live.poll(LIMIT_S * 1000), "no message"
        topic, number, payload = self.live.recv_multipart()
        return topic, int.from_bytes(number, "big"), payload

    def replay(self, first: int) -> Iterator[tuple[int, bytes]]:
        """Yield the sequence numbers and payloads of the batches that the publisher kept from `first` on."""
        self.asking.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            assert self.asking.poll(LIMIT_S * 1000), "the replay does not end"
            empty, topic, number, payload = self.asking.recv_multipart()
            assert empty == b""
            if number == END:
                assert (topic, payload) == (b"", b"")
                return
            yield int.from_bytes(number, "big"), payload

    def until(self, is_done: Callable[[Mirror], bool]) -> Mirror:
        """Apply replayed batches until the mirror is as wanted; return it."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            for number, payload in self.replay(self.next):
                assert number == self.next, "a gap"
                self.next += 1
                self.mirror.read(payload)
            if is_done(self.mirror):
                return self.mirror
            assert time.monotonic() < deadline, f"still {len(self.mirror.blocks)} blocks"
