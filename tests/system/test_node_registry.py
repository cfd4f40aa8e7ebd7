"""Tests of the head's registry of cores on other machines: accepted, rejected and invalid messages."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from ports import free_port

from quire.errors import ConfigError
from quire.system.node_registry import Announcer, NodeRegistry

PATIENCE_S = 60.0
TOKEN = "shared"
ONE, TWO = "tcp://10.0.0.1:4001", "tcp://10.0.0.2:4002"


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def registry(port: int, tmp_path: Path) -> Iterator[NodeRegistry]:
    made = NodeRegistry("127.0.0.1", port, size=3, awaited=(1, 2), folder=tmp_path, token=TOKEN)
    yield made
    made.close()


def until(done: Callable[[], object], *turns: Callable[[], None]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline
        for turn in turns:
            turn()
        time.sleep(0.005)


def test_machine_is_registered_once_it_reports_its_cores(
    registry: NodeRegistry, port: int, tmp_path: Path
) -> None:
    node = Announcer("127.0.0.1", port, size=3, token=TOKEN, addresses={1: ONE, 2: TWO})
    until(lambda: registry.was_complete, registry.listen, lambda: node.tick(is_up=True, timeout_s=PATIENCE_S))
    assert not registry.missing and NodeRegistry.file_of(tmp_path, 2).read_text() == TWO
    node.close()


def test_machine_of_another_size_is_rejected_with_the_reason(registry: NodeRegistry, port: int) -> None:
    node = Announcer("127.0.0.1", port, size=4, token=TOKEN, addresses={1: ONE})
    with pytest.raises(ConfigError, match="data_parallel_size is 3 at the head, and 4 at "):
        until(lambda: False, registry.listen, lambda: node.tick(is_up=True, timeout_s=PATIENCE_S))
    node.close()


def test_unknown_peers_are_ignored(
    port: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check also without encryption."""
    monkeypatch.setattr("quire.system.node_registry.secure", lambda *_, **__: None)
    registry = NodeRegistry("127.0.0.1", port, size=3, awaited=(1, 2), folder=tmp_path, token=TOKEN)
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 1000)
        stranger.connect(f"tcp://127.0.0.1:{port}")
        for message in ([b"GET /"], [b"", b"in parts"], [b"\x90", b"\x91", b"\x92"]):
            stranger.send_multipart(message)
        node = Announcer("127.0.0.1", port, size=3, token=TOKEN, addresses={1: ONE})
        until(
            lambda: registry.missing == [2],
            registry.listen,
            lambda: node.tick(is_up=True, timeout_s=PATIENCE_S),
        )
        until(lambda: "a message that is not of this version" in caplog.text, registry.listen)
        assert registry.missing == [2]
        assert caplog.text.count("Ignored at") == 1, "one line, however much is sent"
        node.close()
    registry.close()
