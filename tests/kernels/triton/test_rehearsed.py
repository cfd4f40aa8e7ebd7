"""What an engine has compiled at its start are all kernels of states that its steps ask for."""

from typing import Any

import numpy as np
import pytest
import torch

from quire.kernels.reference.ssm import DecayRates, MambaInputs, SSMSequences
from quire.kernels.triton import launch
from quire.kernels.triton.ssm import TritonStateOps
from quire.memory import ladder
from quire.worker.cuda.warmup import _MIXED, _decodes

MOST_ROWS, SIZE = 256, 16
OPS = TritonStateOps()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """What was launched, each as it would be compiled."""
    found: set[Any] = set()

    def note(wanted: set[Any], kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        found.add((kernel.fn.__name__, *map(launch._specialization, args), *options.items()))

    monkeypatch.setattr(launch, "_compile_once", note)
    monkeypatch.setattr(launch, "_can_overlap", lambda: True)
    return found


def step(lens: np.ndarray[Any, Any], channels: int) -> None:
    """The operations of a layer of each kind; what they compute is not looked at."""
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
    OPS.conv(x, torch.empty(channels, 4), None, torch.empty(1, channels, 3), seqs)
    OPS.select(x, x, MambaInputs(x, b, c, rates, skip), state, seqs)
    by_head = DecayRates(torch.empty(heads), torch.empty(heads))
    xbc = torch.empty(total, channels + 2 * SIZE)
    OPS.scan(xbc, small[:, :heads], by_head, skip, torch.empty(1, heads, dim, SIZE), seqs)
    qkv = torch.empty(total, 3 * channels)
    OPS.delta(qkv, *small.chunk(2, 1), by_head, torch.empty(1, heads, dim, dim), seqs)


@pytest.mark.parametrize("channels", [1024, 4096, 8192])
def test_steps_ask_for_nothing_new(channels: int, asked: set[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that begins at another place, more decodes beside a prompt, several prompts at once."""
    token = launch._requested.set(set())
    try:
        mixed = [_decodes(min(count, MOST_ROWS), prompt) for count, prompt in _MIXED]
        for lens in (*mixed, *map(_decodes, ladder(MOST_ROWS)), _decodes(0, 512)):
            step(lens, channels)
    finally:
        launch._requested.reset(token)
    rehearsed, rng = set(asked), np.random.default_rng(0)
    asked.clear()
    monkeypatch.setattr("quire.kernels.triton.ssm.launch", _recording(asked))
    for _ in range(40):
        prompts = rng.integers(2, 150, rng.integers(0, 9))
        lens = rng.permutation([*prompts, *[1] * rng.integers(len(prompts) == 0, 200)]).astype(np.int32)
        step(lens, channels)
    assert len(asked) > 10 and asked <= rehearsed


def _recording(asked: set[Any]) -> Any:
    """Launches as in traffic, which are noted and do not run."""

    def launched(kernel: Any, *grid: int) -> Any:
        def run(*args: Any, **options: Any) -> None:
            asked.add((kernel.fn.__name__, *map(launch._specialization, args), *options.items()))

        return run

    return launched
