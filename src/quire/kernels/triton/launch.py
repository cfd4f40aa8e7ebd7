"""Launching kernels: so that they follow each other closely, or only to have them compiled."""

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
"""Up to so many rows, twice as many of a narrow model, and so many numbers of a model's width in all of them,
the kernels of a step are ours; beside the library's products an early launch only costs."""
_COMPILERS = 16


def launch(kernel: Any, *grid: int) -> Callable[..., Any]:
    """`kernel[grid]`, which inside `compiling` does not run."""
    wanted = _wanted.get()
    return kernel[grid] if wanted is None else functools.partial(_want, wanted, kernel, grid)


_wanted: ContextVar[set[Any] | None] = ContextVar("kernels to compile", default=None)


def room(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """For places that a kernel writes and something else looks up: zeros where the kernel does not run."""
    make = torch.empty if _wanted.get() is None else torch.zeros
    return make(shape, dtype=dtype, device=device)


def only_compiles() -> bool:
    """Whether kernels that are launched are compiled and do not run: who has several asks for all."""
    return _wanted.get() is not None


@contextmanager
def compiling() -> Iterator[None]:
    """Kernels that are launched in here are compiled instead, side by side and each once; in the end all are
    there. What they would have written is left as it was."""
    token = _wanted.set(set())
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    try:
        with _Loading(device) as pool, triton.AsyncCompileMode(pool):
            yield
    finally:
        _wanted.reset(token)


class _Loading(ThreadPoolExecutor):
    """Threads that compile a kernel and also make it ready to run, on the device of who asks."""

    def __init__(self, device: int | None) -> None:
        own: dict[str, Any] = {}
        if device is not None:
            own = {"initializer": torch.cuda.set_device, "initargs": (device,)}
        super().__init__(min(_COMPILERS, os.cpu_count() or 1), **own)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def compile_and_load() -> Any:
            kernel = fn(*args, **kwargs)
            kernel.run  # noqa: B018  its launcher is built, and its code loaded, when this is first asked for
            return kernel

        return super().submit(compile_and_load)


def _want(wanted: set[Any], kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """A model's layers want the same again and again: ask for it once."""
    kind = kernel, *map(_kind, args), *options.items()
    if kind not in wanted:
        wanted.add(kind)
        kernel.run(*args, grid=grid, warmup=True, **options)


def _kind(arg: Any) -> Any:
    """What an argument of a kernel may have it compiled for."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if isinstance(arg, TensorDescriptor):
        return arg.base.dtype, *arg.block_shape
    if isinstance(arg, tuple):
        return tuple(map(_kind, arg))
    return (arg == 1, arg % 16 == 0) if isinstance(arg, int) else type(arg)


def overlap(num_rows: int, width: int = _MOST // 16) -> bool:
    """Whether kernels for so many rows are launched with `launch_pdl`, ahead of the end of the one before.

    `width` is the model's; around the vocabulary's product the kernels are ours up to 16 rows.
    Such a kernel calls `follow` before it reads what others wrote or writes what others read; what no kernel
    ever writes, such as weights, it may read before.
    """
    return num_rows <= 2 * MOST_ROWS and num_rows * width <= _MOST and _can_overlap()


@functools.cache
def _can_overlap() -> bool:
    """Hopper and later."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@triton.jit
def follow(OVERLAP: tl.constexpr) -> tl.tensor:
    """Let the next kernel come, and wait until the one before has ended and what it wrote can be seen."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


# A shrink stands between a product and the kernel before it. If it is `LATE` in letting the product come,
# what it reads itself can be read at once, and the product waits for it at its end.
@triton.jit
def follow_late(OVERLAP: tl.constexpr, LATE: tl.constexpr) -> tl.tensor:
    if OVERLAP and LATE:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    else:
        follow(OVERLAP)
