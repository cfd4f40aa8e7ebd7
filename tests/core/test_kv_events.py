"""Tests of the KV event publisher: its messages, replays, and subscribers that do not keep up."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from kv_subscriber import LIMIT_S, Subscriber
from ports import free_port

from quire.config.kv_events import KVEventSettings
from quire.core import kv_events
from quire.core.kv_events import EventPublisher
from quire.data import block_hash
from quire.data.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from quire.errors import ConfigError

Open = Callable[..., EventPublisher]


@pytest.fixture
def endpoints(tmp_path: Path) -> dict[str, str]:
    return {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}


@pytest.fixture
def opened(endpoints: dict[str, str]) -> Iterator[Open]:
    publishers: list[EventPublisher] = []

    def build(**settings: Any) -> EventPublisher:
        publishers.append(EventPublisher(KVEventSettings(**endpoints | settings), clock=lambda: 1.5))
        return publishers[-1]

    yield build
    for publisher in publishers:
        publisher.close()


@pytest.fixture
def subscribed(endpoints: dict[str, str]) -> Iterator[Callable[..., Subscriber]]:
    subscribers: list[Subscriber] = []

    def build(**settings: Any) -> Subscriber:
        subscribers.append(Subscriber(**endpoints | settings))
        return subscribers[-1]

    yield build
    for subscriber in subscribers:
        subscriber.close()


def event(number: int, num_tokens: int = 1) -> list[KVEvent]:
    """Return a batch that can be told from others by its first token."""
    tokens = np.ones(num_tokens, np.int32)
    tokens[0] = number
    return [BlockStored([bytes([1]) * 32], None, tokens, 1, None, "GPU", None, group_idx=0)]


def token_of(payload: bytes) -> int:
    return msgspec.msgpack.decode(payload)[1][0]["token_ids"][0]  # type: ignore[no-any-return]


def await_last(subscriber: Subscriber, last: int) -> list[tuple[int, bytes]]:
    """Replay until batch `last` is there; return all kept batches."""
    deadline = time.monotonic() + LIMIT_S
    while not list(subscriber.replay(last)):
        assert time.monotonic() < deadline, f"batch {last} does not come"
    return list(subscriber.replay(0))


def test_messages_have_a_topic_and_numbers_in_order(
    opened: Open, subscribed: Callable[..., Subscriber]
) -> None:
    publisher = opened(topic="kv@pod@model")
    live, other = subscribed(topic="kv@"), subscribed(topic="else")
    count = 0
    while not live.live.poll(10):  # the subscription takes its time
        publisher.publish(event(count))
        count += 1
    for number in range(count, count + 5):
        publisher.publish(event(number))
    numbers = []
    while not numbers or numbers[-1] < count + 4:
        topic, number, payload = live.receive()
        assert topic == b"kv@pod@model" and token_of(payload) == number
        assert msgspec.msgpack.decode(payload)[0] == 1.5
        numbers.append(number)
    assert numbers == [*range(numbers[0], count + 5)]
    assert not other.live.poll(0), "a message of another topic"


def test_a_subscriber_replays_what_it_missed(opened: Open, subscribed: Callable[..., Subscriber]) -> None:
    publisher, subscriber = opened(buffer_steps=10), subscribed()
    for number in range(25):
        publisher.publish(event(number))
    kept = await_last(subscriber, 24)
    assert [number for number, _ in kept] == [*range(15, 25)], "the last buffer_steps batches"
    assert [token_of(payload) for _, payload in kept] == [*range(15, 25)]
    assert [number for number, _ in subscriber.replay(22)] == [22, 23, 24]
    assert not list(subscriber.replay(25)), "there is nothing after the last"
    for frames in ([b"", b"123"], [b"", b"\0" * 8, b""], [b"x", b"\0" * 8], [b""]):
        subscriber.asking.send_multipart(frames)  # ignored
    assert len(list(subscriber.replay(0))) == 10


def test_a_client_with_a_req_socket_can_replay(endpoints: dict[str, str], opened: Open) -> None:
    opened().publish(event(7))
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.linger = 0
        socket.connect(endpoints["replay_endpoint"])
        deadline = time.monotonic() + LIMIT_S
        frames = [b"", b"", b""]
        while not frames[2]:  # until the thread has taken the batch from its queue
            assert time.monotonic() < deadline
            socket.send((0).to_bytes(8, "big"))
            assert socket.poll(LIMIT_S * 1000)
            frames = socket.recv_multipart()
        assert (frames[0], frames[1], token_of(frames[2])) == (b"", b"\0" * 8, 7)


def test_a_slow_subscriber_does_not_stall_the_publisher(
    opened: Open, subscribed: Callable[..., Subscriber]
) -> None:
    publisher = opened(hwm=1, buffer_steps=100)
    slow = subscribed(hwm=1)
    count = 0
    while not slow.live.poll(10):
        publisher.publish(event(count))
        count += 1
    for number in range(count, count + 500):
        publisher.publish(event(number, 40_000))  # 20 MB in all, which no buffer of the system holds
    kept = await_last(slow, count + 499)
    assert len(kept) == 100 and publisher.num_dropped == 0
    numbers = [slow.receive()[1]]
    while slow.live.poll(0):
        numbers.append(slow.receive()[1])
    assert numbers == sorted({*numbers}) and len(numbers) < 500, "it has missed some, and can see it"


def test_a_full_queue_drops_batches_and_leaves_a_gap(
    opened: Open, subscribed: Callable[..., Subscriber], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_open, is_in = threading.Event(), threading.Event()
    encode = kv_events.EventEncoder.encode

    def stuck(*args: Any) -> bytes:
        is_in.set()
        assert is_open.wait(LIMIT_S)
        return encode(*args)

    monkeypatch.setattr(kv_events.EventEncoder, "encode", stuck)
    publisher, subscriber = opened(max_queue_size=3), subscribed()
    publisher.publish(event(0))
    assert is_in.wait(LIMIT_S)
    for number in range(1, 7):
        publisher.publish(event(number))
    assert publisher.num_dropped == 3 == publisher.take_dropped() and not publisher.take_dropped()
    is_open.set()
    await_last(subscriber, 3)
    publisher.publish(event(7))
    assert [number for number, _ in await_last(subscriber, 7)] == [0, 1, 2, 3, 7]


def test_an_address_that_cannot_be_used_is_an_error(opened: Open, tmp_path: Path) -> None:
    endpoint = f"tcp://*:{free_port()}"
    opened(endpoint=endpoint)
    for address in (endpoint, f"ipc://{tmp_path}/nowhere/events"):
        with pytest.raises(ConfigError, match="cannot be opened .*choose another address"):
            opened(endpoint=address, replay_endpoint=None)


def documented(number: int) -> dict[str, Any]:
    """Return the names that an example of the documentation defines."""
    page = (Path(__file__).parents[2] / "docs" / "kv_events.md").read_text()
    names: dict[str, Any] = {"__name__": "example"}
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[number], names)
    return names


def test_the_documented_subscriber_follows_an_engine(opened: Open, endpoints: dict[str, str]) -> None:
    publisher = opened()
    for number in range(3):
        publisher.publish(stored(number))
    subscriber = documented(0)["Subscriber"](*endpoints.values())
    try:
        deadline = time.monotonic() + LIMIT_S
        while subscriber.next < 3:  # until the thread has taken the batches from its queue
            assert time.monotonic() < deadline
            subscriber.catch_up()
        assert subscriber.blocks == {("GPU", 0, number) for number in range(3)}
        last = 3
        while not subscriber.live.poll(10):  # until the subscription has arrived
            publisher.publish(stored(last))
            last += 1
        publisher.publish([BlockRemoved([bytes(32)], "GPU", 0)])
        while subscriber.next <= last:
            subscriber.receive()
        assert subscriber.blocks == {("GPU", 0, number) for number in range(1, last)}
        publisher.publish([AllBlocksCleared()])
        subscriber.receive()
        assert not subscriber.blocks
    finally:
        subscriber.live.close(linger=0)
        subscriber.replays.close(linger=0)


def stored(number: int) -> list[KVEvent]:
    """Return a batch with a block of this hash."""
    tokens = np.array([7], np.int32)
    return [BlockStored([number.to_bytes(32, "big")], None, tokens, 1, None, "GPU", None, group_idx=0)]


def test_the_documented_hash_is_that_of_the_engine() -> None:
    tokens, adapter = [*range(11), 2**31 - 1], bytes(range(32))
    extra_keys = [["sql", "pepper"], [("ab" * 32, -3), ("cd", 1)], [b"raw"]]
    names = documented(1)
    expected = block_hash.block_hashes(
        tokens, 4, parent=block_hash.root_hash(adapter, "pepper"), extra_keys=extra_keys
    )
    settings = {"salt": "pepper", "lora_digest": adapter.hex(), "extra_keys": extra_keys}
    assert names["block_hashes"](tokens, 4, **settings) == expected
    assert names["block_hashes"](tokens, 5) == block_hash.block_hashes(tokens, 5)
    assert names["short_hash"](expected[0]) == block_hash.short_hash(expected[0])
