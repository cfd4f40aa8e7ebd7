"""Tests of random sampling: the random numbers, the logit thresholds, and the inverse CDF."""

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.sampling import random as module
from quire.sampling.random import floors, sample, uniform

ROUNDING = 1e-6
"""Tolerance of the border between two tokens: weights are float32, each exact to 2 ** -23."""


def kept(logits: Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """Return the kept tokens of a row by min_p, top_k, then top_p, including ties with the last one."""
    values = logits.double().tolist()
    weight = {i: float(np.exp(v - max(values))) for i, v in enumerate(values)}
    ids = {i for i in weight if weight[i] >= min_p}
    if top_k:
        last = sorted((values[i] for i in ids), reverse=True)[:top_k][-1]
        ids = {i for i in ids if values[i] >= last}
    total, mass = sum(weight[i] for i in ids), 0.0
    for i in sorted(ids, key=lambda i: -values[i]):
        if mass >= top_p * total:
            break
        mass, last = mass + weight[i], values[i]
    return {i for i in ids if values[i] >= last} if top_p < 1 else ids


def check_floors(logits: Tensor, top_k: list[int], top_p: list[float], min_p: list[float]) -> None:
    floor = floors(logits, np.array(top_k, np.int64), np.array(top_p), np.array(min_p))
    for i in range(len(logits)):
        actual = set((logits[i] >= floor[i]).nonzero()[:, 0].tolist())
        assert actual == kept(logits[i], top_k[i], top_p[i], min_p[i]), (i, top_k[i], top_p[i], min_p[i])


@pytest.mark.parametrize("seed", range(5))
def test_kept_sets_are_exact_for_every_mix_of_limits(seed: int) -> None:
    """Check the bound of k, that top_p applies after top_k, and that rows are independent."""
    generator = torch.Generator().manual_seed(seed)
    mixes = [(k, p, m) for k in (0, 1, 3, 40) for p in (1.0, 0.9, 0.5, 1e-6) for m in (0.0, 0.02, 1.0)]
    logits = torch.randn(len(mixes), 50, generator=generator) * 3
    check_floors(logits, *(list(column) for column in zip(*mixes, strict=True)))


@pytest.mark.parametrize("first", [1, 4, 64])
def test_top_p_widens_until_the_mass_is_reached(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the nucleus is not limited to the first ranked candidates."""
    monkeypatch.setattr(module, "_NUCLEUS", first)
    logits = (
        torch.randn(12, 60, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.01, 5, 12)[:, None]
    )
    check_floors(logits, [0] * 12, [0.95, 0.3, 0.999] * 4, [0.0] * 12)
    check_floors(logits, [0, 2, 55] * 4, [0.95] * 12, [0.0, 0.1] * 6)


def test_no_token_is_kept_beyond_exactly_the_mass_of_top_p() -> None:
    """Check weights that are exactly 1 for logits that are not equal."""
    logits = torch.tensor([[0.0, -1e-9, -2e-9, -3e-9]])
    floor = floors(logits, np.array([0]), np.array([0.5]), np.array([0.0]))
    assert (logits >= floor).tolist() == [[True, True, False, False]]


def test_ties_with_the_last_kept_token_are_kept() -> None:
    """Check that the kept set does not depend on the sort order of ties."""
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.0]]).repeat(2, 1)
    floor = floors(logits, np.array([2, 0]), np.array([1.0, 0.6]), np.zeros(2))
    assert (logits >= floor).tolist() == [[True, True, True, True, False]] * 2


def test_rows_without_limits_keep_everything() -> None:
    logits = torch.randn(2, 9)
    assert (logits >= floors(logits, np.zeros(2, np.int64), np.ones(2), np.zeros(2))).all()


@pytest.mark.parametrize("vocab", [1, 7, 511, 512, 513, 1024, 1500])
def test_inverse_cdf_matches_a_loop(vocab: int) -> None:
    """Check block borders and the last, shorter block."""
    logits = torch.randn(64, vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    numbers = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    numbers[:2] = torch.tensor([0.0, 1 - 2**-53])
    shares = logits.double().softmax(-1)
    tokens = sample(logits, numbers)[:, None]
    ends = shares.cumsum(-1).gather(1, tokens)[:, 0]
    starts = ends - shares.gather(1, tokens)[:, 0]
    assert ((starts <= numbers + ROUNDING) & (numbers <= ends + ROUNDING)).all()
    if vocab > 1:
        assert ((tokens[0] == 0) & (tokens[1] == vocab - 1)).all()


def test_token_without_probability_is_never_sampled() -> None:
    """Check rounding at both ends of the interval and at block borders."""
    logits = torch.full((4, 1300), -torch.inf)
    for row, token in enumerate((0, 511, 512, 1299)):
        logits[row, token] = 1.0
    for number in (0.0, 0.5, 1 - 2**-53):
        numbers = torch.full((4,), number, dtype=torch.float64)
        assert sample(logits, numbers).tolist() == [0, 511, 512, 1299]


def test_invalid_rows_get_a_valid_token_and_others_are_unchanged() -> None:
    good = torch.randn(600)
    broken = [torch.full((600,), -torch.inf), torch.full((600,), torch.nan), good.clone(), good.clone()]
    broken[2][7] = torch.nan
    broken[3][8] = torch.inf
    numbers = torch.full((5,), 0.6, dtype=torch.float64)
    tokens = sample(torch.stack([good, *broken]), numbers).tolist()
    assert tokens[0] == sample(good[None], numbers[:1]).item()
    assert all(0 <= token < 600 for token in tokens)
    assert tokens[3:] == [7, 8]


def test_random_numbers_depend_only_on_seed_and_position() -> None:
    seeds, positions = np.arange(8, dtype=np.uint64), np.arange(8, dtype=np.int32) * 3
    together = uniform(seeds, positions)
    alone = [uniform(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(8)]
    assert together.tolist() == alone
    # The reference splitmix64 stream of the mixed seed 0, whose finalizer maps 0 to 0.
    assert uniform(np.zeros(1, np.uint64), np.zeros(1, np.int32))[0] == (0xE220A8397B1DCDAF >> 11) * 2.0**-53


def test_random_numbers_are_uniform_and_independent() -> None:
    """Check that adjacent seeds or positions do not share a stream."""
    seeds = np.repeat(np.arange(200, dtype=np.uint64), 200)
    positions = np.tile(np.arange(200, dtype=np.int32), 200)
    numbers = uniform(seeds, positions)
    assert len(np.unique(numbers)) == len(numbers)
    counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
    assert ((counts - 800) ** 2 / 800).sum() < 90  # chi-square, 49 degrees: p about 0.0003
    grid = numbers.reshape(200, 200)
    for a, b in ((grid[:-1], grid[1:]), (grid[:, :-1], grid[:, 1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02
