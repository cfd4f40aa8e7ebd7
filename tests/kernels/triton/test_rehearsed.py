"""Tests that all SSM kernels that steps launch are compiled at start-up."""

from typing import Any

import numpy as np
import pytest
import torch

from quire.kernels.reference.ssm import (
    ConvWeights,
    DecayRates,
    DeltaInputs,
    MambaInputs,
    ScanInputs,
    SSMSequences,
)
from quire.kernels.triton import launch
from quire.kernels.triton.ssm import TritonStateOps
from quire.memory import ladder
from quire.worker.cuda.dummy_batches import _MIXED, _decodes

MOST_ROWS, SIZE = 256, 16
OPS = TritonStateOps()


@pytest.fixture
def recorded_launches(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """Return the recorded launches with their specializations."""
    actual: set[Any] = set()

    def note(wanted: set[Any], kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        actual.add((kernel.fn.__name__, *map(launch._specialization, args), *options.items()))

    monkeypatch.setattr(launch, "_compile_once", note)
    monkeypatch.setattr(launch, "_can_overlap", lambda: True)
    return actual


def step(lens: np.ndarray[Any, Any], channels: int) -> None:
    """Run the operations of a layer of each kind; their results are not checked."""
    total, heads, dim = int(lens.sum()), channels // 64, 64
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lens)]).astype(np.int32))
    seqs = SSMSequences(starts, torch.arange(len(lens), dtype=torch.int32), torch.zeros(total).long(), lens)
    x, small, state = (
        torch.empty(total, channels),
        torch.empty(total, 2 * heads),
        torch.empty(1, channels, SIZE),
    )
    rates, skip = DecayRates(torch.empty(channels, SIZE), torch.empty(channels)), torch.empty(channels)
    b, c = torch.empty(total, 2 * SIZE).chunk(2, 1)
    OPS.conv(x, ConvWeights(torch.empty(channels, 4), None), torch.empty(1, channels, 3), seqs)
    OPS.select(x, x, MambaInputs(x, b, c, rates, skip), state, seqs)
    by_head = DecayRates(torch.empty(heads), torch.empty(heads))
    xbc = torch.empty(total, channels + 2 * SIZE)
    OPS.scan(xbc, ScanInputs(small[:, :heads], by_head, skip), torch.empty(1, heads, dim, SIZE), seqs)
    qkv = torch.empty(total, 3 * channels)
    OPS.delta(qkv, DeltaInputs(*small.chunk(2, 1), by_head), torch.empty(1, heads, dim, dim), seqs)


@pytest.mark.parametrize("channels", [1024, 4096, 8192])
def test_steps_launch_no_new_specialization(
    channels: int, recorded_launches: set[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check tables at another address, more decodes beside a prompt, and several prompts."""
    token = launch._requested.set(set())
    try:
        mixed = [_decodes(min(count, MOST_ROWS), prompt) for count, prompt in _MIXED]
        for lens in (*mixed, *map(_decodes, ladder(MOST_ROWS)), _decodes(0, 512)):
            step(lens, channels)
    finally:
        launch._requested.reset(token)
    rehearsed, rng = set(recorded_launches), np.random.default_rng(0)
    recorded_launches.clear()
    monkeypatch.setattr("quire.kernels.triton.ssm.launch", _recording(recorded_launches))
    for _ in range(40):
        prompts = rng.integers(2, 150, rng.integers(0, 9))
        lens = rng.permutation([*prompts, *[1] * rng.integers(len(prompts) == 0, 200)]).astype(np.int32)
        step(lens, channels)
    assert len(recorded_launches) > 10 and recorded_launches <= rehearsed


def _recording(recorded_launches: set[Any]) -> Any:
    """Record launches without running them."""

    def launched(kernel: Any, *grid: int) -> Any:
        def run(*args: Any, **options: Any) -> None:
            recorded_launches.add((kernel.fn.__name__, *map(launch._specialization, args), *options.items()))

        return run

    return launched
