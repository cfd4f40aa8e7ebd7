"""Kernel launches: with programmatic dependent launch (PDL), or for compilation only."""

import functools
import hashlib
import inspect
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.cache import get_cache_manager
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.errors import one_line
from quire.kernels.compile_processes import current_processes
from quire.kernels.triton.compile_server import encode_job
from quire.kernels.triton.launcher_lock import lock_launchers
from quire.logs import get_logger

log = get_logger(__name__)
lock_launchers()

MOST_ROWS, _MOST = 128, 2**18
"""Limits of a step that uses PDL: rows (twice as many for a narrow model), and rows times the model's width.
Larger steps use the library's GEMMs, for which an early launch of other kernels only adds cost."""
_COMPILERS = 16
"""Maximum number of threads that compile kernels."""


def launch(kernel: Any, *grid: int) -> Callable[..., Any]:
    """Return `kernel[grid]`; inside `compiling`, a call of it compiles the kernel without running it."""
    requested = _requested.get()
    return kernel[grid] if requested is None else functools.partial(_compile_once, requested, kernel, grid)


_requested: ContextVar[set[Any] | None] = ContextVar("kernels to compile", default=None)
"""Inside `compiling` or `compile_ahead`, the kernels launched so far; None where launched kernels run."""


def allocate_indices(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialized tensor for indices that a kernel writes; zeros inside `compiling`, where no
    kernel runs and the indices would be garbage."""
    make = torch.empty if _requested.get() is None else torch.zeros
    return make(shape, dtype=dtype, device=device)


def only_compiles() -> bool:
    """Whether launched kernels are only compiled (inside `compiling`). Code that chooses among several kernel
    variants then launches all of them."""
    return _requested.get() is not None


_ahead: list[tuple[Future[None], set[Any]]] = []
"""The call of `compile_ahead` for which `compiling` has not waited yet, with the kernels that it compiles."""


@contextmanager
def compiling() -> Iterator[None]:
    """Compile the kernels launched inside this context instead of running them, in parallel and each once.
    All are compiled when the context ends, also those of `compile_ahead`. Their outputs are not written."""
    future, requested = _ahead.pop() if _ahead else (None, set())
    with _compiling_once(requested):
        yield
    if future is not None:
        future.result()


def compile_ahead(launch_all: Callable[[], None]) -> None:
    """Compile the kernels that `launch_all` launches, in a thread. The next `compiling` waits for them and
    does not compile them again."""
    requested: set[Any] = set()

    def compile_all() -> None:
        with _compiling_once(requested):
            launch_all()

    pool = _threads(1)
    _ahead[:] = [(pool.submit(copy_context().run, compile_all), requested)]
    pool.shutdown(wait=False)


@contextmanager
def _compiling_once(requested: set[Any]) -> Iterator[None]:
    """Compile the launched kernels that are not in `requested`, and add them to it."""
    token = _requested.set(requested)
    try:
        with _threads(min(_COMPILERS, os.cpu_count() or 1)) as pool, _CompileMode(pool):
            yield
    finally:
        _requested.reset(token)


def _threads(num: int) -> ThreadPoolExecutor:
    """Return a pool of `num` threads that use the current CUDA device; by default, new threads use the first
    one."""
    if not torch.cuda.is_available():
        return ThreadPoolExecutor(num)
    device = torch.cuda.current_device()
    return ThreadPoolExecutor(num, initializer=torch.cuda.set_device, initargs=(device,))


class _CompileMode(triton.AsyncCompileMode):  # type: ignore[misc]
    """Compiles kernels in the threads of `executor`, or by the processes of `current_processes` if there are
    any, and loads them on the device."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        super().__init__(executor)
        self._processes = current_processes()

    def submit(self, key: str, compile_kernel: Callable[[], Any], *more: Callable[..., Any]) -> Any:
        """Compile a kernel; `key` is its key in Triton's cache."""
        return super().submit(key, functools.partial(self._compile, key, compile_kernel), *more)

    def _compile(self, key: str, compile_kernel: Callable[[], Any]) -> Any:
        # Triton passes the parts of a kernel only in the closure of `compile_kernel`.
        parts = inspect.getclosurevars(compile_kernel).nonlocals
        source = parts.get("src")
        if self._processes is not None and source is not None and not _is_cached(key, source):
            self._compile_elsewhere(source, parts)
        try:
            kernel = compile_kernel()  # from the cache, or compiled here
            kernel.run  # noqa: B018  the first access builds the launcher and loads the code
        except Exception as error:
            log.error("The kernel %s does not compile: %s", _name(source), one_line(error))
            raise
        return kernel

    def _compile_elsewhere(self, source: Any, parts: Mapping[str, Any]) -> None:
        """Compile the kernel in another process, which writes it to Triton's cache. After a failure, only log
        the reason."""
        assert self._processes is not None
        try:
            job = encode_job(source, parts["target"], parts["options"].__dict__)
        except (KeyError, AttributeError, TypeError, pickle.PicklingError) as error:
            reason: str | None = one_line(error)
        else:
            reason = self._processes.compile(job)
        if reason is not None:
            log.debug(
                "Compiling the kernel %s in this process, not in a compile process: %s",
                _name(source),
                reason,
            )


def _is_cached(key: str, source: Any) -> bool:
    manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return manager.get_group(f"{source.name[:150]}.json") is not None  # the name that `triton.compile` uses


def _name(source: Any) -> str:
    return "" if source is None else f"{source.fn.fn.__module__}.{source.fn.fn.__qualname__}"


def _compile_once(compiled: set[Any], kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Compile a kernel once for each combination of argument properties, because layers repeat launches.
    `compiled` are the combinations so far."""
    key = kernel, *map(_specialization, args), *options.items()
    if key not in compiled:
        compiled.add(key)
        kernel.run(*args, grid=grid, warmup=True, **options)


def _specialization(arg: Any) -> Any:
    """Return the properties of a kernel argument for which Triton may specialize the kernel."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if isinstance(arg, TensorDescriptor):
        return arg.base.dtype, *arg.block_shape
    if isinstance(arg, tuple):
        return tuple(map(_specialization, arg))
    return (arg == 1, arg % 16 == 0) if isinstance(arg, int) else type(arg)


def cdiv(size: int, block: int) -> int:
    """Return the number of blocks that cover `size`. `triton.cdiv` takes microseconds outside of a kernel."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """Return the least power of two that is not below `size`; see `cdiv`."""
    return 1 << (size - 1).bit_length()


def overlap(num_rows: int, width: int = _MOST // 16) -> bool:
    """Whether kernels for `num_rows` rows are launched with `launch_pdl`, before the preceding kernel has
    ended.

    `width` is the width of the model. Without it, for kernels around the vocabulary GEMM, PDL is used for up
    to 16 rows. A PDL kernel calls `follow` before it reads what other kernels wrote or writes what they read.
    It may read weights, which no kernel writes, before `follow`.
    """
    return num_rows <= 2 * MOST_ROWS and num_rows * width <= _MOST and _can_overlap()


@functools.cache
def _can_overlap() -> bool:
    """Whether the GPU has PDL: Hopper and later."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@triton.jit
def follow(OVERLAP: tl.constexpr) -> tl.tensor:
    """Allow the next kernel to start, and wait until the previous one has ended and its writes are
    visible."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


# A LoRA shrink runs between a GEMM and the kernel before the GEMM. With `LATE` the shrink delays the GEMM's
# launch. The GEMM may then read the shrink's inputs at once, and waits for the shrink only at its end.
@triton.jit
def follow_late(OVERLAP: tl.constexpr, LATE: tl.constexpr) -> tl.tensor:
    if OVERLAP and LATE:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    else:
        follow(OVERLAP)
