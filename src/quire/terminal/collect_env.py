"""`quire collect-env`: describes a machine for a bug report. Imports neither torch nor a model."""

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from importlib import metadata

from quire.config.cli import FlagParser
from quire.config.machine import Machine
from quire.system.platform import detect
from quire.version import __version__

GIB = 1 << 30
PACKAGES = (
    *("torch", "triton", "numpy", "safetensors", "gguf", "tokenizers", "transformers", "huggingface_hub"),
    *("jinja2", "msgspec", "pyzmq", "fastapi", "uvicorn", "uvloop", "httptools", "prometheus_client"),
    *("llguidance", "pillow", "psutil", "ray", "flash-attn", "flashinfer-python"),
)
_RELEVANT = re.compile(
    r"QUIRE_|VLLM_|CUDA|NVIDIA_|NCCL_|TORCH|PYTORCH_|TRITON_|OMP_|MKL_|HF_|TOKENIZERS_|LD_"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_NO_SECRET = re.compile(r"TOKENIZERS_")
_LOGIN = re.compile(r"//[^/@\s]*@")


def add_flags(parser: FlagParser) -> None:
    parser.add_argument("--json", action="store_true", help="Print JSON instead of text.")


def run(args: argparse.Namespace) -> int:
    sections = collect(os.environ, detect())
    if args.json:
        print(json.dumps(sections, indent=2))
        return 0
    for title, entries in sections.items():
        print(f"{title}\n" + "\n".join(f"  {name:<20} {value}" for name, value in entries.items()) + "\n")
    return 0


def collect(environ: Mapping[str, str], machine: Machine) -> dict[str, dict[str, str]]:
    versions = {name: version for name in PACKAGES if (version := _version(name))}
    return {
        "Quire": {"version": __version__, "python": sys.version.split()[0]},
        "System": {
            "os": _os_name(),
            "kernel": f"{platform.system()} {platform.release()}",
            "architecture": platform.machine(),
            "libc": " ".join(platform.libc_ver()),
        },
        "Device": _device(machine),
        "Packages": versions,
        "Environment": relevant(environ),
    }


def relevant(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environ` that affect the engine, with the values of possible secrets
    masked."""
    return {
        name: "***" if _SECRET.search(name) and not _NO_SECRET.match(name) else _LOGIN.sub("//***@", value)
        for name, value in sorted(environ.items())
        if _RELEVANT.match(name)
    }


def _device(machine: Machine) -> dict[str, str]:
    entries = {
        "device": machine.device,
        "name": machine.name,
        "count": str(machine.num_devices),
        "memory": f"{machine.total_bytes / GIB:.1f} GiB, {machine.free_bytes / GIB:.1f} GiB free",
        "cpu cores": str(machine.num_cores),
        "native types": ", ".join(
            ["float32", *(["float16"] if machine.fp16 else []), *(["bfloat16"] if machine.bf16 else [])]
        ),
    }
    if machine.device == "cuda":
        entries["capability"] = ".".join(map(str, machine.capability))
        entries["driver"] = _first_line("/proc/driver/nvidia/version") or "unknown"
    return entries


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.platform())
    except OSError:
        return platform.platform()


def _first_line(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            return file.readline().strip()
    except OSError:
        return None
