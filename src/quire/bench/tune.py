"""`quire tune`: a sweep over the settings that trade latency for throughput, on this machine."""

import argparse
import itertools
import json
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

from quire.bench.plot import BLUE, RED, document
from quire.config.cli import FlagParser
from quire.errors import ConfigError

_UNITS = {"ms": 1.0, "s": 1000.0}
_START_S = 1800.0
"""Seconds that a server has to become healthy."""
_TOKENS, _SEQS, _CONCURRENCY = "512,2048,8192", "32,128,256", "1,8,32,128"


class Setting(NamedTuple):
    """Scheduler settings of a server."""

    max_num_batched_tokens: int
    max_num_seqs: int
    ttft_ms: float = 0.0
    """Latency target of the first token in milliseconds; `itl_ms` is that between tokens. 0: no target."""
    itl_ms: float = 0.0

    @property
    def flags(self) -> list[str]:
        tokens, seqs, ttft_ms, itl_ms = self
        static = [f"--max-num-batched-tokens={tokens}", f"--max-num-seqs={seqs}"]
        targets = [f"--slo-ttft-ms={ttft_ms:g}", f"--slo-itl-ms={itl_ms:g}", "--slo-max-wait=0"]
        return [*static, *targets] if ttft_ms else static


class TunePoint(NamedTuple):
    """Results of one setting at one concurrency."""

    setting: Setting
    concurrency: int
    ttft_ms: float
    """95th percentile of the time to first token, in milliseconds; `itl_ms` is that of the inter-token
    latency."""
    itl_ms: float
    tok_s: float
    good_s: float = 0.0
    """Requests per second whose first token and mean time per output token keep the limits."""

    def limit(self, ttft_ms: float, itl_ms: float) -> str:
        """Return the limits that the point does not keep, as text."""
        missed = [("first tokens", self.ttft_ms > ttft_ms), ("times between tokens", self.itl_ms > itl_ms)]
        return " and ".join(name for name, is_missed in missed if is_missed)

    def keeps(self, ttft_ms: float, itl_ms: float) -> bool:
        return self.ttft_ms <= ttft_ms and self.itl_ms <= itl_ms


def add_flags(parser: FlagParser) -> None:
    parser.add_argument("model", nargs="?", default="default", help="as for `quire serve`")
    parser.add_argument(
        "--ttft", default="500ms", help="limit of the time to first token (p95); default 500ms"
    )
    parser.add_argument("--itl", default="50ms", help="limit of the inter-token latency (p95)")
    parser.add_argument("--max-num-batched-tokens", default=_TOKENS, help=f"values to try; default {_TOKENS}")
    parser.add_argument("--max-num-seqs", default=_SEQS, help=f"values to try; default {_SEQS}")
    parser.add_argument("--concurrency", default=_CONCURRENCY, help=f"values to try; default {_CONCURRENCY}")
    parser.add_argument("--input-len", type=int, default=512, help="tokens of a prompt; default 512")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of an answer; default 128")
    parser.add_argument("--requests", type=int, default=4, help="requests per concurrent client; default 4")
    parser.add_argument(
        "--journal",
        type=Path,
        default=Path("tune.jsonl"),
        help="file of results, one per line; known points are not measured again",
    )
    parser.add_argument("--svg", type=Path, default=Path("tune.svg"), help="file of the SVG chart")
    parser.add_argument("--serve-args", default="", help="additional flags of `quire serve`, in one string")


def run(args: argparse.Namespace) -> int:
    limits = _milliseconds(args.ttft), _milliseconds(args.itl)
    candidates = itertools.product(_numbers(args.max_num_batched_tokens), _numbers(args.max_num_seqs))
    settings = [Setting(tokens, seqs) for tokens, seqs in candidates if tokens >= seqs]
    settings.append(Setting(*max(settings)[:2], *limits))
    points = sweep(args, settings, _numbers(args.concurrency))
    args.svg.write_text(pareto_chart(points, *limits), encoding="utf-8")
    good = [point for point in points if point.keeps(*limits)]
    for point in sorted(points, key=lambda point: -point.tok_s):
        mark = "*" if point in good else " "
        print(
            f"{mark} {_title(point):<44} {point.ttft_ms:9.1f} {point.itl_ms:8.1f} {point.tok_s:10,.0f} tok/s "
            f"{point.good_s:7.2f} {point.limit(*limits)}"
        )
    print(
        f"(p95 of TTFT and ITL in ms; requests per second that keep {args.ttft} and {args.itl}; what is too "
        f"late; chart: {args.svg})"
    )
    if not good:
        print(f"Nothing keeps {args.ttft} and {args.itl}: try fewer concurrent requests or a faster machine.")
        return 1
    best = max(good, key=lambda point: point.tok_s)
    words = ["quire", "serve", args.model, *best.setting.flags, *shlex.split(args.serve_args)]
    print(f"Best within {args.ttft} and {args.itl}, at {best.concurrency} at once:\n  {shlex.join(words)}")
    return 0


def sweep(args: argparse.Namespace, settings: Sequence[Setting], levels: Sequence[int]) -> list[TunePoint]:
    """Measure each setting at each concurrency (`levels`). Points in the journal are not measured again; new
    ones are appended to it at once."""
    key = [args.model, args.input_len, args.output_len, args.requests, args.serve_args]
    known = {(point.setting, point.concurrency): point for point in _journal(args.journal, key)}
    total, done = len(settings) * len(levels), 0
    for setting in settings:
        missing = [level for level in levels if (setting, level) not in known]
        done += len(levels) - len(missing)
        if not missing:
            continue
        with served(args.model, [*setting.flags, *shlex.split(args.serve_args)]) as url:
            for level in missing:
                done += 1
                print(f"[{done}/{total}] {' '.join(setting.flags)}, {level} at once ...", file=sys.stderr)
                point = TunePoint(setting, level, *_measure(args, url, level))
                known[setting, level] = point
                with args.journal.open("a", encoding="utf-8") as journal:
                    journal.write(json.dumps({"of": key, "point": point}) + "\n")
    return [known[setting, level] for setting in settings for level in levels]


def _journal(path: Path, key: list[Any]) -> Iterator[TunePoint]:
    """Yield the points that earlier runs with the same `key` (model and workload) have measured; truncated
    lines are skipped."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if entry.get("of") == key:
            setting, *rest = entry["point"]
            yield TunePoint(Setting(*setting), *rest)


@contextmanager
def served(model: str, flags: Sequence[str]) -> Iterator[str]:
    """Run a server with these flags; yield its URL when it is healthy, and stop it afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    place = ("--host", "127.0.0.1", "--port", str(port))
    words = [sys.executable, "-m", "quire", "serve", model, *place, *flags]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait_until_healthy(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def _wait_until_healthy(url: str, process: "subprocess.Popen[bytes]", log: Any) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            log.seek(0)
            log_lines = log.read().decode(errors="replace").strip().splitlines()
            last = log_lines[-1] if log_lines else "without output"
            raise ConfigError(f"the server ended while it was starting: {last}")
        try:
            with urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (URLError, OSError):
            time.sleep(0.2)
    raise ConfigError(f"the server is not healthy after {_START_S:g} s")


def _measure(args: argparse.Namespace, url: str, level: int) -> tuple[float, float, float, float]:
    """Return TTFT, ITL, tokens per second and good requests per second, measured by `quire bench serve`."""
    limits = (f"ttft:{_milliseconds(args.ttft):g}", f"tpot:{_milliseconds(args.itl):g}")
    with tempfile.TemporaryDirectory() as folder:
        words = [
            *(sys.executable, "-m", "quire", "bench", "serve", "--base-url", url, "--ignore-eos"),
            *("--random-input-len", str(args.input_len), "--random-output-len", str(args.output_len)),
            *("--num-prompts", str(args.requests * level), "--max-concurrency", str(level)),
            *("--percentile-metrics", "ttft,itl", "--metric-percentiles", "95", "--save-result"),
            *("--goodput", *limits, "--result-dir", folder, "--result-filename", "result.json"),
        ]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(f"quire bench serve failed: {done.stderr.strip()[-300:]}")
        result = json.loads((Path(folder) / "result.json").read_text())
    if result["failed"]:
        raise ConfigError(f"{result['failed']} of {args.requests * level} requests failed at {level} at once")
    rates = (result["output_throughput"], result["request_goodput"])
    return result["p95_ttft_ms"], result["p95_itl_ms"], *rates


def _title(point: TunePoint) -> str:
    tokens, seqs, ttft_ms, _ = point.setting
    return f"tokens {tokens}, seqs {seqs}{', targets' if ttft_ms else ''}, {point.concurrency} at once"


def _milliseconds(text: str) -> float:
    unit = "ms" if text.endswith("ms") else "s"
    try:
        value = float(text.removesuffix(unit)) * _UNITS[unit]
    except ValueError:
        raise ConfigError(f"{text!r} is not a time such as 500ms or 0.5s") from None
    if not value > 0:
        raise ConfigError(f"{text!r} must be above 0")
    return value


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"{text!r} is not a list of numbers such as 512,2048")
    return [int(part) for part in parts]


def frontier(points: Sequence[TunePoint]) -> list[TunePoint]:
    """Return the Pareto-optimal points of latency and throughput, the lowest inter-token latency first."""
    best: list[TunePoint] = []
    for point in sorted(points, key=lambda point: (point.itl_ms, -point.tok_s)):
        if not best or point.tok_s > best[-1].tok_s:
            best.append(point)
    return best


def pareto_chart(points: Sequence[TunePoint], ttft_ms: float, itl_ms: float) -> str:
    """Return an SVG chart of tokens per second over the time between tokens, on a log scale. Filled dots
    meet both limits in milliseconds; a line joins the Pareto-optimal points."""
    width, height, left, bottom, edge = 760, 440, 70, 50, 24
    low = math.log10(max(min(point.itl_ms for point in points), 0.01) * 0.8)
    high = math.log10(max(*(point.itl_ms for point in points), itl_ms) * 1.25)
    top = max(point.tok_s for point in points) * 1.1

    def place(x_ms: float, tok_s: float) -> tuple[float, float]:
        share = (math.log10(max(x_ms, 0.01)) - low) / (high - low)
        x = left + share * (width - left - edge)
        return round(x, 1), round(height - bottom - tok_s / top * (height - bottom - edge), 1)

    limit = place(itl_ms, 0)[0]
    line = " ".join(f"{x},{y}" for x, y in (place(point.itl_ms, point.tok_s) for point in frontier(points)))
    parts = [
        f'<path d="M{left} {edge}V{height - bottom}H{width - edge}" fill="none" stroke="#444"/>',
        f'<text x="{left}" y="{height - 14}">ms between tokens, p95 (dashed: the limit)</text>',
        f'<text x="12" y="16">tokens per second, up to {top / 1.1:,.0f}</text>',
        f'<path d="M{limit} {edge}V{height - bottom}" stroke="{RED}" stroke-dasharray="5 4"/>',
        f'<polyline points="{line}" fill="none" stroke="{BLUE}"/>',
    ]
    for point in points:
        x, y = place(point.itl_ms, point.tok_s)
        fill = BLUE if point.keeps(ttft_ms, itl_ms) else "white"
        label = f"{point.concurrency} concurrent: {point.ttft_ms:.0f} ms first, {point.itl_ms:.1f} ms between"
        dot = f'<circle cx="{x}" cy="{y}" r="5" fill="{fill}" stroke="{BLUE}">'
        parts.append(f"{dot}<title>{label}</title></circle>")
        parts.append(f'<text x="{x + 7}" y="{y + 4}" fill="#666">{point.concurrency}</text>')
    return document(width, height, parts)
