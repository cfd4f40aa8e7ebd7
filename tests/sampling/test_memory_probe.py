"""Tests of sampling memory: bounded for any batch, and reserved before the cache takes the rest."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from quire import memory
from quire.data.step_plan import Masks
from quire.kernels.cpu import native, sampling
from quire.sampling import memory_probe, sampler
from quire.sampling.constrain import HostMasks
from quire.sampling.memory_probe import everything, probe_memory
from quire.sampling.random import SamplingTensors
from quire.sampling.rows import (
    ALLOWED,
    BANNED,
    BIASED,
    HELD,
    LIMITED,
    LOGPROBS,
    PENALTIES,
    RANDOM,
    TIMED,
    SamplingRows,
)
from quire.sampling.sampler import LOGPROBS_MODES, Sampled, Sampler

CPU = torch.device("cpu")
VOCAB, AT_ONCE = 5_000, 32


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LOGITS_AT_ONCE", AT_ONCE * VOCAB)


def sampling_tensors(num_rows: int) -> SamplingTensors:
    some = torch.ones(num_rows)
    return SamplingTensors(some, some.int(), some, 0 * some, torch.arange(num_rows), torch.arange(num_rows))


def kernel(logits: Tensor, columns: SamplingTensors) -> Tensor:
    return sampling.sample(logits, *columns)


def sampled(sampler: Sampler, logits: Tensor, num_logprobs: int = 20) -> Sampled:
    """Sample rows that use every feature."""
    num_rows = len(logits)
    state, params = SamplingRows(num_rows, VOCAB, CPU), everything(VOCAB, num_logprobs)
    for row in range(num_rows):
        state.admit(row, params, prompt_len=2, seed=row, stop_ids=(0,))
    tokens = np.arange(3 * num_rows, dtype=np.int32).reshape(num_rows, 3)
    lens = np.full(num_rows, 3, np.int32), np.full(num_rows, 2, np.int32)
    rows = np.arange(num_rows, dtype=np.int32)
    return sampler(logits, rows, state, tokens, *lens, tensors=sampling_tensors(num_rows))


def peak_bytes(run: Callable[[], Any]) -> int:
    """Return the peak of torch's allocations beyond the current ones."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as actual:
        run()
    assert actual.profiler is not None and actual.profiler.kineto_results is not None
    events = [event for event in actual.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return int(np.cumsum(sizes).max())


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
@pytest.mark.parametrize("how", ["torch", "kernel"])
def test_large_batch_takes_no_more_than_estimated(mode: str, how: str) -> None:
    """Check that not all logits are copied to float32 at once, which may take several gigabytes."""
    if how == "kernel" and native.library() is None:
        pytest.skip("there are no native kernels here")
    sampler = Sampler(VOCAB, CPU, mode, kernel if how == "kernel" else None)
    logits = torch.randn(4 * AT_ONCE, VOCAB).bfloat16()
    sampled(sampler, logits[:1].clone())
    peak = peak_bytes(lambda: sampled(sampler, logits))
    assert AT_ONCE * VOCAB * 4 < peak <= memory._COPIES * AT_ONCE * VOCAB * 4


def test_pieces_of_a_batch_match_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(2 * AT_ONCE + 5, VOCAB)
    for mode in LOGPROBS_MODES:
        monkeypatch.setattr(memory, "LOGITS_AT_ONCE", AT_ONCE * VOCAB)
        pieces = sampled(Sampler(VOCAB, CPU, mode), logits.clone())
        monkeypatch.setattr(memory, "LOGITS_AT_ONCE", 1 << 30)
        full = sampled(Sampler(VOCAB, CPU, mode), logits.clone())
        assert torch.equal(pieces.token_ids, full.token_ids) and pieces.logprobs == full.logprobs
        assert len(full.logprobs) == len(logits)


def test_profiling_run_uses_every_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that memory is reserved for each feature."""
    seen: list[int] = []

    class Watched(Sampler):
        def __call__(
            self, logits: Tensor, rows: Any, state: SamplingRows, *rest: Any, **more: Any
        ) -> Sampled:
            seen.append(len(rows))
            seen.append(int(np.bitwise_and.reduce(state.flags[rows])))
            return super().__call__(logits, rows, state, *rest, **more)

    positions: list[int] = []

    def head(states: Tensor) -> Tensor:
        positions.append(len(states))
        return torch.zeros(len(states), VOCAB)

    masked: list[int] = []

    class Confining(HostMasks):
        def __call__(self, logits: Tensor, masks: Masks, places: Any) -> Tensor:
            masked.append(len(masks.rows))
            return super().__call__(logits, masks, places)

    monkeypatch.setattr(sampler, "open_masks", lambda device: Confining())
    monkeypatch.setattr(memory_probe, "POSITIONS_AT_ONCE", 16)
    logits, hidden = torch.zeros(3 * AT_ONCE, VOCAB), torch.zeros(100, 8)
    probe_memory(Watched(VOCAB, CPU), head, hidden, logits, sampling_tensors(3 * AT_ONCE), 20)
    every = RANDOM | LIMITED | PENALTIES | ALLOWED | BANNED | HELD | BIASED | LOGPROBS | TIMED
    assert seen == [1, every, AT_ONCE, every] and positions == [16] and masked == [3 * AT_ONCE]
