"""Tests of QUIRE_CPU_KERNELS: the instruction sets of the C kernels, and the CPUs that have them."""

from pathlib import Path

import pytest

from quire.config.cpu_kernels import CPU_KERNELS, Cpu, check_cpu_kernels, compiler_flags, paths_of
from quire.config.env import Env
from quire.errors import ConfigError

HASWELL = "fma movbe f16c abm bmi1 avx2 bmi2"
SKYLAKE = f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl"


def x86(features: str) -> Cpu:
    return Cpu("x86_64", frozenset(features.split()))


ARM = Cpu("aarch64", frozenset(["asimd", "asimddp"]))


@pytest.mark.parametrize(
    ("cpu", "paths"),
    [
        (x86(SKYLAKE), ["native", "avx512", "avx2", "c", "torch"]),
        (x86(HASWELL), ["native", "avx2", "c", "torch"]),
        (x86("sse4_2"), ["native", "c", "torch"]),
        (ARM, ["native", "c", "torch"]),
        (Cpu("arm64", None), ["native", "c", "torch"]),
        (Cpu("x86_64", None), ["native", "c", "torch"]),
    ],
)
def test_paths_of_a_cpu(cpu: Cpu, paths: list[str]) -> None:
    assert paths_of(cpu) == paths


def test_missing_cpu_features_are_named_with_the_remedy() -> None:
    """Otherwise the process would end at the first unsupported instruction."""
    with pytest.raises(ConfigError, match="QUIRE_CPU_KERNELS=avx512: this CPU has no avx512f, .*; unset"):
        check_cpu_kernels("avx512", x86(HASWELL))
    with pytest.raises(ConfigError, match="=avx512: this CPU has no avx512vl; unset .* set it to c or torch"):
        check_cpu_kernels("avx512", x86(SKYLAKE.replace(" avx512vl", "")))
    with pytest.raises(ConfigError, match="QUIRE_CPU_KERNELS=avx2: this CPU is aarch64, and avx2 is for x86"):
        check_cpu_kernels("avx2", ARM)
    with pytest.raises(ConfigError, match="QUIRE_CPU_KERNELS=avx2: this system does not list .*; unset"):
        compiler_flags("avx2", Cpu("x86_64", None))


def test_compiler_flags_of_each_path() -> None:
    flags = {path: compiler_flags(path, x86(SKYLAKE)) for path in CPU_KERNELS if path != "torch"}
    assert flags == {
        "native": ("-march=native",),
        "avx512": ("-march=x86-64-v4",),
        "avx2": ("-march=x86-64-v3",),
        "c": ("-march=x86-64",),
    }
    assert compiler_flags("native", ARM) == ("-march=native",)
    assert compiler_flags("c", ARM) == ("-march=native", "-U__ARM_NEON", "-U__ARM_FEATURE_DOTPROD")


def test_cpu_features_are_read_from_cpuinfo(tmp_path: Path) -> None:
    (tmp_path / "x86").write_text("processor\t: 0\nflags\t\t: fpu avx2 fma\nvmx flags\t: vnmi\n")
    (tmp_path / "arm").write_text("processor\t: 0\nFeatures\t: asimd asimddp\n")
    assert Cpu.read(tmp_path / "x86").features == {"fpu", "avx2", "fma"}
    assert Cpu.read(tmp_path / "arm").features == {"asimd", "asimddp"}
    assert Cpu.read(tmp_path / "none").features is None


def test_variable_is_one_of_the_paths() -> None:
    assert Env.read({}).cpu_kernels == "native"
    assert [Env.read({"QUIRE_CPU_KERNELS": path}).cpu_kernels for path in CPU_KERNELS] == list(CPU_KERNELS)
    message = "QUIRE_CPU_KERNELS='sse' is not a valid value; choose from native, avx512, avx2, c, torch"
    with pytest.raises(ConfigError, match=message):
        Env.read({"QUIRE_CPU_KERNELS": "sse"})
