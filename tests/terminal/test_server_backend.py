"""Tests of `quire chat` and `quire complete` as clients of a server."""

import io
import signal
import socket

import pytest
from fake_openai import MODEL, FakeServer

from quire.cli import main
from quire.terminal.server import api_url

Capture = pytest.CaptureFixture[str]


def ask(server: FakeServer, *words: str, code: int = 0) -> None:
    name, *flags = words
    assert main([name, "--url", f"{server.url}/v1", *flags]) == code


def test_quick_answer(capsys: Capture) -> None:
    with FakeServer() as server:
        ask(server, "complete", "-q", "One", "--max-tokens", "3", "--temperature", "0.5", "--api-key", "k")
        (request,) = server.requests
    assert capsys.readouterr().out == f"Using model: {MODEL}\nt0 t1 t2 \n"
    assert (request["prompt"], request["max_tokens"], request["temperature"]) == ("One", 3, 0.5)
    assert request["model"] == MODEL and request["_headers"]["authorization"] == "Bearer k"


def test_unset_parameters_are_not_sent() -> None:
    """The server's defaults apply, and a named model is not looked up."""
    with FakeServer() as server:
        ask(server, "chat", "-q", "One", "--model-name", "mine")
        (request,) = server.requests
    assert request["max_tokens"] == 1024 and "temperature" not in request and request["model"] == "mine"
    assert "authorization" not in request["_headers"] and request["_path"] == "/v1/chat/completions"


def test_api_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-env")
    with FakeServer() as server:
        ask(server, "chat", "-q", "One")
        assert server.requests[0]["_headers"]["authorization"] == "Bearer from-env"


def test_conversation_keeps_its_history(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("One\n\ntwo\n"))
    with FakeServer() as server:
        ask(server, "chat", "--system-prompt", "Be brief.", "--max-tokens", "1")
        first, second = (request["messages"] for request in server.requests)
    assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]
    assert first == second[:2] and second[2]["content"] == "t0 " and second[3]["content"] == "two"
    assert "Please enter a message for the chat model:" in capsys.readouterr().out


class InterruptingOutput(io.StringIO):
    """Standard output at which the user presses Ctrl-C when the first tokens appear."""

    def write(self, text: str) -> int:
        written = super().write(text)
        if text == "t1 " and self.getvalue().count(text) == 1:
            signal.raise_signal(signal.SIGINT)
        return written


def test_ctrl_c_ends_the_answer_but_not_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = InterruptingOutput()
    monkeypatch.setattr("sys.stdin", io.StringIO("slow\n/help\ntwo\n"))
    monkeypatch.setattr("sys.stdout", shown)
    with FakeServer() as server:
        ask(server, "chat", "--max-tokens", "500")
        first, second = (request["messages"] for request in server.requests)
    begun, stopped, continued = (message["content"] for message in second)
    assert len(first) == 1 and (begun, continued) == ("slow", "two")
    assert stopped.startswith("t0 t1 ") and "t499" not in stopped
    assert shown.getvalue().count("/help prints this line") == 2 and "t499" in shown.getvalue()


def test_ctrl_c_ends_a_quick_answer_with_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", InterruptingOutput())
    with FakeServer() as server:
        ask(server, "chat", "-q", "slow", "--max-tokens", "500", code=130)


@pytest.mark.parametrize("usage", [True, False])
def test_stats_count_tokens_with_and_without_usage(usage: bool, capsys: Capture) -> None:
    with FakeServer(usage=usage) as server:
        ask(server, "chat", "-q", "One", "--max-tokens", "5", "--stats")
    *_, ttft, tps = capsys.readouterr().out.splitlines()
    assert ttft.startswith("TTFT: ") and "(5 tokens in" in tps


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("refuse", "HTTP 400: asked to refuse"),
        ("denied", "HTTP 401: asked to denied; give --api-key or set OPENAI_API_KEY"),
        ("drop", "was lost"),
        ("garbage", "malformed event"),
        ("error", "the engine died"),
    ],
)
def test_broken_answer_is_a_one_line_error(prompt: str, says: str, capsys: Capture) -> None:
    with FakeServer() as server:
        ask(server, "complete", "-q", prompt, code=1)
    errors = capsys.readouterr().err
    assert says in errors and errors.startswith("quire complete: error: ") and errors.count("\n") == 1


@pytest.mark.parametrize("name", ["chat", "complete"])
def test_missing_server_names_the_start_command(name: str, capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert main([name, "--url", f"http://127.0.0.1:{port}/v1", "-q", "hi"]) == 1
    errors = capsys.readouterr().err
    assert "is it running? start one with `quire serve`" in errors and errors.count("\n") == 1


def test_other_server_is_a_one_line_error(capsys: Capture) -> None:
    with FakeServer() as server:
        assert main(["chat", "--url", f"{server.url}/other", "-q", "hi"]) == 1
    assert "HTTP 404: Not Found" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("localhost:8000", "http://localhost:8000/v1"),
        ("http://host:1/", "http://host:1/v1"),
        ("https://host/v1", "https://host/v1"),
        ("http://host/prefix/v1", "http://host/prefix/v1"),
    ],
)
def test_a_url_may_leave_out_the_path_of_the_api(url: str, expected: str) -> None:
    assert api_url(url) == expected
