"""CPU instruction sets of the C kernels (QUIRE_CPU_KERNELS), and whether this CPU supports them.

| path | instructions | compiled with |
|---|---|---|
| `native` | all that the CPU supports | `-march=native` |
| `avx512` | AVX-512 without VNNI | `-march=x86-64-v4` |
| `avx2` | AVX2, FMA and F16C | `-march=x86-64-v3` |
| `c` | baseline of the architecture: plain C | `-march=x86-64`; on ARM, without NEON |
| `torch` | no C kernels | |
"""

import platform
import re
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ConfigError

CPU_KERNELS = ("native", "avx512", "avx2", "c", "torch")
_X86, _ARM = ("x86_64", "amd64"), ("aarch64", "arm64")
_AVX2 = ("avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe")
"""Linux names of the features of x86-64-v3; `abm` includes lzcnt."""
_AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", *_AVX2)
_REMEDY = (
    "unset QUIRE_CPU_KERNELS for all that the CPU supports, or set it to c or torch, which run on every CPU"
)


@dataclass(frozen=True, slots=True)
class Cpu:
    """Architecture of a CPU, and its features by their Linux names."""

    machine: str
    features: frozenset[str] | None
    """Linux names of the features; None if the system does not list them."""

    @classmethod
    def read(cls, info: Path = Path("/proc/cpuinfo")) -> "Cpu":
        """Read the CPU of this machine."""
        try:
            match = re.search(r"^(?:flags|Features)\s*:(.*)$", info.read_text(), re.MULTILINE)
        except OSError:
            match = None
        return cls(platform.machine().lower(), frozenset(match[1].split()) if match else None)


def check_cpu_kernels(path: str, cpu: Cpu) -> None:
    """Raise if `cpu` does not support the instructions of `path`, a value of QUIRE_CPU_KERNELS."""
    if path not in ("avx2", "avx512"):
        return
    if cpu.machine not in _X86:
        raise ConfigError(
            f"QUIRE_CPU_KERNELS={path}: this CPU is {cpu.machine}, and {path} is for x86; {_REMEDY}"
        )
    if cpu.features is None:
        raise ConfigError(
            f"QUIRE_CPU_KERNELS={path}: this system does not list the CPU's features; {_REMEDY}"
        )
    needed = _AVX2 if path == "avx2" else _AVX512
    if lacking := [name for name in needed if name not in cpu.features]:
        raise ConfigError(f"QUIRE_CPU_KERNELS={path}: this CPU has no {', '.join(lacking)}; {_REMEDY}")


def paths_of(cpu: Cpu) -> list[str]:
    """Return the values of QUIRE_CPU_KERNELS that `cpu` supports."""
    present = []
    for path in CPU_KERNELS:
        try:
            check_cpu_kernels(path, cpu)
        except ConfigError:
            continue
        present.append(path)
    return present


def compiler_flags(path: str, cpu: Cpu) -> tuple[str, ...]:
    """Return the compiler flags for exactly the instructions of `path`, a value of QUIRE_CPU_KERNELS."""
    assert path != "torch", "there is nothing to compile"
    check_cpu_kernels(path, cpu)
    if path == "c" and cpu.machine in _X86:
        return ("-march=x86-64",)
    if path == "c":
        without_neon = ("-U__ARM_NEON", "-U__ARM_FEATURE_DOTPROD") if cpu.machine in _ARM else ()
        return ("-march=native", *without_neon)
    return ({"native": "-march=native", "avx2": "-march=x86-64-v3", "avx512": "-march=x86-64-v4"}[path],)
