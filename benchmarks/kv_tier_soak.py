"""Run agent traffic on a server with a KV cache on disk while requests are aborted and its core is killed.

    python benchmarks/kv_tier_soak.py [--seconds 900] [--kill-every 90] [--serve "MODEL ..."]

Sessions of `quire bench serve --dataset-name agent` come back after their prefixes have left the small cache
of the packaged model, or of the model of `quire serve MODEL ...`. Meanwhile probes with known prefixes are
sent, streams are aborted, and the engine core is killed with SIGKILL. At the end a server without a prefix
cache answers the same probes. Prints a table: wrong answers, requests by tier, kills, and the resident memory
of each process over its life.
"""

import argparse
import contextlib
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import psutil
from server_process import CALL_S, Server

TIE = 0.1
"""Difference of two logprobs up to which rounding may swap their order: a batch changes the order of sums."""
CACHE = ("--num-gpu-blocks-override", "161", "--max-model-len", "1024", "--max-num-seqs", "8")
AGENT = (
    *("--dataset-name", "agent", "--agent-num-sessions", "3", "--agent-turns", "3:4", "--request-rate", "1"),
    *("--agent-first-len", "200", "--agent-last-len", "400:600", "--agent-pause-median", "0.2"),
    *("--agent-pause-p99", "1", "--agent-input-per-output", "40"),
)


def processes_of(server: Server) -> dict[str, psutil.Process]:
    """Return the API process (`api`) and, if it runs, the engine core (`core`) of a server."""
    found = {"api": psutil.Process(server.process.pid)}
    for child in found["api"].children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.name().startswith("quire:EngineC"):
                found["core"] = child
    return found


class Soak:
    """The traffic on one server in a soak test, with the answers, counts and memory use that it led to."""

    def __init__(self, server: Server, seconds: float, seed: int) -> None:
        self.server, self.seconds = server, seconds
        self.began = time.monotonic()
        self.draw = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.answers: list[tuple[list[int], list[int]]] = []
        """Token ids of the prompt and of the answer of each probe."""
        self.memory: list[dict[str, tuple[int, int]]] = []
        """Process id and resident bytes of each process by name, one entry per sample."""
        self.lock = threading.Lock()
        self.prompts = [
            [(family * 7919 + at * 104729) % 40_000 + 100 for at in range(length)]
            for family in range(6)
            for length in (117, 250, 391)
        ]

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self.began > self.seconds

    def count(self, name: str, number: int = 1) -> None:
        with self.lock:
            self.counts[name] += number

    def send_sessions(self) -> None:
        number = 0
        while not self.is_over:
            command = [
                sys.executable,
                "-m",
                "quire",
                "bench",
                "serve",
                "--port",
                str(self.server.port),
                *AGENT,
            ]
            bench = subprocess.Popen(
                [*command, "--seed", str(number % 3)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            while bench.poll() is None and not self.is_over:
                time.sleep(0.5)
            bench.terminate()
            printed, _ = bench.communicate()
            self.count("agent rounds")
            for line in printed.splitlines():
                name, _, value = line.partition(":")
                if name.strip() in ("Successful requests", "Failed requests"):
                    self.count(f"agent requests, {name.split()[0].lower()}", int(value))
            number += 1

    def send_probes(self) -> None:
        while not self.is_over:
            prompt = self.draw.choice(self.prompts)
            try:
                body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
                answer = self.server.call("/v1/completions", body)
            except (OSError, urllib.error.HTTPError) as error:
                self.count(f"probes that failed ({type(error).__name__})")
                time.sleep(1.0)
                continue
            self.answers.append((prompt, answer["choices"][0]["token_ids"]))
            details = answer["usage"].get("prompt_tokens_details") or {}
            tiers = details.get("cached_tokens_by_tier") or {}
            self.count("probes")
            self.count("probes with blocks from disk", bool(tiers.get("disk")))
            self.count("tokens from disk in probes", tiers.get("disk", 0))

    def send_aborts(self) -> None:
        while not self.is_over:
            body = {"prompt": self.draw.choice(self.prompts), "max_tokens": 200, "stream": True}
            request = self.server.request("/v1/completions", body)
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=CALL_S) as answer:
                for _ in range(self.draw.randrange(1, 8)):
                    answer.readline()
            self.count("aborted streams")
            time.sleep(1.0)

    def kill_cores(self, every_s: float) -> None:
        after = self.began + every_s
        while not self.is_over:
            time.sleep(1.0)
            core = processes_of(self.server).get("core")
            if core is not None and time.monotonic() > after:
                os.kill(core.pid, signal.SIGKILL)
                self.count("kills of the core")
                after = time.monotonic() + every_s

    def watch_memory(self) -> None:
        while not self.is_over:
            with contextlib.suppress(psutil.Error):
                processes = processes_of(self.server).items()
                self.memory.append({name: (one.pid, one.memory_info().rss) for name, one in processes})
            time.sleep(2.0)

    def run(self, kill_every_s: float) -> None:
        threads = [
            threading.Thread(target=target, args=args)
            for target, args in (
                (self.send_sessions, ()),
                (self.send_probes, ()),
                (self.send_probes, ()),
                (self.send_aborts, ()),
                (self.kill_cores, (kill_every_s,)),
                (self.watch_memory, ()),
            )
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def lives(self, name: str) -> str:
        """Return the resident memory of each process of this name, in MiB: the peak of each third of its
        life."""
        by_pid: dict[int, list[int]] = {}
        for processes in self.memory:
            if name in processes:
                pid, num_bytes = processes[name]
                by_pid.setdefault(pid, []).append(num_bytes >> 20)
        peaks = []
        for sizes in by_pid.values():
            third = -(-len(sizes) // 3)
            parts = (sizes[first : first + third] for first in range(0, len(sizes), third))
            peaks.append(" / ".join(str(max(part)) for part in parts))
        return ", ".join(peaks)


def check(soak: Soak, log: Path, flags: list[str]) -> None:
    """Compare all answers with those of a server without a prefix cache."""
    server = Server(log, *flags, *CACHE, "--no-enable-prefix-caching")
    expected: dict[int, list[int]] = {}
    for prompt, tokens in soak.answers:
        key = soak.prompts.index(prompt)
        if key not in expected:
            body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
            expected[key] = server.call("/v1/completions", body)["choices"][0]["token_ids"]
        if tokens == expected[key]:
            soak.count("answers that are equal")
        elif is_tie(server, prompt, tokens, expected[key]):
            soak.count("answers with another token of equal probability")
        else:
            soak.count("wrong answers")
    server.stop()


def is_tie(server: Server, prompt: list[int], tokens: list[int], expected: list[int]) -> bool:
    """Whether the first token that differs is as likely as the expected one."""
    at = next((at for at, pair in enumerate(zip(tokens, expected, strict=False)) if pair[0] != pair[1]), -1)
    if at < 0:
        return False
    logprobs = []
    for token in (tokens[at], expected[at]):
        body = {"prompt": [*prompt, *expected[:at], token], "max_tokens": 1, "temperature": 0}
        scores = server.call("/v1/completions", body | {"prompt_logprobs": 1})["choices"][0][
            "prompt_logprobs"
        ]
        logprobs.append(scores[-1][str(token)]["logprob"])
    return abs(logprobs[0] - logprobs[1]) < TIE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--kill-every", type=float, default=90.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--serve", default="", help="arguments of quire serve, such as a model")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log, cache = Path(folder) / "log", Path(folder) / "kv"
        tiers = ("--kv-offloading-dir", str(cache), "--kv-offloading-dir-size", "1")
        flags = shlex.split(args.serve)
        server = Server(log, *flags, *CACHE, *tiers, "--enable-prompt-tokens-details")
        try:
            soak = Soak(server, args.seconds, args.seed)
            soak.run(args.kill_every)
            lines = [line for line in server.call("/metrics").splitlines() if line.startswith("vllm:")]
        finally:
            server.stop()
        size = sum(path.stat().st_size for path in cache.rglob("*.kv"))
        check(soak, log, flags)
        text = log.read_text(errors="replace")
    print("| | |\n|---|--:|")
    print(f"| seconds of traffic | {args.seconds:.0f} |")
    for name, number in sorted(soak.counts.items()):
        print(f"| {name} | {number:,} |")
    print(f"| wrong answers in all | {soak.counts['wrong answers']} |")
    for name in ("api", "core"):
        print(f"| MiB of each {name} process, in thirds of its life | {soak.lives(name)} |")
    print(f"| files at the end, MiB (at most 1024) | {size / 2**20:.0f} |")
    print(f"| tracebacks in the log | {text.count('Traceback')} |")
    for line in lines:
        if "external_kv_transfer" in line or "tiering_" in line or "offload_store_time" in line:
            print("   ", line)


if __name__ == "__main__":
    main()
