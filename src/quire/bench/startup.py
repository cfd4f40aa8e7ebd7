"""`quire bench startup`: the time of a fresh process until a model is ready, and until its first token.

A cold start has no compiled kernels, and none of the model's files in memory; a warm one has both."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from quire.bench.report import PERCENTILES
from quire.checkpoint.gguf import split_parts
from quire.checkpoint.hub import locate
from quire.config.args import check_args
from quire.config.cli import FlagParser, add_engine_flags, engine_args_from
from quire.config.env import Env
from quire.errors import ConfigError

NAMES = {"startup_time": "startup time", "import_time": "import time", "first_token_time": "first token"}


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds since the process was started."""

    import_time: float
    startup_time: float
    first_token_time: float
    rss_bytes: int


def add_flags(parser: FlagParser) -> None:
    group = parser.add_argument_group("Benchmark", "The starts to measure.")
    group.add_argument("--num-iters-cold", type=int, default=3, metavar="N", help="Cold starts. Default: 3.")
    group.add_argument(
        "--num-iters-warmup", type=int, default=1, metavar="N", help="Warm starts not counted. Default: 1."
    )
    group.add_argument("--num-iters-warm", type=int, default=3, metavar="N", help="Warm starts. Default: 3.")
    group.add_argument("--output-json", metavar="FILE", help="File to write the result to.")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    counts = (args.num_iters_cold, args.num_iters_warmup, args.num_iters_warm)
    if min(counts) < 0 or not args.num_iters_cold + args.num_iters_warm:
        raise ConfigError(f"there is nothing to measure with {counts} cold, warm-up and warm starts")
    engine_args = engine_args_from(args)
    files = model_files(engine_args)
    cold = _repeat("Cold starts", args.num_iters_cold, lambda: cold_start(engine_args, files))
    _repeat("Warmup starts", args.num_iters_warmup, lambda: start(engine_args, {}))
    warm = _repeat("Warm starts", args.num_iters_warm, lambda: start(engine_args, {}))
    result = summary("cold", cold) | summary("warm", warm)
    print("\n".join(lines(result)))
    if args.output_json:
        Path(args.output_json).write_text(json.dumps(result, indent=4) + "\n")
    return 0


def _repeat(title: str, count: int, once: Callable[[], Start]) -> list[Start]:
    with tqdm(range(count), desc=title, disable=not count) as bar:
        return [once() for _ in bar]


def start(engine_args: Mapping[str, Any], environment: Mapping[str, str]) -> Start:
    """Start a process with an engine and wait for its first token."""
    command = [sys.executable, "-m", "quire.bench.probe", json.dumps(dict(engine_args))]
    began = time.monotonic()
    done = subprocess.run(command, env=os.environ | dict(environment), capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(f"the engine did not start: {reason.removeprefix('quire.errors.')}")
    times = json.loads(done.stdout.splitlines()[-1])
    return Start(
        import_time=times["imported_at"] - began,
        startup_time=times["ready_at"] - began,
        first_token_time=times["first_token_at"] - began,
        rss_bytes=times["rss_bytes"],
    )


def cold_start(engine_args: Mapping[str, Any], files: Sequence[Path]) -> Start:
    for file in files:
        forget(file)
    with empty_caches() as environment:
        return start(engine_args, environment)


def model_files(engine_args: Mapping[str, Any]) -> list[Path]:
    """Return the model's files, downloading them if needed, which does not count as startup."""
    values = check_args(engine_args)
    path = locate(
        values.get("model"),
        revision=values.get("revision"),
        download_dir=values.get("download_dir"),
        token=values.get("hf_token"),
        cache_root=Env.read(os.environ).cache_root,
        load_format=values.get("load_format", "auto"),
        gguf_file=values.get("gguf_file"),
    )
    return split_parts(path) if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())


def forget(file: Path) -> None:
    """Drop a file from the page cache, so that the next reader takes it from the disk."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def empty_caches() -> Iterator[dict[str, str]]:
    """Yield environment variables for empty caches of compiled code; downloaded models stay."""
    models = Env.read(os.environ).cache_root / "models"
    with tempfile.TemporaryDirectory(prefix="quire-cold-") as folder:
        if models.is_dir():
            (Path(folder) / "models").symlink_to(models)
        yield {
            "QUIRE_CACHE_ROOT": folder,
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        }


def summary(kind: str, starts: Sequence[Start]) -> dict[str, Any]:
    """Return averages, percentiles and single values, under names like `avg_cold_` and `cold_`."""
    if not starts:
        return {}
    columns = {name: [asdict(entry)[name] for entry in starts] for name in (*NAMES, "rss_bytes")}
    result: dict[str, Any] = {}
    for name, values in columns.items():
        result[f"avg_{kind}_{name}"] = float(np.mean(values))
        result[f"{kind}_{name}s"] = values
        ranks = np.percentile(values, PERCENTILES).tolist()
        result[f"{kind}_{name}_percentiles"] = dict(zip(map(str, PERCENTILES), ranks, strict=True))
    return result


def lines(result: Mapping[str, Any]) -> list[str]:
    shown = []
    for kind in ("cold", "warm"):
        if f"avg_{kind}_startup_time" not in result:
            continue
        shown.append(f"{kind.capitalize()} start")
        for name, title in NAMES.items():
            shown.append(f"  Avg {title}: {result[f'avg_{kind}_{name}']:.3f} seconds")
        shown.append(f"  Avg memory: {result[f'avg_{kind}_rss_bytes'] / 2**20:.0f} MiB")
        for percent, seconds in result[f"{kind}_startup_time_percentiles"].items():
            shown.append(f"  {percent}% percentile startup time: {seconds:.3f} seconds")
    return shown
