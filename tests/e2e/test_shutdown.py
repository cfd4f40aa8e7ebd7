"""Tests of the shutdown of a server: after a drain, at once, or by force; no process is left behind."""

import contextlib
import os
import shutil
import signal
import threading
from typing import Any

import httpx
import pytest
from serve_process import PATIENCE_S, ServeProcess, Start, eventually

LENGTH = 600
"""Number of tokens that take longer than a busy machine needs to open some more streams."""


class Streams:
    """Clients that read streams of one length, each in its thread."""

    def __init__(self, server: ServeProcess, count: int, max_tokens: int) -> None:
        self.found: list[list[dict[str, Any] | str]] = [[] for _ in range(count)]
        self._begun = [threading.Event() for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._read, args=(server, number, max_tokens), daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()
        assert all(event.wait(PATIENCE_S) for event in self._begun)

    def _read(self, server: ServeProcess, number: int, max_tokens: int) -> None:
        fields = {"max_tokens": max_tokens, "stream_options": {"include_usage": True}}
        with (
            contextlib.suppress(httpx.RemoteProtocolError),
            server.streaming(prompt=[5 + number, 6], **fields) as stream,
        ):
            for event in stream:
                self.found[number].append(event)
                self._begun[number].set()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_sigterm_lets_running_requests_finish(start: Start) -> None:
    """Catches requests that a deployment cuts off, and a port that still accepts connections that are never
    answered."""
    server = start("--api-server-count", "2", "--shutdown-timeout", "100")
    server.until_healthy(num_api=2)
    core = server.core
    crowd = Streams(server, 6, max_tokens=LENGTH)
    os.kill(core, signal.SIGSTOP)  # no stream ends before new connections are refused
    server.process.send_signal(signal.SIGTERM)
    eventually("new connections are refused", server.refuses)
    still_running = "[DONE]" not in [result[-1] for result in crowd.found]
    os.kill(core, signal.SIGCONT)
    crowd.join()
    assert server.exit_code() == 0, server.text()
    assert still_running, "new requests were refused only after the old ones had finished"
    for result in crowd.found:
        assert result[-1] == "[DONE]"
        assert isinstance(result[-2], dict)
        assert result[-2]["usage"]["completion_tokens"] == LENGTH
    assert "Traceback" not in server.text()


def test_shutdown_timeout_0_aborts_at_once(start: Start) -> None:
    """Catches a drain that waits nevertheless, and streams that end without a reason."""
    server = start("--shutdown-timeout", "0")
    server.until_healthy()
    crowd = Streams(server, 4, max_tokens=8000)
    server.process.send_signal(signal.SIGTERM)
    assert server.exit_code() == 0, server.text()
    crowd.join()
    for result in crowd.found:
        assert result[-1] == "[DONE]"
        assert isinstance(result[-2], dict) and "shutting down" in result[-2]["error"]["message"]
    assert "Traceback" not in server.text(), server.text()


def test_second_sigint_ends_at_once(start: Start) -> None:
    """Catches a Ctrl-C that cannot be hurried."""
    server = start()
    server.until_healthy()
    crowd = Streams(server, 2, max_tokens=8000)
    server.process.send_signal(signal.SIGINT)
    eventually("the server drains", lambda: "Shutting down" in server.text())
    server.process.send_signal(signal.SIGINT)
    assert server.exit_code() == 130, server.text()
    crowd.join()
    assert "[DONE]" not in [result[-1] for result in crowd.found], "no request was running"


def test_killed_supervisor_leaves_no_orphan(start: Start) -> None:
    """Catches an engine that keeps its memory after all other processes are gone."""
    server = start("--api-server-count", "2")
    server.until_healthy(num_api=2)
    assert len(server.members()) >= 4
    os.kill(server.process.pid, signal.SIGKILL)
    assert server.exit_code() == -signal.SIGKILL
    with pytest.raises(httpx.TransportError):
        server.client.get("/health")


def test_leftovers_of_a_killed_supervisor_are_removed_by_the_next(
    start: Start, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches folders that pile up, and a cleanup that removes those of a living server."""
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setenv("TMPDIR", str(folder))
    killed, living = start(), start()
    for server in (killed, living):
        server.until_healthy()
    assert len(list(folder.glob("quire-*"))) == 2
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.exit_code()
    assert len(list(folder.glob("quire-*"))) == 2
    start().until_healthy()
    assert len(list(folder.glob("quire-*"))) == 2
    assert living.complete(max_tokens=3)["usage"]["completion_tokens"] == 3
    living.end_cleanly()
    assert len(list(folder.glob("quire-*"))) == 1


def test_sigterm_during_model_loading(start: Start) -> None:
    """Catches a server that can only be stopped once it is up."""
    server = start("--shutdown-timeout", "0")
    eventually("the engine's process runs", lambda: bool(server.with_role("EngineCore")))
    os.kill(server.core, signal.SIGSTOP)  # it never gets healthy
    server.process.send_signal(signal.SIGTERM)
    assert server.exit_code() == 0, server.text()


def test_deleted_folder_of_sockets_ends_the_server_when_a_process_must_be_restarted(
    start: Start, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a traceback after a clean-up of /tmp."""
    folder = tmp_path_factory.mktemp("t")
    monkeypatch.setenv("TMPDIR", str(folder))
    server = start()
    server.until_healthy()
    (scratch,) = folder.glob("quire-*")
    shutil.rmtree(scratch)
    assert server.complete(max_tokens=3)["usage"]["completion_tokens"] == 3
    os.kill(server.core, signal.SIGKILL)
    assert server.exit_code() == 1
    assert f"{scratch} was deleted" in server.text() and "Traceback" not in server.text(), server.text()
