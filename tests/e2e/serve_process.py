"""`quire serve` as a separate process, with helpers for tests."""

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
from ports import free_port
from preloaded import ForkedProcess, Preloaded

LONGEST = 16384
SHARED_FLAGS = (
    *("--dtype", "float32", "--max-model-len", str(LONGEST), "--max-num-seqs", "128"),
    *("--hf-overrides", json.dumps({"max_position_embeddings": LONGEST})),
    *("--num-gpu-blocks-override", "8192", "--block-size", "16"),
    *("--served-model-name", "tiny", "also-tiny"),
    *("--disable-uvicorn-access-log", "--enable-prompt-embeds"),
)
"""Flags for a context far longer than the tests need, so that a stream can last as long as a test."""

SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

PATIENCE_S = 150.0
"""Time limit for operations that take a second on an idle machine."""


def eventually(what: str, holds: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    """Wait until `holds()` is true. The time limit only ends a test that would hang."""
    start, pause_s = time.monotonic(), 0.02
    while not holds():
        assert time.monotonic() - start < within_s, f"not within {within_s:g} s: {what}"
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, 0.2)


def vllm_call(script: Path, folder: Path, cwd: Path) -> tuple[list[str], dict[str, str]]:
    """Run a shell script with a command `vllm` that records its call. Return the recorded arguments and
    environment variables."""
    shim = folder / "bin" / "vllm"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nprintf "%s\\0" "$@" > {folder}/argv\nenv -0 > {folder}/env\n')
    shim.chmod(0o755)
    environment = os.environ | {"PATH": f"{shim.parent}:{os.environ['PATH']}"}
    subprocess.run(["sh", str(script)], env=environment, cwd=cwd, check=True, timeout=PATIENCE_S)
    words, variables = ((folder / name).read_text().split("\0")[:-1] for name in ("argv", "env"))
    called_with = dict(variable.split("=", 1) for variable in variables)
    names = {name for name, value in called_with.items() if environment.get(name) != value} - {"_", "PWD"}
    return words, {name: called_with[name] for name in names}


class ServeProcess:
    """A running `quire serve`. At the end of the context, its whole process group is killed."""

    process: "subprocess.Popen[bytes] | ForkedProcess"

    def __init__(
        self,
        model: str | None,
        *flags: str,
        log: Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        preloaded: Preloaded | None = None,
    ) -> None:
        """With `preloaded` the server is forked from a process that has imported all modules."""
        self.log = log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        python = [sys.executable, "-m", "quire"]
        place = () if "--uds" in flags or "--port" in flags else ("--port", str(self.port))
        words = ["serve", *([] if model is None else [model]), "--host", "127.0.0.1", *place, *flags]
        command = [*python, *words]
        environment = {name: text for name, text in os.environ.items() if "API_KEY" not in name}
        environment |= {"OMP_NUM_THREADS": "1", **(env or {})}
        if preloaded is not None:
            self.process = preloaded.open(words, environment=environment, cwd=cwd, log=log)
        else:
            with log.open("wb") as output:
                self.process = subprocess.Popen(
                    command, stdout=output, stderr=output, env=environment, start_new_session=True, cwd=cwd
                )
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        if self.members():
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE_S)

    # ---- processes

    def members(self) -> list[psutil.Process]:
        """Return every living process that this server has started, itself included."""
        results = []
        for process in psutil.process_iter(["name", "status"]):
            try:
                if os.getpgid(process.pid) == self.process.pid and process.info["status"] != "zombie":
                    results.append(process)
            except ProcessLookupError:
                continue
        return results

    def with_role(self, role: str) -> list[int]:
        """Return the ids of the processes with this title, of which the kernel stores 15 characters."""
        name = f"quire:{role}"[:15]
        return sorted(member.pid for member in self.members() if member.info["name"].startswith(name))

    @property
    def core(self) -> int:
        (pid,) = self.with_role("EngineCore")
        return pid

    def exit_code(self, within_s: float = PATIENCE_S) -> int:
        """Return the exit code of the supervisor once it has ended; check that no process is left then."""
        code = self.process.wait(within_s)
        eventually("no orphan is left", lambda: not self.members())
        return code

    def end_cleanly(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.exit_code() == 0, self.text()
        assert "Traceback" not in self.text(), self.text()

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    # ---- answers

    def health(self) -> int:
        """Return the status of /health; 0 if no process answers."""
        try:
            with httpx.Client(base_url=self.url, timeout=10.0) as fresh:
                return fresh.get("/health").status_code
        except httpx.TransportError:
            return 0

    def refuses(self) -> bool:
        """Return whether new connections are refused at once, and do not wait."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == errno.ECONNREFUSED

    def until_healthy(self, num_api: int = 1) -> None:
        """Wait until all API processes are healthy, since any of them may answer."""

        def healthy() -> bool:
            assert self.process.poll() is None, self.text()
            up = self.text().count("Started server process") >= num_api
            return up and all(self.health() == 200 for _ in range(1 if num_api == 1 else 8))

        eventually("the server is up", healthy)

    def metrics(self) -> dict[str, float]:
        """Return every sample of /metrics by its name and the label that distinguishes it."""
        return parse_metrics(self.client.get("/metrics").text)

    def complete(self, **body: Any) -> dict[str, Any]:
        reply = self.client.post("/v1/completions", json=greedy(**body))
        assert reply.status_code == 200, reply.text
        reply_body: dict[str, Any] = reply.json()
        return reply_body

    def clients_of(self, pid: int) -> set[int]:
        """Return the ports of the clients that are connected to one of the server's processes."""
        connections = psutil.Process(pid).net_connections("tcp")
        return {
            connection.raddr.port
            for connection in connections
            if connection.laddr.port == self.port and connection.raddr
        }

    @contextmanager
    def streaming(self, **body: Any) -> Iterator[Iterator[dict[str, Any] | str]]:
        """Yield the events of a streamed completion. Its connection is closed at the end of the context."""
        with (
            httpx.Client(base_url=self.url, timeout=PATIENCE_S) as fresh,
            fresh.stream("POST", "/v1/completions", json=greedy(**body, stream=True)) as reply,
        ):
            assert reply.status_code == 200, reply.read()
            yield events(reply.iter_lines())


Start = Callable[..., ServeProcess]
"""Function that starts a server from flags, `model` and `fresh`."""


def greedy(**body: Any) -> dict[str, Any]:
    """Return a body of a completion that depends only on its prompt and has exactly the requested length."""
    return {"model": "tiny", "prompt": "The quick", "temperature": 0, "ignore_eos": True} | body


def events(lines: Iterator[str]) -> Iterator[dict[str, Any] | str]:
    """Yield the parsed data of server-sent events; `[DONE]` as a string."""
    for line in lines:
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def joined(stream_events: list[dict[str, Any] | str]) -> str:
    """Return the text of a stream's events."""
    return "".join(
        choice["text"]
        for event in stream_events
        if isinstance(event, dict)
        for choice in event.get("choices", [])
    )


def samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield the name, labels and value of every sample of a /metrics page. Prometheus' own parser takes a
    hundred times as long; test_counting.py compares the two."""
    for name, labels, value in SAMPLE.findall(text):
        yield name, dict(LABEL.findall(labels)), float(value)


def parse_metrics(text: str) -> dict[str, float]:
    values = {}
    for name, labels, value in samples(text):
        other_labels = [text for label, text in labels.items() if label not in ("model_name", "engine")]
        values[":".join([name.removeprefix("vllm:"), *other_labels])] = value
    return values
