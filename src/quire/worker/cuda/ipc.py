"""CUDA IPC: KV cache entries move between the GPU memory of two engines on one machine.

The engine that reads offers a buffer, and the engine that keeps the entries writes to it. Buffers are not
from torch's allocator, whose expandable segments have no handles of CUDA IPC. They are never freed: CUDA
requires that other processes close their mappings first, and a process that has ended may not do that."""

import ctypes
import secrets
import threading
import time
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quire.data.kv_transfer import DATA_START, NONCE_BYTES, TargetMemory
from quire.logs import get_logger, warn_once

log = get_logger(__name__)

HANDLE_BYTES = 64
_MAX_BUFFERS = 8
"""Most buffers of this engine, with those that are not used any more after a transfer that did not end."""
_MAX_PEER_BUFFERS = 64
"""Most buffers of other engines that are open; the one that was opened first is closed for a new one."""
_LAZY_PEER_ACCESS = 1
"""cudaIpcMemLazyEnablePeerAccess: buffers of other GPUs may be opened, if these GPUs reach each other."""
_ANY_DIRECTION = 4
"""cudaMemcpyDefault: CUDA finds out from the addresses where the memory is."""


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = (("data", ctypes.c_ubyte * HANDLE_BYTES),)


@cache
def _runtime() -> ctypes.CDLL:
    """Return the CUDA runtime that torch has loaded; raise OSError if there is none."""
    return ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")


def _call(name: str, *args: Any) -> None:
    """Call a function of the CUDA runtime on the current device; raise OSError if it fails."""
    runtime = _runtime()
    if code := getattr(runtime, name)(*args):
        runtime.cudaGetLastError()  # else torch would report the error at its next launch
        raise OSError(f"{name} has failed with CUDA error {code}")


def _copy(target: int, source: int, num_bytes: int) -> None:
    """Start a copy on the current stream."""
    _call(
        "cudaMemcpyAsync",
        ctypes.c_void_p(target),
        ctypes.c_void_p(source),
        ctypes.c_size_t(num_bytes),
        ctypes.c_int(_ANY_DIRECTION),
        ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
    )


class _DeviceBytes:
    """Bytes at an address of the GPU, in the form from which torch makes a tensor without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


class IpcBuffer:
    """GPU memory of this engine to which another engine on this machine may write KV cache entries. It begins
    with random bytes, which that engine compares before it writes."""

    def __init__(self, num_bytes: int) -> None:
        """Allocate the buffer on the current device; raise OSError if there is no memory, or no CUDA IPC."""
        pointer, handle = ctypes.c_void_p(), _Handle()
        size = DATA_START + num_bytes
        _call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(size))
        try:
            _call("cudaIpcGetMemHandle", ctypes.byref(handle), pointer)
        except OSError:
            _call("cudaFree", pointer)
            raise
        memory = torch.as_tensor(_DeviceBytes(pointer.value or 0, size), device="cuda")
        nonce = secrets.token_bytes(NONCE_BYTES)
        memory[:NONCE_BYTES].copy_(torch.frombuffer(bytearray(nonce), dtype=torch.uint8))
        self.target = TargetMemory(nonce, handle=bytes(handle))
        self.data = memory[DATA_START:]


class PeerBuffer:
    """The opened buffer of another engine."""

    def __init__(self, target: TargetMemory) -> None:
        """Open the buffer on the current device; raise OSError if it is not that of a process on this machine
        whose GPU memory this GPU reaches, or does not begin with its nonce."""
        pointer, actual = ctypes.c_void_p(), ctypes.create_string_buffer(NONCE_BYTES)
        flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
        handle = _Handle.from_buffer_copy(target.handle)
        _call("cudaIpcOpenMemHandle", ctypes.byref(pointer), handle, flags)
        self._address = pointer.value or 0
        try:
            _copy(ctypes.addressof(actual), self._address, NONCE_BYTES)
            torch.cuda.current_stream().synchronize()
            if not secrets.compare_digest(actual.raw, target.nonce):
                raise OSError("the buffer is that of another process")
        except OSError:
            self.close()
            raise

    def write(self, start: int, contents: Tensor) -> None:
        """Start to copy `contents`, which are contiguous, to byte `start`, on the current stream."""
        _copy(self._address + DATA_START + start, contents.data_ptr(), contents.nbytes)

    def close(self) -> None:
        _call("cudaIpcCloseMemHandle", ctypes.c_void_p(self._address))


class CudaIpc:
    """The buffers of this engine, to which other engines write, and the opened buffers of other engines."""

    def __init__(self, device: torch.device, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._stream = torch.cuda.Stream(device)
        self._free: list[tuple[float, IpcBuffer]] = []
        """Buffers that are not in use, with the monotonic time from which they may be used."""
        self._num_buffers = 0
        self._lock = threading.Lock()
        """Held while `_free` and `_num_buffers` change."""
        self._opened: dict[TargetMemory, PeerBuffer | None] = {}
        """Buffers of other engines, in the order in which they were opened; None: the buffer cannot be
        opened."""

    # ---- for loads; may run in any thread

    def take(self) -> IpcBuffer | None:
        """Return a buffer that no other engine writes to; None if there is none."""
        with self._lock:
            now = time.monotonic()
            for free in self._free:
                if free[0] <= now:
                    self._free.remove(free)
                    return free[1]
            if self._num_buffers == _MAX_BUFFERS:
                return None
            self._num_buffers += 1
        try:
            with torch.cuda.stream(self._stream):
                return IpcBuffer(self._buffer_bytes)
        except OSError as error:
            warn_once(log, f"Prefixes from engines on this machine move through host memory: {error}")
            return None

    def give_back(self, buffer: IpcBuffer, delay_s: float) -> None:
        """Keep a buffer for loads that begin after `delay_s` seconds or later. A buffer that another engine
        may write to after that must not be given back."""
        with self._lock:
            self._free.append((time.monotonic() + delay_s, buffer))

    # ---- for reads of other engines; runs in one thread at a time

    def open(self, target: TargetMemory) -> PeerBuffer | None:
        """Return the buffer of another engine, or None if it cannot be opened."""
        if target not in self._opened:
            while len(self._opened) >= _MAX_PEER_BUFFERS:
                self._close(next(iter(self._opened)))
            self._opened[target] = self._open(target)
        return self._opened[target]

    def _open(self, target: TargetMemory) -> PeerBuffer | None:
        if len(target.handle) != HANDLE_BYTES or len(target.nonce) != NONCE_BYTES:
            return None
        try:
            with torch.cuda.stream(self._stream):
                return PeerBuffer(target)
        except OSError as error:
            log.debug("Entries are not written by CUDA IPC: %s", error)
            return None

    def _close(self, target: TargetMemory) -> None:
        buffer = self._opened.pop(target)
        if buffer is not None:
            with torch.cuda.stream(self._stream):
                buffer.close()

    def close(self) -> None:
        """Close the buffers of other engines."""
        for target in list(self._opened):
            self._close(target)
