"""Tests of the early start of an engine core: only where one core process on a CPU runs the worker."""

from typing import Any

import pytest

from quire.config.machine import Machine
from quire.config.server_sections import HttpSection
from quire.entrypoints import early_core as module
from quire.entrypoints.early_core import early_core

GIB = 2**30


class FakeProcess:
    """A process that imports nothing, and records whether it was ended."""

    is_closed = False

    def __init__(self, prepare: object, name: str) -> None:
        self.prepare, self.name = prepare, name

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The device of the machine, which a test may replace."""
    kinds = ["cpu"]
    monkeypatch.setattr(module, "WaitingProcess", FakeProcess)
    monkeypatch.setattr(module, "detect", lambda _: Machine(kinds[0], "a device", 1, GIB, GIB, 1))
    return kinds


@pytest.mark.parametrize(
    "values", [{}, {"device": "cpu", "tensor_parallel_size": 1, "distributed_executor_backend": "uni"}]
)
def test_one_core_on_a_cpu_starts_early(device: list[str], values: dict[str, Any]) -> None:
    with early_core(values, HttpSection()) as process:
        assert isinstance(process, FakeProcess) and not process.is_closed
    assert process.is_closed


@pytest.mark.parametrize(
    "values",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"data_parallel_size": 2},
        {"nnodes": 2},
        {"distributed_executor_backend": "mp"},
        {"device": "cuda"},
    ],
)
def test_other_layouts_start_no_early_core(device: list[str], values: dict[str, Any]) -> None:
    """Catches 200 MB of torch in a core process whose workers are other processes."""
    with early_core(values, HttpSection()) as process:
        assert process is None


def test_gpu_or_headless_server_starts_no_early_core(device: list[str]) -> None:
    """Catches processes that compile kernels for a GPU and start only after the import of torch."""
    with early_core({}, HttpSection(headless=True)) as process:
        assert process is None
    device[0] = "cuda"
    with early_core({}, HttpSection()) as process:
        assert process is None


def test_refused_configuration_ends_the_early_core(device: list[str]) -> None:
    """Catches a process that still imports torch after `quire serve` has refused a flag."""
    with pytest.raises(ValueError), early_core({}, HttpSection()) as process:
        raise ValueError
    assert isinstance(process, FakeProcess) and process.is_closed
