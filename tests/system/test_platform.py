"""Tests of detect(): the CPU with a fake /proc and /sys, CUDA with a fake driver."""

import ctypes
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.system import platform
from quire.system.platform import detect, hardware_threads, thread_advice

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a machine with 8 cores and 16 GiB, 12 of them free, and no cgroup limits."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    write(tmp_path, "proc/meminfo", f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {12 << 20} kB\n")
    write(tmp_path, "proc/cpuinfo", "model name\t: Some CPU @ 2GHz\nflags\t\t: fpu avx2 avx512f\n")
    return tmp_path


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_machine_without_limits(root: Path) -> None:
    machine = detect("cpu", root=root)
    assert (machine.device, machine.name, machine.num_cores) == ("cpu", "Some CPU @ 2GHz", 8)
    assert (machine.total_bytes, machine.free_bytes) == (16 * GIB, 12 * GIB)
    assert (machine.bf16, machine.fp16, machine.capability) == (False, False, (0, 0))


@pytest.mark.parametrize(
    ("line", "bf16", "fp16"),
    [
        ("flags\t: fpu avx512_bf16", True, False),
        ("flags\t: amx_bf16 avx512_fp16", True, True),
        ("Features\t: fp asimd asimdhp", False, False),
        ("Features\t: asimdhp bf16", True, False),
        ("flags\t: avx512_bf16x", False, False),
    ],
)
def test_native_half_precision_is_read_from_the_cpu_flags(
    root: Path, line: str, bf16: bool, fp16: bool
) -> None:
    write(root, "proc/cpuinfo", f"processor\t: 0\n{line}\n")
    machine = detect("cpu", root=root)
    assert (machine.bf16, machine.fp16) == (bf16, fp16)
    assert machine.name


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"a/b/cpu.max": "150000 100000"}, 1),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3),
        ({"a/b/cpu.max": "50000 100000"}, 1),
        ({"a/b/cpu.max": "900000 100000"}, 8),
        ({"cpu.max": "200000 100000"}, 2),
    ],
)
def test_cpu_quota_of_cgroup_v2(root: Path, files: dict[str, str], cores: int) -> None:
    """Check that a container with a quota does not start a thread per host core."""
    write(root, "proc/self/cgroup", "0::/a/b\n")
    for path, text in files.items():
        write(root, f"sys/fs/cgroup/{path}", text + "\n")
    assert detect("cpu", root=root).num_cores == cores


@pytest.mark.parametrize(("wanted", "cores"), [("3", 3), ("64", 8), ("0", 8), ("4,2", 8), ("", 8)])
def test_omp_num_threads_limits_the_cores(
    root: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, cores: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", wanted)
    assert detect("cpu", root=root).num_cores == cores


def test_memory_of_cgroup_v2_counts_page_cache_as_free(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/a/b\n")
    write(root, "sys/fs/cgroup/a/b/memory.max", "max\n")
    write(root, "sys/fs/cgroup/a/memory.max", f"{4 * GIB}\n")
    write(root, "sys/fs/cgroup/a/memory.current", f"{3 * GIB}\n")
    write(root, "sys/fs/cgroup/a/memory.stat", f"anon 5\nactive_file 7\ninactive_file {GIB}\n")
    machine = detect("cpu", root=root)
    assert (machine.total_bytes, machine.free_bytes) == (4 * GIB, 2 * GIB)


def test_tighter_parent_cgroup_limits_free_memory(root: Path) -> None:
    """Check a child with a smaller limit whose siblings have used up the parent's."""
    write(root, "proc/self/cgroup", "0::/a/b\n")
    for path, limit, used in (("a/b", 4 * GIB, 0), ("a", 8 * GIB, 7 * GIB)):
        write(root, f"sys/fs/cgroup/{path}/memory.max", f"{limit}\n")
        write(root, f"sys/fs/cgroup/{path}/memory.current", f"{used}\n")
    machine = detect("cpu", root=root)
    assert (machine.total_bytes, machine.free_bytes) == (4 * GIB, GIB)


def test_cgroup_v1_limits_with_a_host_path(root: Path) -> None:
    """Check a container, where the named directory is missing and the limits are at the top."""
    write(root, "proc/self/cgroup", "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n1:name=systemd:/\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{2 * GIB}\n")
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", f"{GIB}\n")
    write(root, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "200000\n")
    write(root, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    machine = detect("cpu", root=root)
    assert (machine.total_bytes, machine.free_bytes, machine.num_cores) == (2 * GIB, GIB, 2)


def test_huge_cgroup_v1_limit_is_no_limit(root: Path) -> None:
    write(root, "proc/self/cgroup", "5:memory:/\n4:cpu:/\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(root, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    write(root, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    machine = detect("cpu", root=root)
    assert (machine.total_bytes, machine.num_cores) == (16 * GIB, 8)


class Driver:
    """A fake libcuda with the same pointer interface."""

    def __init__(self, count: int = 2, capability: tuple[int, int] = (9, 0), status: int = 0) -> None:
        self.count, self.capability, self.status = count, capability, status

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.count
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = 40 + ordinal
        return 0

    def cuDeviceGetName(self, name: Any, length: int, device: ctypes.c_int) -> int:
        name.value = f"NVIDIA H{device.value}"[: length - 1].encode()
        return 0

    def cuDeviceTotalMem_v2(self, total: Any, device: ctypes.c_int) -> int:
        total._obj.value = 80 * GIB
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: ctypes.c_int) -> int:
        value._obj.value = self.capability[{75: 0, 76: 1}[attribute]]
        return 0


def with_cuda(monkeypatch: pytest.MonkeyPatch, driver: Driver | None, built: bool = True) -> None:
    def load() -> Driver:
        if driver is None:
            raise OSError("libcuda.so.1")
        return driver

    monkeypatch.setattr(platform, "_driver", load)
    monkeypatch.setattr(platform, "_torch_built_for", lambda name: name == "cuda" and built)


def test_cuda_is_used_if_present(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cuda(monkeypatch, Driver())
    machine = detect(root=root)
    assert (machine.device, machine.name, machine.num_devices) == ("cuda", "NVIDIA H40", 2)
    assert (machine.total_bytes, machine.free_bytes, machine.num_cores) == (80 * GIB, 80 * GIB, 8)
    assert (machine.capability, machine.bf16, machine.fp16) == ((9, 0), True, True)
    assert detect("cpu", root=root).device == "cpu"


@pytest.mark.parametrize(("capability", "bf16", "fp16"), [((7, 5), False, True), ((5, 2), False, False)])
def test_old_gpus_lack_bfloat16(
    root: Path, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], bf16: bool, fp16: bool
) -> None:
    with_cuda(monkeypatch, Driver(capability=capability))
    machine = detect(root=root)
    assert (machine.bf16, machine.fp16) == (bf16, fp16)


@pytest.mark.parametrize(
    ("driver", "built", "reason"),
    [
        (Driver(), False, "not a CUDA build"),
        (None, True, "no CUDA driver"),
        (Driver(status=100), True, "cuInit returned 100"),
        (Driver(count=0), True, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_without_cuda_it_is_a_cpu_or_an_error_with_the_reason(
    root: Path, monkeypatch: pytest.MonkeyPatch, driver: Driver | None, built: bool, reason: str
) -> None:
    with_cuda(monkeypatch, driver, built)
    assert detect(root=root).device == "cpu"
    with pytest.raises(ConfigError, match=reason):
        detect("cuda", root=root)


@pytest.mark.parametrize(
    ("text", "built"),
    [
        ("cuda: Optional[str] = None\n", False),
        ("cuda: Optional[str] = '13.0'\n", True),
        ("cuda = '12.8'\n", True),
        ("hip: Optional[str] = '6.4'\ncuda = None\n", False),
    ],
)
def test_torch_build_is_read_without_importing_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, built: bool
) -> None:
    write(tmp_path, "torch/version.py", text)
    spec = SimpleNamespace(origin=str(tmp_path / "torch/__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    assert platform._torch_built_for("cuda") is built


def test_a_rocm_build_of_torch_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(platform, "_torch_built_for", lambda name: name == "hip")
    logging.getLogger("quire").addHandler(caplog.handler)
    try:
        assert detect(root=root).device == "cpu"
    finally:
        logging.getLogger("quire").removeHandler(caplog.handler)
    assert "ROCm build, and AMD GPUs are not supported: the engine runs on the CPU" in caplog.text
    with pytest.raises(
        ConfigError, match="is a ROCm build, and AMD GPUs are not supported; use device='cpu'"
    ):
        detect("cuda", root=root)


def test_this_machine_is_described_without_torch() -> None:
    code = (
        "import sys; from quire.system.platform import detect; m = detect();"
        "assert m.num_cores >= 1 and 0 < m.free_bytes <= m.total_bytes; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("num_threads", "num_api", "num_engines", "num_workers", "wanted"),
    [(5, 1, 1, 1, 6), (6, 1, 1, 1, None), (11, 4, 1, 1, 12), (12, 4, 1, 1, None), (19, 1, 1, 8, 20),
     (20, 1, 1, 8, None), (39, 4, 8, 8, 40), (40, 4, 8, 8, None)],
)  # fmt: skip
def test_two_hardware_threads_per_process_of_a_gpu_engine(
    num_threads: int, num_api: int, num_engines: int, num_workers: int, wanted: int | None
) -> None:
    """Check the guide's rule: 2 x (A + DP + N) for A API servers, DP engine cores and N GPUs."""
    sizes = {"num_api": num_api, "num_engines": num_engines, "num_workers": num_workers}
    sizes["num_threads"] = num_threads
    advice = thread_advice("cuda", **sizes)
    assert (advice is None) == (wanted is None)
    assert advice is None or (f"{num_threads} hardware threads" in advice and f"need {wanted} " in advice)
    assert advice is None or "\n" not in advice
    assert thread_advice("cpu", **sizes) is None


def test_hardware_threads_ignore_omp_num_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a machine with OMP_NUM_THREADS=1, which has enough cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert hardware_threads(Path("/nowhere")) == 8
