"""Hardware detection without torch: CUDA by its driver, the CPU by the kernel's files."""

import ctypes
import importlib.util
import os
import platform
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from quire.config.machine import Machine
from quire.errors import ConfigError
from quire.logs import get_logger, warn_once

logger = get_logger(__name__)

_ROCM = "the installed torch is a ROCm build, and AMD GPUs are not supported"
# CUdevice_attribute values of cuda.h.
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
_BF16_FEATURES = {"avx512_bf16", "amx_bf16", "bf16"}
# Not `asimdhp`: torch multiplies float16 matrices on such CPUs 80 times slower than float32 (torch 2.13).
_FP16_FEATURES = {"avx512_fp16", "amx_fp16"}


def detect(device: str = "auto", *, root: Path = Path("/")) -> Machine:
    """Return the device the engine runs on: `auto` chooses CUDA if torch is built for it and a device is
    present.

    `root` is the parent of /proc and /sys.
    """
    if device == "cpu":
        return _cpu(root)
    reason = _why_no_cuda()
    if reason is None:
        return _cuda(_driver(), _num_cores(root))
    if device == "cuda":
        raise ConfigError(f"device='cuda' is not available: {reason}; use device='cpu'")
    if _torch_built_for("hip"):
        warn_once(logger, f"{_ROCM}: the engine runs on the CPU")
    return _cpu(root)


def _why_no_cuda() -> str | None:
    if not _torch_built_for("cuda"):
        return _ROCM if _torch_built_for("hip") else "the installed torch is not a CUDA build"
    try:
        driver = _driver()
    except OSError:
        return "there is no CUDA driver (libcuda.so.1)"
    status = driver.cuInit(0)
    if status != 0:
        return f"the CUDA driver does not start (cuInit returned {status})"
    return None if _device_count(driver) > 0 else "no CUDA device is visible (see CUDA_VISIBLE_DEVICES)"


def _torch_built_for(platform: str) -> bool:
    """Whether the installed torch is built for `platform`, `cuda` or `hip` (ROCm), by its version file."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    pattern = rf"^{platform}\b[^=]*=\s*['\"]"
    return version.is_file() and bool(re.search(pattern, version.read_text(), re.MULTILINE))


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(function: Callable[..., int], *args: object) -> None:
    status = function(*args)
    if status != 0:
        raise ConfigError(
            f"the CUDA driver failed ({getattr(function, '__name__', function)} returned {status})"
        )


def _device_count(driver: ctypes.CDLL) -> int:
    count = ctypes.c_int()
    _call(driver.cuDeviceGetCount, ctypes.byref(count))
    return count.value


def _cuda(driver: ctypes.CDLL, num_cores: int) -> Machine:
    """Return the properties of the first GPU. All of its memory counts as free: measuring that needs a CUDA
    context, which only workers have."""
    device, total = ctypes.c_int(), ctypes.c_size_t()
    major, minor = ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    _call(driver.cuDeviceGet, ctypes.byref(device), 0)
    _call(driver.cuDeviceGetName, name, len(name), device)
    _call(driver.cuDeviceTotalMem_v2, ctypes.byref(total), device)
    _call(driver.cuDeviceGetAttribute, ctypes.byref(major), _CAPABILITY_MAJOR, device)
    _call(driver.cuDeviceGetAttribute, ctypes.byref(minor), _CAPABILITY_MINOR, device)
    capability = (major.value, minor.value)
    return Machine(
        device="cuda",
        name=name.value.decode(errors="replace"),
        num_devices=_device_count(driver),
        total_bytes=total.value,
        free_bytes=total.value,
        num_cores=num_cores,
        capability=capability,
        bf16=capability >= (8, 0),
        fp16=capability >= (5, 3),
    )


def _cpu(root: Path) -> Machine:
    total, free = _memory(root)
    info = _read(root / "proc/cpuinfo") or ""
    features = set((_line(info, "flags") or _line(info, "Features") or "").split())
    return Machine(
        device="cpu",
        name=_line(info, "model name") or platform.processor() or f"{platform.machine()} CPU",
        num_devices=1,
        total_bytes=total,
        free_bytes=free,
        num_cores=_num_cores(root),
        bf16=bool(features & _BF16_FEATURES),
        fp16=bool(features & _FP16_FEATURES),
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _line(info: str, key: str) -> str | None:
    match = re.search(rf"^{key}\s*:\s*(.*)$", info, re.MULTILINE)
    return match[1].strip() if match else None


def thread_advice(
    device: str, *, num_threads: int, num_api: int, num_workers: int, num_engines: int = 1
) -> str | None:
    """Return a warning if GPU engines have fewer than two hardware threads per process: API servers, engine
    cores (one per data-parallel rank) and workers."""
    needed = 2 * (num_api + num_engines + num_workers)
    if device == "cpu" or num_threads >= needed:
        return None
    return (
        f"there are {num_threads} hardware threads, but {num_api} API server(s), {num_engines} engine "
        f"core(s) and {num_workers} GPU worker(s) need {needed} (2 each): expect the GPU to wait for the "
        "CPU, later first tokens and fewer tokens a second"
    )


def devices_of(index: int, count: int, *, visible: str | None, num_devices: int) -> str:
    """Return the CUDA_VISIBLE_DEVICES of the engine with this index, of several engines with `count`
    devices each; `visible` is that of this process."""
    names = visible.split(",") if visible else [str(number) for number in range(num_devices)]
    chosen = names[index * count : (index + 1) * count]
    if len(chosen) < count:
        raise ConfigError(
            f"there are {len(names)} devices, too few for data-parallel copies of {count} each: lower"
            " data_parallel_size, or data_parallel_size_local"
        )
    return ",".join(chosen)


def _num_cores(root: Path) -> int:
    """Return the number of compute threads to use: the hardware threads, limited by OMP_NUM_THREADS."""
    cores = hardware_threads(root)
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(limit)) if limit.isdigit() and int(limit) else cores


def hardware_threads(root: Path = Path("/")) -> int:
    """Return the number of hardware threads in the affinity mask, limited by the CPU quota of every
    cgroup."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroup_folders(root, "cpu"):
        quota = _read(folder / "cpu.max")
        if quota is None:
            quota = f"{_read(folder / 'cpu.cfs_quota_us') or ''} {_read(folder / 'cpu.cfs_period_us') or ''}"
        parts = quota.split()
        if len(parts) == 2 and parts[0].isdigit() and int(parts[1]) > 0:
            cores = min(cores, max(1, int(parts[0]) // int(parts[1])))
    return cores


def free_memory(root: Path = Path("/")) -> int:
    """Return the bytes of host memory that this process can still use."""
    return _memory(root)[1]


def _memory(root: Path) -> tuple[int, int]:
    """Return the total and the free bytes for this process: the machine's, within every cgroup's limit."""
    host, free = _host_memory(root)
    total = host
    for folder in _cgroup_folders(root, "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if limit is None or limit >= host:
            continue
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        stat = _read(folder / "memory.stat") or ""
        # Page cache counts as used, but the kernel reclaims it on demand.
        reclaimable = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
        used -= min(used, int(reclaimable[1]) if reclaimable else 0)
        total, free = min(total, limit), min(free, max(0, limit - used))
    return total, free


def _host_memory(root: Path) -> tuple[int, int]:
    info = _read(root / "proc/meminfo") or ""
    total, free = _line(info, "MemTotal"), _line(info, "MemAvailable")
    if total and free:
        return int(total.split()[0]) * 1024, int(free.split()[0]) * 1024
    import psutil

    memory = psutil.virtual_memory()
    return memory.total, memory.available


def _number(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdigit() else None


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folder of this process's cgroup and those of its parents, in version 2 and in version 1 of
    the given `controller`."""
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controller
        else:
            continue
        # In a container the path may be the host's: missing folders are skipped, the top is always read.
        folder = top / path.lstrip("/")
        yield folder
        while folder != top:
            folder = folder.parent
            yield folder
