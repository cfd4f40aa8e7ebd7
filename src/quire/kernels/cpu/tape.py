"""Tapes: recorded kernel calls of a computation, replayed in one call and one parallel region."""

import ctypes
import weakref
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.kernels.cpu import native
from quire.kernels.cpu.elementwise import run_recorded
from quire.logs import get_logger

log = get_logger(__name__)
R = TypeVar("R")

_ALIGN = 64
_EMPTIES: dict[Any, Callable[[tuple[Any, ...]], tuple[Any, torch.dtype]]] = {
    torch.ops.aten.empty.memory_format: lambda args: (args[0], torch.get_default_dtype()),
    torch.ops.aten.new_empty.default: lambda args: (args[1], args[0].dtype),
}
"""For each torch operation that allocates a tensor: a function of its arguments that returns the size and the
default dtype of the tensor."""
_ALLOCATES = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"}


class Pool:
    """Memory pool for the tensors of recordings.

    A tape points to the memory of tensors that no longer exist when it is replayed. Later tensors of the same
    or another recording may reuse their memory, but it must not return to the allocator.
    """

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []
        self.blocks: list[NDArray[np.uint8]] = []
        """All blocks of memory, free or in use, sorted by address."""
        self._starts: list[int] = []
        """Addresses of `blocks`, stored because numpy takes a microsecond to return an array's address."""

    def take(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = int(np.prod(size, dtype=np.int64)) * dtype.itemsize
        block = self._find(max(num_bytes, 1))
        lease = block[:num_bytes]
        # torch keeps the array alive until the last tensor of this memory is freed.
        weakref.finalize(lease, self._free.append, block).atexit = False
        return torch.from_numpy(lease).view(dtype).view(size)

    def _find(self, num_bytes: int) -> NDArray[np.uint8]:
        fitting = [i for i, block in enumerate(self._free) if num_bytes <= len(block) <= 4 * num_bytes + 4096]
        if fitting:
            return self._free.pop(min(fitting, key=lambda i: len(self._free[i])))
        rounded = 1 << (num_bytes - 1).bit_length()
        memory = np.empty(rounded + _ALIGN, np.uint8)
        address = memory.ctypes.data
        at = bisect_right(self._starts, address)
        self.blocks.insert(at, memory)
        self._starts.insert(at, address)
        start = -address % _ALIGN
        return memory[start : start + rounded]

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.blocks))

    def owns(self, tensor: Tensor) -> bool:
        return self._block_of(tensor) is not None

    def lent(self, tensor: Tensor) -> Tensor:
        """Return an alias of a tensor of the pool that does not keep its memory from being used by later
        recordings. Return other tensors unchanged."""
        block = self._block_of(tensor)
        if block is None:
            return tensor
        start = tensor.data_ptr() - block.ctypes.data
        memory = block[start : start + (len(block) - start) // tensor.itemsize * tensor.itemsize]
        return torch.from_numpy(memory).view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def _block_of(self, tensor: Tensor) -> NDArray[np.uint8] | None:
        address = tensor.data_ptr()
        at = bisect_right(self._starts, address) - 1
        return self.blocks[at] if at >= 0 and address < self._starts[at] + len(self.blocks[at]) else None


class Tape:
    """Recorded calls of C kernels, which `replay` repeats in order. The inputs must then have the same
    addresses as in the recording; their values may differ."""

    def __init__(self, pool: Pool) -> None:
        self.refused: str | None = None
        """First torch operation of the computation that the tape cannot replay; None if there was none."""
        self.takes_torch = False
        """Whether elementwise torch operations are recorded, too: see `torch_recorded`."""
        self._pool = pool
        self._kernels: list[int] = []
        self._jobs: list[ctypes.Structure] = []
        self._held: list[Tensor] = []
        self._num_threads = torch.get_num_threads()
        """Number of threads that the scratch memory of the jobs is sized for."""
        self._calls: tuple[ctypes.Array[ctypes.c_void_p], ctypes.Array[ctypes.c_void_p]] | None = None

    @property
    def complete(self) -> bool:
        return self.refused is None and self._calls is not None

    def __len__(self) -> int:
        return len(self._kernels)

    def add(self, kernel: int, job: ctypes.Structure, tensors: tuple[Tensor, ...]) -> None:
        self._kernels.append(kernel)
        self._jobs.append(job)
        self._held += (tensor for tensor in tensors if not self._pool.owns(tensor))

    def finish(self) -> None:
        pointers = ctypes.c_void_p * len(self)
        self._calls = pointers(*self._kernels), pointers(*map(ctypes.addressof, self._jobs))

    def replay(self) -> None:
        assert self._calls is not None and self.refused is None
        native.run(*self._calls, self._num_threads)


class _RecordingMode(TorchDispatchMode):
    """Dispatch mode that allocates tensors from the pool, and notes on the tape the first torch operation
    that computes something, because a tape cannot replay it."""

    def __init__(self, tape: Tape, pool: Pool) -> None:
        TorchDispatchMode.__init__(self)
        self.tape = tape
        self.pool = pool

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False. With True, torch would import dynamo, which takes a second and 130 MB."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _EMPTIES and not kwargs.get("pin_memory") and _on_host(kwargs.get("device")):
            size, dtype = _EMPTIES[func](args)
            return self.pool.take(tuple(size), kwargs.get("dtype") or dtype)
        result = func(*args, **kwargs)
        computes = func._schema.name not in _ALLOCATES and not (func.is_view and _same_memory(args, result))
        if computes and self.tape.refused is None:
            if self.tape.takes_torch:
                recorded = run_recorded(func, args, kwargs, result, self.pool.take)
                if recorded is not None:
                    return recorded
            self.tape.refused = str(func)
        return result


def _same_memory(args: tuple[Any, ...], result: Any) -> bool:
    """Whether all results of an operation share memory with its arguments. Some operations copy only
    sometimes, such as `contiguous`."""
    results = [result] if isinstance(result, Tensor) else result
    addresses = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
    return all(part.untyped_storage().data_ptr() in addresses for part in results)


def _on_host(device: torch.device | None) -> bool:
    return device is None or torch.device(device).type == "cpu"


@contextmanager
def torch_recorded() -> Iterator[None]:
    """Let the recording of this thread, if there is one, record also linear layers, embeddings and
    elementwise torch operations within this context. The computation must keep no tensors for the next
    one."""
    tape = native.recording()
    if not isinstance(tape, Tape):
        yield
        return
    tape.takes_torch = True
    try:
        yield
    finally:
        tape.takes_torch = False


@contextmanager
def record(pool: Pool | None = None) -> Iterator[Tape]:
    """Record the C kernels that run in this context on the tape that it yields. If `Tape.complete`, the tape
    can replay the whole computation."""
    pool = pool or Pool()
    tape = Tape(pool)
    assert native.recording() is None, "one recording at a time"
    native.record(tape)
    try:
        with _RecordingMode(tape, pool):
            yield tape
    finally:
        native.record(None)
    tape.finish()


class Tapes:
    """Tapes of computations by key, which are never freed. The first run with a key computes normally, the
    second is recorded, and later ones replay the tape."""

    def __init__(self) -> None:
        self.pool = Pool()
        self._seen: set[Hashable] = set()
        self._tapes: dict[Hashable, tuple[Tape, Any] | None] = {}
        """By key, the tape of a computation and its result; None if the computation cannot be recorded."""

    def __len__(self) -> int:
        return len(self._tapes)

    def run(self, key: Hashable, compute: Callable[[], R]) -> R:
        """Return the result of `compute()`, which is valid until the next run, because tapes share memory.

        Equal keys must mean equal addresses of all inputs; only their contents may differ.
        """
        if key not in self._tapes:
            return self._record(key, compute)
        taped = self._tapes[key]
        if taped is None:
            return compute()
        tape, result = taped
        tape.replay()
        return result  # type: ignore[no-any-return]

    def _record(self, key: Hashable, compute: Callable[[], R]) -> R:
        if key not in self._seen:
            self._seen.add(key)
            return compute()
        with record(self.pool) as tape:
            result = compute()
        if tape.refused:
            log.debug("Computation %s is not recorded: it calls the torch operation %s", key, tape.refused)
        self._tapes[key] = (tape, _map_tensors(result, self.pool.lent)) if tape.complete else None
        return result


def _map_tensors(result: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a result, which is a tensor or a tuple, with `change` applied to every tensor in it."""
    if isinstance(result, Tensor):
        return change(result)
    if not isinstance(result, tuple):
        return result
    parts = [_map_tensors(part, change) for part in result]
    return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)
