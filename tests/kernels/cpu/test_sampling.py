"""Tests of sampling in C against torch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_threads import torch_threads

from quire.kernels.cpu import native
from quire.kernels.cpu.sampling import FREE, ConstrainedHost, argmax, sample
from quire.sampling import random
from quire.sampling.constrain import apply_masks
from quire.sampling.random import floors, uniform

pytestmark = pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")
THREADS = st.sampled_from([1, 2, 3])
SEEDS = st.integers(0, 99)


@given(
    rows=st.integers(1, 5), size=st.sampled_from([1, 7, 500, 4096, 4097, 49152]), threads=THREADS, seed=SEEDS
)
@settings(max_examples=40)
def test_argmax_is_the_first_of_the_largest(rows: int, size: int, threads: int, seed: int) -> None:
    """Check few distinct values, so that there are many ties."""
    torch.manual_seed(seed)
    x = torch.randint(-4, 4 if seed % 2 else 1 << 30, (rows, size)).float()
    with torch_threads(threads):
        actual = argmax(x)
    assert actual.tolist() == [row.index(max(row)) for row in x.tolist()]


@pytest.mark.parametrize("places", [[0], [3, 9], [49151], [5000, 4095], [20, 44]])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_argmax_of_nonfinite_values(places: list[int], value: float) -> None:
    """Check that NaN is larger than any number, as in torch."""
    x = torch.randn(1, 49152)
    x[0, places] = value
    assert argmax(x).tolist() == x.max(-1).indices.tolist()
    assert argmax(torch.full((1, 9000), value)).tolist() == [0]


class SamplingInputs:
    """Sampling parameters of rows for the sampler and for the kernel."""

    def __init__(self, rows: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.temperature = rng.choice([0.2, 1.0, 1.7], rows).astype(np.float32)
        self.top_k = rng.choice([0, 0, 1, 5, 300], rows)
        self.top_p = rng.choice([1.0, 0.25, 0.9375, 1e-6], rows)
        self.min_p = rng.choice([0.0, 0.0, 0.03125], rows)
        self.seeds = rng.integers(1 << 63, size=rows).astype(np.uint64)
        self.positions = rng.integers(1 << 20, size=rows).astype(np.int32)

    def tensors(self, rows: slice = slice(None)) -> tuple[Tensor, ...]:
        columns = (
            self.temperature,
            self.top_k.astype(np.int32),
            self.top_p.astype(np.float32),
            self.min_p.astype(np.float32),
            self.seeds.view(np.int64),
            self.positions.astype(np.int64),
        )
        return tuple(torch.from_numpy(column[rows].copy()) for column in columns)

    def sample(
        self, logits: Tensor, rows: slice = slice(None), constrained: ConstrainedHost | None = None
    ) -> Tensor:
        temperature, top_k, top_p, min_p, seeds, positions = self.tensors(rows)
        return sample(logits[rows], temperature, top_k, top_p, min_p, seeds, positions, constrained)

    def kept(self, logits: Tensor) -> Tensor:
        """Return the logits that torch samples from."""
        warm = logits.float() / torch.from_numpy(self.temperature)[:, None]
        top_k = np.where(self.top_k < logits.shape[1], self.top_k, 0)
        floor = floors(warm, top_k, self.top_p, self.min_p)
        return warm.masked_fill(warm < floor, -torch.inf)


def some_logits(rows: int, size: int, seed: int) -> Tensor:
    torch.manual_seed(seed)
    logits = torch.randn(rows, size) * (1 + 5 * torch.rand(rows, 1))
    return logits.round(decimals=1) if seed % 3 == 0 else logits  # with ties


@given(
    rows=st.integers(1, 6),
    size=st.sampled_from([1, 3, 511, 512, 700, 5000, 49152]),
    threads=THREADS,
    bf16=st.booleans(),
    seed=SEEDS,
)
@settings(max_examples=80, deadline=None)
def test_sampled_tokens_match_torch(rows: int, size: int, threads: int, bf16: bool, seed: int) -> None:
    """Check thresholds at ties, random numbers and order."""
    logits, inputs = some_logits(rows, size, seed), SamplingInputs(rows, seed)
    logits = logits.bfloat16() if bf16 else logits
    with torch_threads(threads):
        actual = inputs.sample(logits)
    kept, numbers = inputs.kept(logits), uniform(inputs.seeds, inputs.positions)
    expected = random.sample(kept, torch.from_numpy(numbers))
    shares = kept.double().softmax(-1)
    ends = shares.cumsum(-1).gather(1, actual[:, None])[:, 0].numpy()
    starts = ends - shares.gather(1, actual[:, None])[:, 0].numpy()
    assert (shares.gather(1, actual[:, None]) > 0).all()
    assert ((starts - 1e-5 <= numbers) & (numbers <= ends + 1e-5)).all(), (actual, expected)


def test_mismatches_with_torch_are_rare() -> None:
    """Check for a systematic difference below the tolerance of the test above."""
    logits, inputs = some_logits(400, 1000, 1), SamplingInputs(400, 1)
    expected = random.sample(inputs.kept(logits), torch.from_numpy(uniform(inputs.seeds, inputs.positions)))
    assert (inputs.sample(logits) == expected).sum() >= 399


@given(threads=THREADS, seed=SEEDS)
@settings(max_examples=15, deadline=None)
def test_sample_is_equal_alone_and_in_a_batch(threads: int, seed: int) -> None:
    logits, inputs = some_logits(5, 9000, seed), SamplingInputs(5, seed)
    together = inputs.sample(logits).tolist()
    with torch_threads(threads):
        assert [inputs.sample(logits, slice(i, i + 1)).item() for i in range(5)] == together


def test_zero_temperature_takes_the_largest() -> None:
    logits, inputs = some_logits(5, 9000, 1), SamplingInputs(5, 1)
    inputs.temperature[1::2] = 0
    assert inputs.sample(logits)[1::2].tolist() == argmax(logits)[1::2].tolist()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_row_without_a_distribution_gets_its_largest(value: float) -> None:
    logits, inputs = torch.randn(2, 5000), SamplingInputs(2, 0)
    logits[0, 4242] = value
    if value == -torch.inf:
        logits[0] = value
    numbers = torch.from_numpy(uniform(inputs.seeds, inputs.positions))
    warm = logits / torch.from_numpy(inputs.temperature)[:, None]
    assert inputs.sample(logits)[0] == random.sample(warm, numbers)[0]


def test_forbidden_tokens_are_never_sampled() -> None:
    logits = torch.full((64, 5000), -torch.inf)
    logits[:, [7, 4998]] = 1.0
    inputs = SamplingInputs(64, 3)
    inputs.top_k[:] = np.where(inputs.top_k == 1, 2, inputs.top_k)
    inputs.top_p[:] = 1.0
    assert set(inputs.sample(logits).tolist()) == {7, 4998}


@given(
    size=st.sampled_from([1, 33, 512, 700, 5000, 9001]),
    words=st.sampled_from([0, 1, 16, 157, 400]),
    threads=THREADS,
    bf16=st.booleans(),
    seed=SEEDS,
)
@settings(max_examples=60, deadline=None)
def test_sampling_with_masks(size: int, words: int, threads: int, bf16: bool, seed: int) -> None:
    """Check that masks act as minus infinity for missing bits.

    Masks allow none, few, some or all tokens, are shorter and longer than the vocabulary, and belong to some
    rows in any order.
    """
    rows = 7
    logits, inputs = some_logits(rows, size, seed), SamplingInputs(rows, seed)
    inputs.temperature[seed % rows] = 0.0
    logits[3, ::5] = torch.nan
    logits = logits.bfloat16() if bf16 else logits
    masks = torch.randint(-(2**31), 2**31, (5, words), dtype=torch.int64).int()
    masks[1] &= torch.randint(-(2**31), 2**31, (words,), dtype=torch.int64).int() & 0x11
    masks[2, words // 3 :] = 0
    masks[3] = -1
    masks[4] = 0
    mask_of = torch.tensor([2, FREE, 0, 1, 4, FREE, 3], dtype=torch.int32)
    taken = torch.cat([torch.tensor([[2], [3], [0], [6], [4]], dtype=torch.int32), masks], 1)
    expected, before = logits.clone(), logits.clone()
    apply_masks(expected, taken)
    with torch_threads(threads):
        actual = inputs.sample(logits, constrained=ConstrainedHost(mask_of, masks))
        assert actual.tolist() == inputs.sample(expected).tolist()
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
