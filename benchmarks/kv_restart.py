"""Time the first token of a long prefix before and after a restart of a server with a KV cache on disk.

    python benchmarks/kv_restart.py [--tokens 8000]

A server with the packaged model computes a prompt, is stopped and started again, and gets a prompt with the
same prefix. Both prompts end with other text, so that the last tokens are computed.
"""

import argparse
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from typing import Any

START_S = 600.0


def call(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=3600) as answer:
        return json.loads(answer.read() or b"{}")


def run_once(port: int, folder: str, prompt: list[int]) -> tuple[float, dict[str, Any]]:
    """Start a server, time the first token of a prompt, and stop the server."""
    command = [sys.executable, "-m", "quire", "serve", "--port", str(port), "--kv-offloading-dir", folder]
    server = subprocess.Popen([*command, "--enable-prompt-tokens-details"])
    try:
        until = time.monotonic() + START_S
        while True:
            try:
                call(port, "/health")
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > until:
                    raise SystemExit("the server has not started") from None
                time.sleep(0.5)
        call(port, "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 1})  # warm up
        began = time.monotonic()
        answer = call(port, "/v1/completions", {"prompt": prompt, "max_tokens": 1, "temperature": 0})
        seconds = time.monotonic() - began
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
    return seconds, answer["usage"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8000, help="tokens of the common prefix")
    count = parser.parse_args().tokens
    prefix = [(at * 7919) % 40000 + 100 for at in range(count)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        cold_s, _ = run_once(port, folder, [*prefix, *range(200, 216)])
        warm_s, usage = run_once(port, folder, [*prefix, *range(300, 316)])
    print(
        f"{count} tokens: cold {cold_s:.2f} s, after a restart {warm_s:.2f} s, {cold_s / warm_s:.1f}x sooner"
    )
    print("usage after the restart:", usage)


if __name__ == "__main__":
    main()
