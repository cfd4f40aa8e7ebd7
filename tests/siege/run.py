"""A siege: three well-behaved keys with steady streams, beside one hostile key that sends expensive requests.

    make siege                                   # ten minutes on a CPU
    python tests/siege/run.py --seconds 5 --only grammars "slow clients"

The server is `quire serve` with a file of keys. First only the good clients run; then the hostile client goes
through all attacks of attacks.py while the good ones continue; then the server rests. The bars: the 99th
percentile of the time between tokens of the good clients is at most three times what it was without the
attacker, `/health` answers within 250 ms at the 99th percentile, no process was started again, and memory is
flat after the first round of attacks. The exit code is 1 if one of them is missed.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
GOOD = ("alice", "bob", "carol")
HOSTILE = "mallory"
MAX_ITL_RATIO = 3.0
MAX_HEALTH_S = 0.25
MAX_GROWTH = 1.10
"""Memory of all processes after the last round of attacks, relative to that after the first."""
START_S = 300.0


@dataclass
class Samples:
    """Durations with the time at which each was measured."""

    at: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def add(self, seconds: float) -> None:
        self.at.append(time.monotonic())
        self.seconds.append(seconds)

    def between(self, began: float, ended: float) -> list[float]:
        pairs = zip(self.at, self.seconds, strict=True)
        return sorted(seconds for at, seconds in pairs if began <= at < ended)


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile of sorted values; nan if there are none."""
    return values[min(int(len(values) * share), len(values) - 1)] if values else float("nan")


# ---- the server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """`quire serve` with a key for each client."""

    def __init__(self, folder: Path, flags: Sequence[str]) -> None:
        keys = [{"name": name, "key": f"sk-{name}"} for name in (*GOOD, HOSTILE)]
        (folder / "keys.json").write_text(json.dumps({"keys": keys}))
        self.port, self.log = free_port(), folder / "log"
        command = [sys.executable, "-m", "quire", "serve", *flags, "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--api-key", str(folder / "keys.json")]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)

    def members(self) -> list[psutil.Process]:
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def memory(self) -> int:
        """Return the bytes of all server processes that no other process shares, without the KV cache: its
        size is fixed, and each block takes memory when it is first used."""
        cached = sum(
            mapping.private_dirty
            for process in self.members()
            for mapping in process.memory_maps()
            if mapping.path.startswith("/dev/zero")
        )
        return sum(int(process.memory_full_info().uss) for process in self.members()) - cached

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return -1


# ---- the well-behaved clients


async def request(
    port: int, head: str, body: bytes = b""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    return reader, writer


async def stream(port: int, key: str, gaps: Samples, first: Samples, problems: list[str]) -> None:
    """Stream one answer after the other; the time between tokens goes into `gaps`."""
    question = {"messages": [{"role": "user", "content": "Tell me a long story about a sailor."}]}
    options = {"stream": True, "max_tokens": 64, "ignore_eos": True, "temperature": 0.8}
    body = json.dumps(question | options).encode()
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: x", f"Authorization: Bearer sk-{key}"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", "Connection: close", "", ""]
    while True:
        sent = time.monotonic()
        try:
            reader, writer = await request(port, "\r\n".join(lines), body)
            status, last, is_done = await reader.readline(), 0.0, False
            async for line in reader:
                if line.startswith(b"data: {"):
                    now = time.monotonic()
                    (gaps.add(now - last) if last else first.add(now - sent))
                    last = now
                    if b'"error"' in line:
                        problems.append(line.decode())
                is_done = is_done or line.startswith(b"data: [DONE]")
            if b" 200 " not in status or not is_done:
                problems.append(f"{key}: {status.decode().strip()}, complete: {is_done}")
            writer.close()
        except OSError as error:
            problems.append(f"{key}: {error}")
        await asyncio.sleep(0.05)


def waited_for_cpu() -> float:
    """Return the seconds in which this process was ready to run, and the CPUs ran others."""
    path = Path("/proc/self/schedstat")
    return int(path.read_text().split()[1]) / 1e9 if path.exists() else 0.0


async def probe(port: int, health: Samples, problems: list[str]) -> None:
    """Request `/health` ten times per second, each time on a new connection. The time in which this process
    itself waited for a CPU does not count."""
    while True:
        began, waited = time.monotonic(), waited_for_cpu()
        try:
            reader, writer = await request(
                port, "GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            )
            status = await asyncio.wait_for(reader.readline(), 30)
            writer.close()
            if b" 200 " not in status:
                problems.append(f"/health: {status.decode().strip()}")
        except (OSError, TimeoutError) as error:
            problems.append(f"/health: {error!r}")
        health.add(time.monotonic() - began - (waited_for_cpu() - waited))
        await asyncio.sleep(0.1)


async def until_healthy(server: Server) -> None:
    for _ in range(int(START_S * 5)):
        if server.process.poll() is not None:
            break
        try:
            reader, writer = await request(server.port, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            status = await reader.readline()
            writer.close()
            if b" 200 " in status:
                return
        except OSError:
            pass
        await asyncio.sleep(0.2)
    raise SystemExit(f"the server did not start:\n{server.log.read_text(errors='replace')}")


# ---- the siege


async def siege(server: Server, options: argparse.Namespace) -> bool:
    await until_healthy(server)
    gaps, first, health, problems = Samples(), Samples(), Samples(), list[str]()
    clients = [asyncio.create_task(stream(server.port, key, gaps, first, problems)) for key in GOOD]
    clients.append(asyncio.create_task(probe(server.port, health, problems)))
    await asyncio.sleep(5)  # the first answers compile and fill caches
    pids = sorted(process.pid for process in server.members())
    began = time.monotonic()
    await asyncio.sleep(options.baseline)
    quiet = gaps.between(began, time.monotonic())
    quiet_health = health.between(began, time.monotonic())
    print(
        f"without the attacker: p99 ITL {1e3 * percentile(quiet, 0.99):.0f} ms, p99 /health "
        f"{1e3 * percentile(quiet_health, 0.99):.0f} ms, {len(quiet)} tokens",
        flush=True,
    )
    attacks, memory = await attack(server, options, gaps, health)
    await asyncio.sleep(options.rest)
    memory.append(server.memory())
    for client in clients:
        client.cancel()
    return judge(server, quiet, attacks, gaps, health, problems, pids, memory)


async def attack(
    server: Server, options: argparse.Namespace, gaps: Samples, health: Samples
) -> tuple[list[dict[str, Any]], list[int]]:
    """Run all attacks `--rounds` times; return a table row for each, and the memory after every round."""
    attacks: list[dict[str, Any]] = []
    memory: list[int] = []
    arguments = ["127.0.0.1", str(server.port), f"sk-{HOSTILE}", str(options.seconds), "1", *options.only]
    print(f"{'attack':<22}{'p99 ITL':>9}{'max ITL':>9}{'p99 health':>12}{'max health':>12}  statuses")
    for _ in range(options.rounds):
        child = await asyncio.create_subprocess_exec(
            sys.executable, str(HERE / "attacks.py"), *arguments, stdout=asyncio.subprocess.PIPE
        )
        assert child.stdout is not None
        async for line in child.stdout:
            entry = json.loads(line)
            window = entry["began"], entry["ended"]
            itl, answers = gaps.between(*window), health.between(*window)
            times = [
                percentile(itl, 0.99),
                percentile(itl, 1),
                percentile(answers, 0.99),
                percentile(answers, 1),
            ]
            shown = "".join(
                f"{1e3 * value:>{width}.0f}" for value, width in zip(times, (9, 9, 12, 12), strict=True)
            )
            print(f"{entry['name']:<22}{shown}  {entry['statuses']}", flush=True)
            attacks.append(entry)
        if await child.wait():
            raise SystemExit("the hostile client failed")
        memory.append(server.memory())
    return attacks, memory


def judge(
    server: Server,
    quiet: list[float],
    attacks: list[dict[str, Any]],
    gaps: Samples,
    health: Samples,
    problems: list[str],
    pids: list[int],
    memory: list[int],
) -> bool:
    """Print each bar with its value; return whether all are met."""
    window = attacks[0]["began"], attacks[-1]["ended"]
    ratio = percentile(gaps.between(*window), 0.99) / percentile(quiet, 0.99)
    slowest = percentile(health.between(*window), 0.99)
    now = sorted(process.pid for process in server.members())
    failed = sum(
        count for entry in attacks for status, count in entry["statuses"].items() if status[0] == "5"
    )
    growth = memory[-1] / memory[0]
    bars = [
        (
            f"p99 ITL of the good keys is {ratio:.2f} times that without the attacker (bar 3)",
            ratio <= MAX_ITL_RATIO,
        ),
        (f"p99 of /health is {1e3 * slowest:.0f} ms (bar 250)", slowest <= MAX_HEALTH_S),
        (f"{len(problems)} answers of good keys or of /health failed: {problems[:3]}", not problems),
        (f"processes before {pids} and after {now}", pids == now),
        (f"{failed} answers to the attacker were 5xx", not failed),
        (
            f"memory after the rounds and at rest: {[number >> 20 for number in memory]} MiB",
            growth <= MAX_GROWTH,
        ),
    ]
    for text, is_met in bars:
        print("met   " if is_met else "MISSED", text)
    return all(is_met for _, is_met in bars)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10, help="of each attack")
    parser.add_argument("--rounds", type=int, default=2, help="how often all attacks are made")
    parser.add_argument("--baseline", type=float, default=60, help="seconds without the attacker")
    parser.add_argument("--rest", type=float, default=15, help="seconds after the last attack")
    parser.add_argument("--only", nargs="*", default=[], help="names of attacks")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="further flags of quire serve")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--max-num-seqs", "8", "--max-model-len", "2048", "--max-num-batched-tokens", "256"]
        server = Server(Path(folder), [*flags, *options.flags])
        try:
            is_good = asyncio.run(siege(server, options))
        finally:
            code = server.stop()
            lines = server.log.read_text(errors="replace").splitlines()
            problems = [line for line in lines if "INFO" not in line]
            print(f"the server ended with {code}; its log without INFO:", *problems[-60:], sep="\n")
    return 0 if is_good and not code else 1


if __name__ == "__main__":
    sys.exit(main())
