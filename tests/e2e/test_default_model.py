"""Tests that `quire serve` without arguments serves the default model."""

from pathlib import Path

from default_model import default_model
from serve_process import ServeProcess


def test_default_model_answers_paris(tmp_path: Path) -> None:
    """Catches a server that works only with the models of the tests."""
    default_model()
    with ServeProcess(None, "--max-model-len", "512", "--dtype", "float32", log=tmp_path / "log") as server:
        server.until_healthy()
        question = {"role": "user", "content": "What is the capital of France? Answer in one word."}
        body = {"messages": [question], "max_tokens": 12, "temperature": 0}
        reply = server.client.post("/v1/chat/completions", json=body).json()
        assert "Paris" in reply["choices"][0]["message"]["content"]
        check_supervisor(server.process.pid)
        server.end_cleanly()


def check_supervisor(pid: int) -> None:
    """Check that the process that starts the others has mapped no library of the engine or the web server."""
    maps = Path(f"/proc/{pid}/maps")
    if maps.exists():  # Linux
        mapped = maps.read_text()
        assert "libpython" in mapped or "python" in mapped
        assert not [name for name in ("libtorch", "pydantic_core", "tokenizers") if name in mapped]
