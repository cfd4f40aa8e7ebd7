"""Tests of the buffers of CUDA IPC, with a CUDA runtime that copies memory of this process."""

import contextlib
import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.data.kv_transfer import NONCE_BYTES, TargetMemory
from quire.worker.cuda import ipc
from quire.worker.cuda.ipc import CudaIpc

GPU = torch.device("cuda")


class Runtime:
    """The functions of the CUDA runtime that are used, for memory of this process."""

    def __init__(self) -> None:
        self.memory: list[Any] = []
        self.opened: list[int] = []
        self.failing = ""
        self.num_read_errors = 0

    def cudaMalloc(self, pointer: Any, size: Any) -> int:
        if self.failing == "cudaMalloc":
            return 2
        self.memory.append(ctypes.create_string_buffer(size.value))
        pointer._obj.value = ctypes.addressof(self.memory[-1])
        return 0

    def cudaFree(self, pointer: Any) -> int:
        self.memory.pop()
        return 0

    def cudaIpcGetMemHandle(self, handle: Any, pointer: Any) -> int:
        if self.failing == "cudaIpcGetMemHandle":
            return 801
        handle._obj.data[:8] = list(pointer.value.to_bytes(8, "little"))
        return 0

    def cudaIpcOpenMemHandle(self, pointer: Any, handle: Any, flags: Any) -> int:
        address = int.from_bytes(bytes(handle)[:8], "little")
        if address not in map(ctypes.addressof, self.memory):
            return 400
        pointer._obj.value = address
        self.opened.append(address)
        return 0

    def cudaIpcCloseMemHandle(self, pointer: Any) -> int:
        self.opened.remove(pointer.value)
        return 0

    def cudaMemcpyAsync(self, target: Any, source: Any, size: Any, kind: Any, stream: Any) -> int:
        ctypes.memmove(target.value, source.value, size.value)
        return 0

    def cudaGetLastError(self) -> int:
        self.num_read_errors += 1
        return 0


def tensor_of(memory: Any, device: Any) -> Tensor:
    """Return a tensor on the memory that `__cuda_array_interface__` describes."""
    described = memory.__cuda_array_interface__
    size, (address, _) = described["shape"][0], described["data"]
    return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    runtime, stream = Runtime(), SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(ipc, "_runtime", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch, "as_tensor", tensor_of)
    yield runtime


def test_a_written_buffer_has_the_entries(runtime: Runtime) -> None:
    reader, writer = CudaIpc(GPU, 100), CudaIpc(GPU, 100)
    buffer = reader.take()
    assert buffer is not None and len(buffer.data) == 100
    peer = writer.open(buffer.target)
    assert peer is not None and writer.open(buffer.target) is peer and len(runtime.opened) == 1
    peer.write(10, torch.arange(90, dtype=torch.uint8))
    assert buffer.data[10:].tolist() == [*range(90)] and not buffer.data[:10].any()
    writer.close()
    assert not runtime.opened


def test_buffers_of_other_processes_are_not_opened(runtime: Runtime) -> None:
    """A handle may be that of memory of another process, or of memory that was freed."""
    reader, writer = CudaIpc(GPU, 100), CudaIpc(GPU, 100)
    buffer = reader.take()
    assert buffer is not None
    handle, nonce = buffer.target.handle, buffer.target.nonce
    for target in (
        TargetMemory(bytes(NONCE_BYTES), handle=handle),
        TargetMemory(nonce, handle=bytes(64)),
        TargetMemory(nonce, handle=handle[1:]),
        TargetMemory(b"", handle=handle),
    ):
        assert writer.open(target) is None and not runtime.opened
    assert runtime.num_read_errors == 1, "torch must not find the error of the open"
    assert writer.open(buffer.target) is not None


def test_the_first_of_many_buffers_is_closed(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "_MAX_PEER_BUFFERS", 2)
    reader, writer = CudaIpc(GPU, 100), CudaIpc(GPU, 100)
    buffers = [reader.take() for _ in range(3)]
    for buffer in buffers:
        assert buffer is not None and writer.open(buffer.target) is not None
    assert runtime.opened == [ctypes.addressof(memory) for memory in runtime.memory[1:]]


def test_a_buffer_is_used_by_one_load_at_a_time(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr(ipc.time, "monotonic", lambda: now[0])
    buffers = CudaIpc(GPU, 100)
    taken = [buffers.take() for _ in range(9)]
    assert len({*taken}) == 9 and taken[8] is None
    first, second = taken[:2]
    assert first is not None and second is not None
    buffers.give_back(first, 10.0)
    assert buffers.take() is None
    buffers.give_back(second, 0.0)
    assert buffers.take() is second and buffers.take() is None
    now[0] += 10
    assert buffers.take() is first


@pytest.mark.parametrize("name", ["cudaMalloc", "cudaIpcGetMemHandle"])
def test_without_memory_or_handles_there_is_no_buffer(
    name: str, runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "quire")
    runtime.failing = name
    buffers = CudaIpc(GPU, 100)
    assert buffers.take() is None and not runtime.memory
    assert f"{name} has failed with CUDA error" in caplog.text
    runtime.failing = ""
    assert buffers.take() is not None
