"""A server of the benchmarks, in a process of its own."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

START_S = 600.0
CALL_S = 3600.0


class Server:
    """`quire serve` on a free port; its output is appended to `log`."""

    def __init__(self, log: Path, *flags: str, env: Mapping[str, str] | None = None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [sys.executable, "-m", "quire", "serve", *flags, "--port", str(self.port)]
        with log.open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)
        until = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                self.call("/health")
                return
            if self.process.poll() is not None or time.monotonic() > until:
                last_lines = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
                raise SystemExit(f"the server has not started; the end of {log}:\n{last_lines}")
            time.sleep(0.5)

    def request(self, path: str, body: dict[str, Any] | None = None) -> urllib.request.Request:
        data = None if body is None else json.dumps(body).encode()
        return urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"}
        )

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request (POST with a `body`, else GET) and return the response: parsed JSON, or the text
        if it is not JSON."""
        with urllib.request.urlopen(self.request(path, body), timeout=CALL_S) as answer:
            text, kind = answer.read(), answer.headers.get_content_type()
        return json.loads(text) if kind == "application/json" and text else text.decode()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()
