"""The C kernels, which are compiled with the system's compiler, cached on disk and called through ctypes."""

import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from filelock import FileLock
from torch import Tensor

from quire.config.cpu_kernels import Cpu, compiler_flags
from quire.config.env import Env
from quire.errors import ConfigError
from quire.logs import get_logger, warn_once

log = get_logger(__name__)

SOURCES = Path(__file__).parents[1] / "csrc"
TYPES = (torch.float32, torch.bfloat16)
"""Dtypes that the kernels support."""
_COMPILE = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fPIC", "-fopenmp")
_NATIVE = ("-march=native",)
_COMPILERS = ("cc", "gcc", "clang")
_MALLOC_OPTIONS = {-3: 32 << 20, -1: 256 << 20}
"""Values of glibc's M_MMAP_THRESHOLD (-3) and M_TRIM_THRESHOLD (-1), in bytes."""
_CONSEQUENCE = (
    "the CPU runs on torch alone: attention is slower, and quantized weights are unpacked to full size"
)


class NativeError(Exception):
    """The native kernels cannot be built or loaded."""


class KernelRecorder(Protocol):
    """Interface of recorders of kernel calls, such as `tape.Tape`."""

    def add(self, kernel: int, job: ctypes.Structure, tensors: tuple[Tensor, ...]) -> None:
        """Record a kernel call that has run: the address of the C function, its argument (`job`), and the
        tensors that the argument points to."""


_recording = threading.local()
_ONE_POINTER = ctypes.c_void_p * 1


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library of kernels, compiled for the instruction set of QUIRE_CPU_KERNELS. Return None if it
    cannot be compiled (with a warning), or if the kernels are turned off."""
    keep_freed_memory()
    env = Env.read(os.environ)
    path = env.cpu_kernels
    if path == "torch":
        log.info("The C kernels are off (QUIRE_CPU_KERNELS=torch); %s", _CONSEQUENCE)
        return None
    flags = compiler_flags(path, Cpu.read())
    try:
        return build(env.cache_root / "kernels", find_compiler(os.environ.get("CC")), flags)
    except NativeError as error:
        if path != "native":
            raise ConfigError(
                f"QUIRE_CPU_KERNELS={path}: the C kernels cannot be compiled ({error}); "
                "install a compiler that supports these instructions, or set it to torch"
            ) from error
        warn_once(log, f"No native CPU kernels ({error}); {_CONSEQUENCE}")
        return None


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the C kernels are available and support layers of `dtype` on `device`."""
    return device.type == "cpu" and dtype in TYPES and library() is not None


def keep_freed_memory() -> None:
    """Configure glibc to use freed memory again in the next step. By default it returns large blocks to the
    system, which clears every page of a new allocation."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        for option, size in _MALLOC_OPTIONS.items():
            set_option(option, size)


class Kernel:
    """A C function `void NAME(const NameJob *job)` of csrc/, which every thread of a team calls (csrc/run.c).

    The structure NameJob contains the arguments: pointers, then int64 numbers, then doubles, all named here
    in their order. Arguments that change between steps are in the memory that the job points to, so that a
    recorded call can be repeated.
    """

    def __init__(self, name: str, pointers: str = "", sizes: str = "", reals: str = "") -> None:
        self.name = name
        types = ((pointers, ctypes.c_void_p), (sizes, ctypes.c_int64), (reals, ctypes.c_double))
        fields = [(field, kind) for names, kind in types for field in names.split()]
        self._job: type[ctypes.Structure] = type("Job", (ctypes.Structure,), {"_fields_": fields})

    @functools.cached_property
    def address(self) -> int:
        function: Any = c_function(self.name, None)
        return ctypes.cast(function, ctypes.c_void_p).value or 0

    @functools.cached_property
    def _address_array(self) -> ctypes.Array[ctypes.c_void_p]:
        return _ONE_POINTER(self.address)

    def __call__(
        self, tensors: Sequence[Tensor | None], *numbers: float, held: Sequence[Tensor] = ()
    ) -> None:
        """Run the kernel on all threads. `tensors` are the job's pointers (None is a null pointer), followed
        by its `numbers`. `held` are tensors whose addresses are stored in the memory of `tensors`."""
        job = self._job(*[None if tensor is None else tensor.data_ptr() for tensor in tensors], *numbers)
        self.run(job, tensors, held)

    def run(
        self, job: ctypes.Structure, tensors: Sequence[Tensor | None], held: Sequence[Tensor] = ()
    ) -> None:
        """Run the kernel on all threads with a job that points to `tensors`; for `held` see `__call__`."""
        run(self._address_array, _ONE_POINTER(ctypes.addressof(job)), torch.get_num_threads())
        recorder = recording()
        if recorder is not None:
            recorder.add(self.address, job, tuple(x for x in (*tensors, *held) if x is not None))


def run(
    kernels: ctypes.Array[ctypes.c_void_p], jobs: ctypes.Array[ctypes.c_void_p], num_threads: int
) -> None:
    """Run the C functions `kernels`, each with its job, one after the other in one parallel region."""
    _runner()(kernels, jobs, len(kernels), num_threads)


@functools.cache
def _runner() -> Callable[..., None]:
    return c_function("quire_run", None, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2)


def c_function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """Return the C function `name` of the kernel library, with the ctypes types of its result and arguments
    set."""
    loaded = library()
    assert loaded is not None, "call library() first"
    function = loaded[name]
    function.restype, function.argtypes = result, arguments
    return function


def record(recorder: KernelRecorder | None) -> None:
    """Record every kernel call of this thread with `recorder`; None stops recording."""
    _recording.by = recorder


def recording() -> KernelRecorder | None:
    return getattr(_recording, "by", None)


def find_compiler(name: str | None) -> list[str]:
    """Return the command (program and arguments) of the C compiler `name`; None selects the first known one
    on the path. Raise a NativeError if it is not installed."""
    for candidate in [name] if name else _COMPILERS:
        command = shlex.split(candidate)
        if command and shutil.which(command[0]):
            return command
    missing = f"CC={name!r} is not a program" if name else "there is no C compiler"
    raise NativeError(f"{missing}; install gcc or clang, or set CC")


def build(folder: Path, compiler: list[str], flags: tuple[str, ...] = _NATIVE) -> ctypes.CDLL:
    """Load the library for these sources, compiler and CPU from `folder`; compile it if it is missing."""
    runtime = openmp_in_process()
    if runtime is None:
        return _load(folder, compiler, flags, link=("-fopenmp",))
    ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    try:
        return _load(folder, compiler, flags, link=())
    except NativeError:  # a compiler with another OpenMP runtime, which has its own thread pool
        return _load(folder, compiler, flags, link=("-fopenmp",))


def _load(folder: Path, compiler: list[str], flags: tuple[str, ...], *, link: tuple[str, ...]) -> ctypes.CDLL:
    path = folder / f"quire-{_cache_key(compiler, flags, link)}.so"
    try:
        if path.is_file():
            return ctypes.CDLL(str(path))
    except OSError:
        path.unlink(missing_ok=True)
    try:
        _compile(path, compiler, flags, link)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(str(error)) from error


def openmp_in_process(maps: Path = Path("/proc/self/maps")) -> str | None:
    """Return the path of the OpenMP runtime that torch has loaded into this process, or None."""
    try:
        match = re.search(r"\s(/\S*/lib(?:gomp|iomp5|omp)\b[^/\s]*\.so\S*)$", maps.read_text(), re.MULTILINE)
    except OSError:
        return None
    return match[1] if match else None


def _cache_key(compiler: list[str], flags: tuple[str, ...], link: tuple[str, ...]) -> str:
    """Return the cache key of the library: a hash of CPU, compiler, flags and sources."""
    key = hashlib.sha256(repr((compiler, _COMPILE, flags, link, platform.machine(), _cpu())).encode())
    for source in sorted(SOURCES.iterdir()):
        key.update(source.read_bytes())
    return key.hexdigest()[:16]


def _cpu() -> list[str]:
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return [platform.processor()]
    return sorted(set(re.findall(r"^(?:flags|Features|model name|CPU part)\s*:.*$", info, re.MULTILINE)))


def _compile(path: Path, compiler: list[str], flags: tuple[str, ...], link: tuple[str, ...]) -> None:
    """Compile the library and move it to `path` atomically."""
    command = [*compiler, *_COMPILE, *flags, "-c"]
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if path.is_file():
            return
        log.info("Compiling the CPU kernels with %s, once for this machine ...", compiler[0])
        started = time.monotonic()
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            sources = [str(source) for source in sorted(SOURCES.glob("*.c"))]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(lambda source: _run([*command, source], scratch), sources))
            objects = [f"{Path(source).stem}.o" for source in sources]
            _run([*compiler, "-shared", *objects, *link, "-lm", "-o", "built.so"], scratch)
            os.replace(Path(scratch) / "built.so", path)
        log.info("Compiled the CPU kernels in %.1f s", time.monotonic() - started)


def _run(command: list[str], folder: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        message = next((line for line in lines if "error" in line), lines[-1])
        raise NativeError(f"{command[0]} failed: {message}")
