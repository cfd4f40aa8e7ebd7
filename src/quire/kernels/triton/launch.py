"""Kernel launches: with programmatic dependent launch (PDL), or for compilation only."""

import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

MOST_ROWS, _MOST = 128, 2**18
"""Limits of a step that uses PDL: rows (twice as many for a narrow model), and rows times the model's width.
Larger steps use the library's GEMMs, beside which an early launch only adds cost."""
_COMPILERS = 16


def launch(kernel: Any, *grid: int) -> Callable[..., Any]:
    """Return `kernel[grid]`; inside `compiling`, calling it compiles the kernel without running it."""
    requested = _requested.get()
    return kernel[grid] if requested is None else functools.partial(_compile_once, requested, kernel, grid)


_requested: ContextVar[set[Any] | None] = ContextVar("kernels to compile", default=None)


def allocate_indices(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialized tensor for indices that a kernel writes; zeros inside `compiling`, where no
    kernel runs and the indices would be garbage."""
    make = torch.empty if _requested.get() is None else torch.zeros
    return make(shape, dtype=dtype, device=device)


def only_compiles() -> bool:
    """Whether launched kernels are only compiled, so that code with several kernel variants launches them
    all."""
    return _requested.get() is not None


@contextmanager
def compiling() -> Iterator[None]:
    """Compile the kernels launched inside this context instead of running them, in parallel and each once.
    All are compiled when the context ends. Their outputs are not written."""
    token = _requested.set(set())
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    try:
        with _Loading(device) as pool, triton.AsyncCompileMode(pool):
            yield
    finally:
        _requested.reset(token)


class _Loading(ThreadPoolExecutor):
    """Threads that compile a kernel and load it on the caller's device."""

    def __init__(self, device: int | None) -> None:
        options: dict[str, Any] = {}
        if device is not None:
            options = {"initializer": torch.cuda.set_device, "initargs": (device,)}
        super().__init__(min(_COMPILERS, os.cpu_count() or 1), **options)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def compile_and_load() -> Any:
            kernel = fn(*args, **kwargs)
            kernel.run  # noqa: B018  the first access builds the launcher and loads the code
            return kernel

        return super().submit(compile_and_load)


def _compile_once(compiled: set[Any], kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Compile a kernel once for each combination of argument kinds; layers repeat the same launches."""
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

    `width` is the model's; kernels around the vocabulary GEMM use PDL for up to 16 rows. A PDL kernel calls
    `follow` before it reads what other kernels wrote or writes what they read. It may read weights, which no
    kernel writes, before that.
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


# A LoRA shrink runs between a GEMM and the kernel before it. With `LATE` it delays the launch of the GEMM,
# which may then read the shrink's inputs at once, and waits for the shrink only at its end.
@triton.jit
def follow_late(OVERLAP: tl.constexpr, LATE: tl.constexpr) -> tl.tensor:
    if OVERLAP and LATE:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    else:
        follow(OVERLAP)
