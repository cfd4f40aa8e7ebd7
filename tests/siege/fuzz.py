"""Fuzz the HTTP parser of a real server with the raw messages of tests/security/http_corpus.py.

    python tests/siege/fuzz.py --seconds 1200

Several threads send each message as it is, or with random bytes changed, removed, repeated or inserted, whole
or in pieces. The exit code is 1 if an answer is a 5xx, if a connection stays open without an answer, if
`/health` is not 200 within a second, if a process was started again, or if memory has doubled.
"""

import argparse
import contextlib
import random
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / name) for name in ("security", "server", "e2e")]

from http_corpus import CASES, KEY, Case  # noqa: E402
from serve_process import ServeProcess  # noqa: E402

EXACT_SHARE = 0.4
"""Part of the messages that are sent unchanged."""
QUIET_S = 1.0
"""Seconds without bytes from the server after which the client closes its side."""
HANG_S = 75.0
"""Seconds after that in which the server must close the connection: more than its longest timeout."""


class Results:
    """Counts of all threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.statuses: Counter[str] = Counter()
        self.problems: list[str] = []

    def add(self, status: str) -> None:
        with self.lock:
            self.statuses[status] += 1

    def report(self, problem: str) -> None:
        with self.lock:
            self.problems.append(problem)


def changed(message: bytes, draw: random.Random) -> bytes:
    """Return the message with one to four random changes."""
    data = bytearray(message)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(5):
            case 0 if at < len(data):
                data[at] = draw.randrange(256)
            case 1:
                del data[at : at + draw.randint(1, 8)]
            case 2:
                data[at:at] = draw.choice((b"\r\n", b"\0", b" ", b":", b"\n", b"0", b"\xff", b"chunked"))
            case 3:
                data[at:at] = data[at : at + draw.randint(1, 40)]
            case _:
                del data[at:]
    return bytes(data)


def send(port: int, pieces: list[bytes], results: Results, name: str) -> None:
    """Send a message, and read until the server closes the connection or is quiet. Then no more bytes follow,
    and the server must close it."""
    with socket.create_connection(("127.0.0.1", port), timeout=QUIET_S) as connection:
        received = b""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for piece in pieces:
                connection.sendall(piece)
            with contextlib.suppress(TimeoutError):
                while part := connection.recv(65536):
                    received += part
            with contextlib.suppress(OSError):  # the server may have closed the connection
                connection.shutdown(socket.SHUT_WR)
            connection.settimeout(HANG_S)
            while part := connection.recv(65536):
                received += part
    for line in received.split(b"\r\n"):
        if line.startswith(b"HTTP/1.1 ") and line[9:12].isdigit():
            status = line[9:12].decode()
            results.add(status)
            if status[0] == "5":
                results.report(f"{status} for {name}: {b''.join(pieces)[:400]!r}")
    if not received:
        results.add("closed")


def fuzz(port: int, seed: int, until: float, results: Results) -> None:
    draw = random.Random(seed)
    while time.monotonic() < until:
        case: Case = draw.choice(CASES)
        pieces = list(case.pieces)
        if draw.random() > EXACT_SHARE:
            pieces = [changed(b"".join(pieces), draw)]
            if draw.random() < 0.3 and (cut := draw.randrange(len(pieces[0]) + 1)):
                pieces = [pieces[0][:cut], pieces[0][cut:]]
        try:
            send(port, pieces, results, case.name)
        except OSError as error:
            results.report(f"{error!r} for {case.name}: {b''.join(pieces)[:400]!r}")


def probe(port: int, until: float, results: Results) -> float:
    """Ask for `/health` every second; return the longest time to an answer."""
    longest = 0.0
    while time.monotonic() < until:
        began = time.monotonic()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
                is_good = answer.status == 200
        except OSError as error:
            is_good = False
            results.report(f"/health: {error!r}")
        taken = time.monotonic() - began
        longest = max(longest, taken)
        if taken > 1 or not is_good:
            results.report(f"/health took {taken:.2f} s")
        time.sleep(1)
    return longest


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    results = Results()
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--api-key", KEY, "--max-model-len", "512")
        with ServeProcess(None, *flags, log=Path(folder) / "log") as server:
            server.until_healthy()
            members = server.members()
            memory = sum(member.memory_info().rss for member in members)
            until, port = time.monotonic() + args.seconds, server.port
            threads = [
                threading.Thread(target=fuzz, args=(port, args.seed + number, until, results))
                for number in range(args.threads)
            ]
            for thread in threads:
                thread.start()
            longest = probe(port, until, results)
            for thread in threads:
                thread.join()
            growth = sum(member.memory_info().rss for member in server.members()) / memory
            if {member.pid for member in server.members()} != {member.pid for member in members}:
                results.report("a process was started again")
            if growth > 2:
                results.report(f"memory is {growth:.2f} times that at the start")
    print(f"{sum(results.statuses.values())} answers: {dict(results.statuses.most_common())}")
    print(f"longest /health {longest:.2f} s, memory {growth:.2f} times that at the start")
    for problem in results.problems[:20]:
        print("PROBLEM", problem)
    print(f"{len(results.problems)} problems")
    return bool(results.problems)


if __name__ == "__main__":
    sys.exit(main())
