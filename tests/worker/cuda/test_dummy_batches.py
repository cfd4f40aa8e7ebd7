"""Tests of the dummy steps of the warm-up, which compile all kernels before the first request."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.attention.batch import Batch
from quire.sampling.rows import SamplingRows
from quire.worker.cuda import dummy_batches
from quire.worker.cuda.device import CudaDevice
from quire.worker.device import Model
from quire.worker.rows import Rows

CPU, VOCAB, HIDDEN, MAX_ROWS, MAX_LEN = torch.device("cpu"), 32, 8, 6, 64


class Steps:
    """Records the model's inputs and the sampler's calls."""

    def __init__(self, *, adapters: bool = False) -> None:
        self.given: list[tuple[tuple[int, ...], bool, bool, bool]] = []
        self.sampled: list[tuple[int, torch.dtype]] = []
        attention: Any = SimpleNamespace(plan=lambda group: None)
        slots: Any = SimpleNamespace(plan=lambda lora: lora) if adapters else None
        model = Model(
            self.forward, lambda states, *lora: states[:, :1].expand(-1, VOCAB), attention, adapters=slots
        )
        rows = Rows(
            max_rows=MAX_ROWS, max_len=MAX_LEN, block_size=4, sampling=SamplingRows(MAX_ROWS, VOCAB, CPU)
        )
        self.device = CudaDevice(model, rows, self.sample, CPU)

    def forward(self, batch: Batch) -> Tensor:
        lens = tuple(batch.query_starts.diff().tolist())
        self.given.append((lens, batch.are_decodes, batch.are_mixed, batch.lora is not None))
        return torch.zeros(len(batch.token_ids), HIDDEN)

    def sample(self, logits: Tensor, columns: Any, constrained: Any) -> Tensor:
        self.sampled.append((len(logits), logits.dtype))
        return logits.argmax(-1)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(dummy_batches, "compiling", nullcontext)
    monkeypatch.setattr(dummy_batches, "apply_masks", lambda logits, packed: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return SimpleNamespace(
        scheduler=SimpleNamespace(max_num_seqs=MAX_ROWS, max_num_batched_tokens=48),
        checkpoint=SimpleNamespace(facts=SimpleNamespace(vocab=VOCAB)),
        model=SimpleNamespace(dtype="bfloat16"),
    )


def test_warm_up_runs_steps_of_every_kind(config: Any) -> None:
    """Check that no kind is compiled during a request."""
    steps = Steps()
    steps.device.dummy_batches.compile(config, [1, 3], [(4, 16)], None)
    kinds = [item[:3] for item in steps.given]
    for count in (1, 2, 4, 6):
        assert ((1,) * count, False, False) in kinds
    assert ((48,), False, False) in kinds and ((24, 1), False, False) in kinds
    assert ((3, 3, 3, 3, 3, 3), True, False) in kinds, "drafts of the largest number of rows"
    assert ((4, 4, 4, 4), False, True) in kinds, "a short step with any sequences"
    assert {size for size, dtype in steps.sampled if dtype == torch.bfloat16} == {1, 6}
    assert {size for size, dtype in steps.sampled if dtype == torch.float32} == {1, 6}


def test_warm_up_with_lora_runs_each_step_with_and_without_adapters(config: Any) -> None:
    steps = Steps(adapters=True)
    steps.device.dummy_batches.compile(config, [], [], None)
    with_adapters = [lens for lens, *_, has_adapters in steps.given if has_adapters]
    assert with_adapters == [lens for lens, *_, has_adapters in steps.given if not has_adapters]
    assert {(48,), (24,), (12,), (6,), (3,), (1,)} <= set(with_adapters), "shorter and shorter prompts"


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "lens"),
    [(1, 1, [1]), (3, 8, [1, 1, 1]), (10, 4, [3, 3, 2, 2]), (MAX_LEN + 1, 1, [33, 32])],
)
def test_dummy_tokens_are_split_into_sequences_below_the_limit(
    num_tokens: int, num_seqs: int, lens: list[int]
) -> None:
    assert np.array_equal(Steps().device.dummy_batches.split(num_tokens, num_seqs), lens)
