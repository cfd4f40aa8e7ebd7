"""Time the first token of a long prefix before and after a restart of a server with a KV cache on disk.

    python benchmarks/kv_restart.py [--tokens 8000]

A server with the packaged model computes a prompt, is stopped and started again, and gets a prompt with the
same prefix. Both prompts end with other text, so that the last tokens are computed.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from server_process import Server


def run_once(folder: Path, prompt: list[int]) -> tuple[float, dict[str, Any]]:
    """Start a server, time the first token of a prompt, and stop the server. Return the seconds and the
    usage of the response."""
    server = Server(
        folder / "log", "--kv-offloading-dir", str(folder / "kv"), "--enable-prompt-tokens-details"
    )
    try:
        server.call("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 1})  # warm up
        began = time.monotonic()
        answer = server.call("/v1/completions", {"prompt": prompt, "max_tokens": 1, "temperature": 0})
        seconds = time.monotonic() - began
    finally:
        server.stop()
    return seconds, answer["usage"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8000, help="tokens of the common prefix")
    count = parser.parse_args().tokens
    prefix = [(at * 7919) % 40000 + 100 for at in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        cold_s, _ = run_once(Path(folder), [*prefix, *range(200, 216)])
        warm_s, usage = run_once(Path(folder), [*prefix, *range(300, 316)])
    print(
        f"{count} tokens: cold {cold_s:.2f} s, after a restart {warm_s:.2f} s, {cold_s / warm_s:.1f}x sooner"
    )
    print("usage after the restart:", usage)


if __name__ == "__main__":
    main()
