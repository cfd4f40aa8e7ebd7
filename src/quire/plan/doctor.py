"""`quire doctor`: checks this machine for a model, and names remedies."""

import argparse
import asyncio
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from quire.config.cli import FlagParser
from quire.config.env import Env
from quire.config.machine import Machine
from quire.errors import ConfigError, QuireError
from quire.logs import printable
from quire.memory import human
from quire.plan.estimate import PRECISIONS, STORED, Wanted, fits, stored_only
from quire.plan.model_sizes import subject
from quire.remote.http import HttpClient, ServerGone
from quire.system.platform import detect, hardware_threads, thread_advice
from quire.version import __version__

_TORCH = ((2, 11), (2, 14))
"""Lowest supported version of torch, and the lowest version above it that is not supported."""
_CONTEXT = 4096
_VERSION_TIMEOUT_S = 2.0
_CACHE_BYTES = 2 << 30
"""Free bytes below which the cache folder is too small even for a small model."""


class Finding(NamedTuple):
    """The result of one check."""

    state: Literal["ok", "warning", "broken"]
    what: str
    remedy: str = ""


def add_flags(parser: FlagParser) -> None:
    parser.add_argument(
        "model", nargs="?", default=None, help="as for `quire serve`; without it only the machine is checked"
    )
    parser.add_argument("--host", default=None, help="address that the server will listen on")
    parser.add_argument("--port", type=int, default=8000, help="port that the server will listen on")
    parser.add_argument("--api-key", nargs="*", default=None, help="as for `quire serve`")
    parser.add_argument("--allowed-origins", type=json.loads, default=None, help="as for `quire serve`")
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", "-pp", type=int, default=1)
    parser.add_argument("--data-parallel-size", "-dp", type=int, default=1)
    parser.add_argument("--api-server-count", type=int, default=None, help="default: one per engine")


def run(args: argparse.Namespace) -> int:
    findings = list(examine(args))
    for state, what, remedy in findings:
        print(f"{state:<8} {what}" + (f"\n         -> {remedy}" if remedy else ""))
    return 1 if any(finding.state == "broken" for finding in findings) else 0


def examine(args: argparse.Namespace) -> Iterator[Finding]:
    """Run all checks; a check that fails is a finding as well."""
    env = Env.read(os.environ)
    try:
        machine = detect()
    except QuireError as error:
        yield Finding("broken", "the device cannot be used", str(error))
        return
    checks: list[Callable[[], Iterator[Finding]]] = [
        _python,
        lambda: _device(machine),
        _compiler,
        lambda: _threads(machine, args),
        lambda: _folder(env.cache_root),
        _shared_memory,
        lambda: _port(args.port),
        lambda: _access(args, env),
        lambda: _model(machine, args, env),
    ]
    for check in checks:
        try:
            yield from check()
        except OSError as error:
            yield Finding("broken", str(error))


def _python() -> Iterator[Finding]:
    version = sys.version.split()[0]
    yield Finding("ok", f"Python {version}")
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        yield Finding("broken", "torch is not installed", "pip install 'torch>=2.11,<2.14'")
        return
    numbers = tuple(int(part) for part in torch.split("+")[0].split(".")[:2])
    if _TORCH[0] <= numbers < _TORCH[1]:
        yield Finding("ok", f"torch {torch}")
    else:
        yield Finding("broken", f"torch {torch}", "pip install 'torch>=2.11,<2.14'")


def _device(machine: Machine) -> Iterator[Finding]:
    count = f"{machine.num_devices} x " if machine.num_devices > 1 else ""
    memory = f"{human(machine.free_bytes)} of {human(machine.total_bytes)} free"
    name = f"{count}{machine.name} ({machine.device}), {memory}"
    if machine.device == "cuda" and machine.capability < (8, 0):
        at = ".".join(map(str, machine.capability))
        yield Finding("warning", f"{name}: capability {at}", "bfloat16 needs 8.0: use --dtype float16")
    elif machine.free_bytes < machine.total_bytes / 2:
        yield Finding(
            "warning", f"{name}: other processes use it", "stop them, or lower --gpu-memory-utilization"
        )
    else:
        yield Finding("ok", name)
    if machine.device == "cpu" and Path("/proc/driver/nvidia/version").exists():
        if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            yield Finding("warning", "CUDA_VISIBLE_DEVICES hides every GPU", "unset it to use them")
        else:
            yield Finding(
                "broken", "there is an NVIDIA driver, but no GPU can be used", "install torch built for CUDA"
            )


def _compiler() -> Iterator[Finding]:
    configured = os.environ.get("CC", "").split()
    names = configured[:1] or ["cc", "gcc", "clang"]
    compiler = next((name for name in names if shutil.which(name)), None)
    if compiler is None:
        yield Finding(
            "warning",
            f"no C compiler ({', '.join(names)})",
            "install gcc: without it a CPU computes much slower",
        )
    else:
        yield Finding("ok", f"C compiler: {shutil.which(compiler)}")


def _threads(machine: Machine, args: argparse.Namespace) -> Iterator[Finding]:
    advice = thread_advice(
        machine.device,
        num_threads=hardware_threads(),
        num_api=args.api_server_count or args.data_parallel_size,
        num_engines=args.data_parallel_size,
        num_workers=args.tensor_parallel_size * args.pipeline_parallel_size * args.data_parallel_size,
    )
    if advice is None:
        yield Finding("ok", f"{machine.num_cores} CPU cores")
    else:
        yield Finding("warning", advice, "give it more cores: 2 x (API servers + engine cores + GPUs)")


def _folder(root: Path) -> Iterator[Finding]:
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=root):
        pass
    free = shutil.disk_usage(root).free
    name = f"cache folder {root}: {human(free)} free"
    if free < _CACHE_BYTES:
        yield Finding("warning", name, "make room, or set QUIRE_CACHE_ROOT and HF_HOME to a larger disk")
    else:
        yield Finding("ok", name)


def _shared_memory() -> Iterator[Finding]:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return
    free = shutil.disk_usage(shm).free
    if free < 128 << 20:
        remedy = "start the container with --shm-size 2g: ranks and media pass through it"
        yield Finding("warning", f"/dev/shm has {human(free)} free", remedy)
    else:
        yield Finding("ok", f"/dev/shm: {human(free)} free")


def _port(port: int) -> Iterator[Finding]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError as error:
            if name := asyncio.run(_running_server(port)):
                yield Finding(
                    "warning", f"port {port}: {name} is running there", "stop it, or use another --port"
                )
                return
            yield Finding(
                "broken",
                f"port {port}: {error.strerror}",
                "stop the process that listens there, or use another --port",
            )
            return
    yield Finding("ok", f"port {port} is free")


async def _running_server(port: int) -> str | None:
    """Return the name of the model server on a port of this machine; None for any other program."""
    client = HttpClient(f"http://127.0.0.1:{port}", timeout_s=_VERSION_TIMEOUT_S)
    try:
        response = await client.request("GET", "/version")
        version = msgspec.json.decode(response.body, type=dict[str, str])["version"]
    except (ServerGone, msgspec.DecodeError, UnicodeDecodeError, KeyError):
        return None
    finally:
        client.close()
    kind = "a Quire server" if version == __version__ else "a vLLM server, or Quire of another version"
    return f"{kind} ({printable(version, 32)})"


def _access(args: argparse.Namespace, env: Env) -> Iterator[Finding]:
    """Check whether other machines or web pages can use the server."""
    from quire.server.http.exposure import exposures  # slow to import
    from quire.server.settings import make_settings

    flags = {name: getattr(args, name) for name in ("host", "api_key", "allowed_origins")}
    try:
        settings = make_settings(flags, env=env)
    except ConfigError as error:
        yield Finding("broken", "invalid access settings", str(error))
        return
    risks = exposures(settings)
    for what, remedy in risks:
        yield Finding("warning", what, remedy)
    if not risks:
        yield Finding(
            "ok", "an API key is set" if settings.keys else "only this machine can reach the server"
        )


def _model(machine: Machine, args: argparse.Namespace, env: Env) -> Iterator[Finding]:
    if args.model is None:
        return
    try:
        checkpoint, note = subject(args.model, env, advice="")
    except ConfigError as error:
        remedy = "give an existing directory, .gguf file or hub id, as for `quire serve`"
        yield Finding("broken", str(error), remedy)
        return
    if note:
        yield Finding("warning", f"model {args.model}", note)
    context = args.max_model_len or min(_CONTEXT, checkpoint.derived_max_len)
    precisions = (STORED,) if stored_only(checkpoint) else ("bf16", *PRECISIONS)
    for precision in dict.fromkeys(precisions):
        form = "as it is stored" if precision == STORED else f"in {precision}"
        wanted = Wanted(context, 1, {})
        ranks = {"tp": args.tensor_parallel_size, "pp": args.pipeline_parallel_size}
        fit = fits(checkpoint, machine, precision, wanted, **ranks)
        if not fit.why_not and fit.cache is not None:
            held = f"and leaves memory for a KV cache of {fit.cache.num_tokens:,} tokens"
            state: Literal["ok", "warning"] = "ok" if precision in ("bf16", STORED) else "warning"
            message = f"{args.model} fits {form} {held}"
            yield Finding(state, message, "" if state == "ok" else f"bf16 does not fit: use {precision}")
            return
    yield Finding(
        "broken",
        f"{args.model} does not fit, not even {form}: {fit.why_not}",
        f"quire plan {args.model} shows where it fits",
    )
