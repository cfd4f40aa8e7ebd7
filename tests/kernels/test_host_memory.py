"""Tests of the lifetime of pinned host memory, with stand-ins for the calls of CUDA."""

import gc
from pathlib import Path

import pytest
import torch

from quire.kernels.host_memory import host_memory, pin, unpin


class Registry:
    """Memory that is registered with CUDA, by address. Memory may only be unregistered while it is mapped."""

    def __init__(self) -> None:
        self.registered: set[int] = set()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        failed = 712 if address in self.registered else 0
        self.registered.add(address)
        return failed

    def cudaHostUnregister(self, address: int) -> int:
        lines = Path("/proc/self/maps").read_text().splitlines()
        spans = ([int(end, 16) for end in line.split()[0].split("-")] for line in lines)
        assert any(first <= address < behind for first, behind in spans), "the memory is unmapped already"
        self.registered.remove(address)
        return 0


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    made = Registry()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


@pytest.mark.parametrize("unpins", [True, False])
def test_freed_memory_is_not_pinned(unpins: bool, registry: Registry) -> None:
    """The next mapping at an address would otherwise be copied from and to the pages of the last one."""
    memory = host_memory(1 << 20)
    assert pin(memory) and registry.registered == {memory.data_ptr()}
    part = memory.view(2, -1)[1]
    del memory
    gc.collect()
    assert registry.registered, "a part of the memory is still used"
    if unpins:
        unpin(part.as_strided((1 << 20,), (1,), 0))
        assert not registry.registered
    del part
    gc.collect()
    assert not registry.registered
