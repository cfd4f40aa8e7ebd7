"""Courier: host memory that comes to a CUDA device once it is filled, while nobody waits for it."""

import ctypes
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from quire.logs import get_logger

log = get_logger(__name__)

_AT_LEAST = 0
"""CU_STREAM_WAIT_VALUE_GEQ, by the difference of both in 32 bits."""
_ADDRESS = ctypes.c_uint64


class HostSignal:
    """A stream that waits for the host, and copies, by calls of the driver: torch's take several times as
    long. It waits by reading a count in host memory."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """An OSError or an AttributeError where there is no driver that can."""
        self._stream = stream.cuda_stream
        self._memory = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._count = self._memory.numpy().view(np.uint32)
        self._at = self._memory.data_ptr()
        self._num_held = 0
        driver = ctypes.CDLL("libcuda.so.1")
        self._wait, self._copy = driver.cuStreamWaitValue32_v2, driver.cuMemcpyHtoDAsync_v2
        self._wait.argtypes = (ctypes.c_void_p, _ADDRESS, ctypes.c_uint32, ctypes.c_uint)
        self._copy.argtypes = (_ADDRESS, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

    def hold(self) -> Callable[[], None]:
        """What comes next waits until this is called, in the order of holding. It must be, whatever happens:
        nothing else ends the wait."""
        self._num_held = (self._num_held + 1) & 0xFFFFFFFF
        _check(self._wait(self._stream, self._at, self._num_held, _AT_LEAST))
        return partial(self._raise_to, self._num_held)

    def _raise_to(self, count: int) -> None:
        self._count[0] = count

    def bring(self, source: Tensor, into: Tensor) -> None:
        """`source` is pinned, and stays as it is until it was copied."""
        _check(self._copy(into.data_ptr(), source.data_ptr(), source.nbytes, self._stream))


def _check(failed: int) -> None:
    if failed:
        raise torch.AcceleratorError(f"CUDA error {failed} beside the layers")


def open_courier(stream: torch.cuda.Stream) -> HostSignal | None:
    """None where the device cannot wait so; then the host does."""
    try:
        host_signal = HostSignal(stream)
        host_signal.hold()()
    except (AttributeError, OSError, torch.AcceleratorError) as error:
        log.debug("No stream waits for the host here: %s", error)
        return None
    return host_signal
