"""Copies of host memory to a CUDA device that wait on the device until the memory is filled."""

import ctypes
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from quire.logs import get_logger

log = get_logger(__name__)

_AT_LEAST = 0
"""The driver's CU_STREAM_WAIT_VALUE_GEQ: the stream waits until the counter has at least the given value, by
their 32-bit difference."""
_ADDRESS = ctypes.c_uint64


class HostSignal:
    """Lets a CUDA stream wait for the host, then copy host memory. The device polls a counter in host memory.
    Driver calls are used, since torch's calls take several times as long."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """Raise OSError or AttributeError if the driver lacks the calls."""
        self._stream = stream.cuda_stream
        self._memory = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._count = self._memory.numpy().view(np.uint32)
        self._count_address = self._memory.data_ptr()
        self._num_waits = 0
        driver = ctypes.CDLL("libcuda.so.1")
        self._wait, self._copy_async = driver.cuStreamWaitValue32_v2, driver.cuMemcpyHtoDAsync_v2
        self._wait.argtypes = (ctypes.c_void_p, _ADDRESS, ctypes.c_uint32, ctypes.c_uint)
        self._copy_async.argtypes = (_ADDRESS, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

    def block(self) -> Callable[[], None]:
        """Block the stream until the returned function is called. If this method is called several times, the
        returned functions must be called in the same order, also after an error: nothing else ends the
        wait."""
        self._num_waits = (self._num_waits + 1) & 0xFFFFFFFF
        _check(self._wait(self._stream, self._count_address, self._num_waits, _AT_LEAST))
        return partial(self._set_count, self._num_waits)

    def _set_count(self, count: int) -> None:
        self._count[0] = count

    def copy(self, source: Tensor, into: Tensor) -> None:
        """Copy pinned host memory to the device on the stream. `source` must not change during the copy."""
        _check(self._copy_async(into.data_ptr(), source.data_ptr(), source.nbytes, self._stream))


def _check(failed: int) -> None:
    if failed:
        raise torch.AcceleratorError(f"CUDA error {failed} on the mask stream")


def open_host_signal(stream: torch.cuda.Stream) -> HostSignal | None:
    """Return a host signal; None if the device does not support it, so that the host has to wait."""
    try:
        host_signal = HostSignal(stream)
        host_signal.block()()
    except (AttributeError, OSError, torch.AcceleratorError) as error:
        log.debug("Streams cannot wait for the host on this device: %s", error)
        return None
    return host_signal
