"""Signal: a stream of a CUDA device waits for something that happens on the host."""

import ctypes
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from quire.logs import get_logger

log = get_logger(__name__)

_AT_LEAST = 0
"""CU_STREAM_WAIT_VALUE_GEQ, by the difference of both in 32 bits."""


class Signal:
    """A count in host memory, which the stream reads by itself until it is high enough. Whoever is told to
    raise it must do so, whatever happens: nothing else ends the wait."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """An OSError or an AttributeError where there is no driver that can."""
        self._stream = stream.cuda_stream
        self._memory = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._count = self._memory.numpy().view(np.uint32)
        self._num_held = 0
        self._call = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
        self._call.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)

    def hold(self) -> Callable[[], None]:
        """What comes next on the stream waits until this is called; signals are raised in their order."""
        self._num_held = (self._num_held + 1) & 0xFFFFFFFF
        if failed := self._call(self._stream, self._memory.data_ptr(), self._num_held, _AT_LEAST):
            raise RuntimeError(f"the stream cannot wait (CUDA error {failed})")
        return partial(self._raise_to, self._num_held)

    def _raise_to(self, count: int) -> None:
        self._count[0] = count


def open_signal(stream: torch.cuda.Stream) -> Signal | None:
    """None where the device cannot wait so; then the host does."""
    try:
        signal = Signal(stream)
        signal._count[0] = 1
        signal.hold()
    except (AttributeError, OSError, RuntimeError) as error:
        log.debug("No stream waits for the host here: %s", error)
        return None
    return signal
