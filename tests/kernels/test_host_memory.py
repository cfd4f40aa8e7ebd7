"""Tests of pinned host memory."""

from types import SimpleNamespace

import pytest
import torch

from quire.kernels.host_memory import host_memory, pin, unpin


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Replace CUDA's functions; return their names and addresses, as they are called."""
    called: list[tuple[str, int]] = []

    def register(address: int, num_bytes: int, flags: int) -> int:
        called.append(("pin", address))
        return 0

    functions = SimpleNamespace(
        cudaHostRegister=register,
        cudaHostUnregister=lambda address: called.append(("unpin", address)),
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: functions)
    return called


def test_memory_is_unpinned_when_its_last_view_goes(calls: list[tuple[str, int]]) -> None:
    """Otherwise CUDA copies to and from the old pages of whatever memory has the address next."""
    memory = host_memory(8192)
    address, view = memory.data_ptr(), memory[4096:]
    assert pin(memory)
    del memory
    assert calls == [("pin", address)]
    del view
    assert calls == [("pin", address), ("unpin", address)]


def test_memory_is_unpinned_once(calls: list[tuple[str, int]]) -> None:
    memory = host_memory(4096)
    assert pin(memory)
    unpin(memory)
    unpin(memory)
    del memory
    assert [name for name, _ in calls] == ["pin", "unpin"]
