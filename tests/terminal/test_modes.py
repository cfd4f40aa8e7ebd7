"""Tests of the flags that select a model in this process, and of the imports of the client mode."""

import io
import signal
import subprocess
import sys
from typing import Any

import pytest
from fake_openai import FakeServer
from tiny_text import text_model

from quire.cli import main
from quire.entrypoints.in_process import LocalEngine

Capture = pytest.CaptureFixture[str]


def test_engine_flag_selects_a_local_model(tmp_path_factory: pytest.TempPathFactory, capsys: Capture) -> None:
    path = text_model(tmp_path_factory.getbasetemp()).path
    words = ["--model", str(path), "--num-gpu-blocks-override", "40", "-q", "One"]
    assert main(["complete", *words, "--max-tokens", "2", "--dtype", "float32"]) == 0
    assert capsys.readouterr().out.startswith(f"Using model: {path}\n")


def test_ctrl_c_during_a_local_answer_ends_it_after_the_step(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next prompt is answered by the same engine."""
    monkeypatch.setattr("sys.stdin", io.StringIO("One\ntwo\n"))
    num_steps, step = 0, LocalEngine.step

    def interrupted_step(engine: LocalEngine) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 2:
            signal.raise_signal(signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(LocalEngine, "step", interrupted_step)
    path = text_model(tmp_path_factory.getbasetemp()).path
    words = ["--model", str(path), "--num-gpu-blocks-override", "40", "--dtype", "float32"]
    assert main(["complete", *words, "--max-tokens", "9", "--temperature", "0"]) == 0
    assert 2 < num_steps < 18, "the second prompt is answered, the first in part"


def test_local_without_a_model_selects_the_packaged_one(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """It would open the packaged model; the test stops before that."""
    monkeypatch.setattr("quire.terminal.local.LLM", lambda **_: sys.exit(7))
    with pytest.raises(SystemExit) as end:
        main(["chat", "--local", "-q", "hi"])
    assert end.value.code == 7


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--local", "--url", "localhost:8000"], "--local runs a model in this process"),
        (["--max-model-len", "64", "--model-name", "m"], "--max-model-len runs a model in this process"),
    ],
)
def test_flags_of_a_server_and_of_a_local_model_are_refused(
    words: list[str], named: str, capsys: Capture
) -> None:
    """Catches a model that is looked for on the hub although its name is that of a server's model."""
    assert main(["chat", *words, "-q", "hi"]) == 1
    assert named in capsys.readouterr().err


def test_client_needs_neither_torch_nor_the_engine() -> None:
    """A chat with a server starts at once."""
    with FakeServer() as server:
        code = (
            "import sys; sys.modules['torch'] = None; from quire.cli import main; "
            f"main(['chat', '--url', '{server.url}/v1', '-q', 'hi']); "
            "assert 'quire.entrypoints.llm' not in sys.modules"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "t0" in done.stdout, done.stderr
