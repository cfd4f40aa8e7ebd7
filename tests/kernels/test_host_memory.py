"""Tests of pinned host memory."""

import threading
from types import SimpleNamespace

import pytest
import torch

from quire.kernels import host_memory as host_memory_module
from quire.kernels.host_memory import (
    host_memory,
    pin,
    pin_in_background,
    rows_pinned_together,
    unpin,
)


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


@pytest.mark.parametrize(
    ("row_bytes", "expected"), [(2 << 20, 32), (4096, 16384), (6144, 10922), (1001, 65536)]
)
def test_rows_pinned_together_end_with_a_page(row_bytes: int, expected: int) -> None:
    num_rows = rows_pinned_together(row_bytes)
    assert num_rows == expected
    assert num_rows * row_bytes % 4096 == 0


def test_memory_is_pinned_in_the_background(
    calls: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parts are pinned once, and unpinned when the memory is freed."""
    monkeypatch.setattr(host_memory_module, "_PIN_BYTES", 8192)
    rows = host_memory(10 * 4096).view(10, 4096)
    rows[3] = 7
    address = rows.data_ptr()
    for thread in pin_in_background(rows):
        thread.join()
    parts = [address + first for first in range(0, 10 * 4096, 8192)]
    assert sorted(calls) == [("pin", part) for part in parts]
    assert (rows[3] == 7).all(), "what is in the memory stays"
    calls.clear()
    del rows
    assert sorted(calls) == [("unpin", part) for part in parts]


def test_memory_that_is_freed_is_not_pinned(
    calls: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    threads = pin_in_background(host_memory(8192).view(2, 4096))
    for thread in threads:
        thread.run()
    assert calls == []
