"""Tests of the sampling kernels: argmax, distribution, and the kept sets of `sampling/random.py`."""

from typing import Any

import numpy as np
import pytest
import torch
from interpreter import more
from torch import Tensor

from quire.kernels.triton.masks import apply_masks
from quire.kernels.triton.sampling import LATER, ConstrainedDevice, argmax, sample
from quire.sampling.random import floors

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
gpu = pytest.mark.gpu
Limits = dict[str, Any]


def sampled(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    constrained: ConstrainedDevice | None = None,
) -> Tensor:
    def filled(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((len(logits),), value, dtype=dtype, device=DEVICE)

    return sample(
        logits,
        filled(temperature, torch.float32),
        filled(top_k, torch.int32),
        filled(top_p, torch.float32),
        filled(min_p, torch.float32),
        torch.arange(len(logits), device=DEVICE) if seeds is None else seeds,
        filled(7, torch.int64) if positions is None else positions,
        constrained,
    )


@pytest.mark.parametrize("vocab", [3, 4096, 9000])
def test_argmax_is_the_first_of_the_largest(vocab: int) -> None:
    logits = torch.randint(-3, 3, (3, vocab), device=DEVICE).float()
    logits[0] = -torch.inf
    logits[1, vocab // 2] = torch.inf
    best = logits.amax(-1, keepdim=True)
    expected = torch.where(logits == best, torch.arange(vocab, device=DEVICE), vocab).amin(-1)
    assert torch.equal(argmax(logits), expected)
    assert torch.equal(argmax(logits.half()), expected)
    assert torch.equal(sampled(logits, temperature=0.0, top_k=2), expected)


def test_row_without_a_distribution_takes_its_largest() -> None:
    logits = torch.zeros(3, 40, device=DEVICE)
    logits[0] = -torch.inf
    logits[1, 17] = torch.nan
    logits[2, 5] = torch.inf
    cases: list[Limits] = [{}, {"top_k": 3}, {"top_p": 0.5}]
    for limits in cases:
        assert sampled(logits, **limits).tolist() == [0, 17, 5]


def test_sample_depends_only_on_its_own_row() -> None:
    logits = torch.randn(5, 5000, device=DEVICE)
    seeds = torch.tensor([3, -9, 2**40, 3, 3], device=DEVICE)
    positions = torch.tensor([1, 1, 5, 2, 1], device=DEVICE)
    logits[4] = logits[0]
    cases: list[Limits] = [{}, {"top_p": 0.6}, {"top_k": 8, "top_p": 0.5, "min_p": 0.01}]
    for limits in cases:
        together = sampled(logits, seeds=seeds, positions=positions, **limits)
        assert together[0] == together[4]
        for i in (2, 4):
            alone = sampled(
                logits[i : i + 1], seeds=seeds[i : i + 1], positions=positions[i : i + 1], **limits
            )
            assert alone[0] == together[i]


def test_seed_and_position_both_change_the_sample() -> None:
    logits = torch.zeros(1, 3000, device=DEVICE).expand(16, -1)
    same, rising = torch.full((16,), 5, device=DEVICE), torch.arange(16, device=DEVICE)
    assert len(set(sampled(logits, seeds=rising, positions=same).tolist())) > 12
    assert len(set(sampled(logits, seeds=rising * 2**33, positions=same).tolist())) > 12
    assert len(set(sampled(logits, seeds=same, positions=rising).tolist())) > 12


def fits(counts: Tensor, probabilities: Tensor) -> None:
    """Check the chi-square of sampled counts with a bound that fails one time in a million."""
    expected = probabilities.double() * counts.sum()
    known = expected > 0
    assert counts[~known].sum() == 0
    chi = ((counts - expected)[known] ** 2 / expected[known]).sum().item()
    freedom = max(int(known.sum()) - 1, 1)
    assert chi < freedom * (1 - 2 / (9 * freedom) + 4.8 * (2 / (9 * freedom)) ** 0.5) ** 3


MORE: list[Limits] = [{}, {"top_k": 4}, {"min_p": 0.2}, {"top_p": 0.8, "min_p": 0.1}]
LIMITS: list[Limits] = [
    {"temperature": 0.6},
    {"top_k": 5, "top_p": 0.8, "min_p": 0.05, "temperature": 1.3},
    {"top_p": 0.7},
    *(MORE if CUDA else []),
]


def kept(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """Return the tokens that `sampling/random.py` keeps."""
    scaled = logits / temperature
    n = len(logits)
    floor = floors(scaled, np.full(n, top_k, np.int64), np.full(n, top_p), np.full(n, min_p))
    return scaled >= floor


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_samples_follow_the_distribution(limits: Limits) -> None:
    vocab, rows = 12, 20000 if CUDA else 20 if "top_k" in limits else 60
    logits = torch.linspace(-2.0, 1.5, vocab, device=DEVICE)[None].clone()
    logits[0, 3] = logits[0, 8]
    counts = torch.bincount(sampled(logits.expand(rows, -1), **limits), minlength=vocab)
    left = kept(logits, **limits)[0]
    masked = (logits[0] / limits.get("temperature", 1.0)).masked_fill(~left, -torch.inf)
    fits(counts, masked.softmax(-1))


def every_kept_token_is_sampled(logits: Tensor, rows: int, limits: Limits) -> None:
    """Check that only kept tokens are sampled and that each of them is."""
    left = kept(logits, **limits)[0]
    tokens = sampled(logits.expand(rows, -1), **limits)
    seen = torch.bincount(tokens, minlength=logits.shape[1]) > 0
    assert not (seen & ~left).any()
    assert int((left & ~seen).sum()) <= 0.05 * int(left.sum())


def same_as_among_the_kept(logits: Tensor, limits: Limits, seed: int = 0) -> None:
    """Check that the same noise over the kept tokens alone gives the same sample."""
    left = kept(logits, **limits)
    seeds = torch.arange(len(logits), device=DEVICE) + 100 * seed
    tokens = sampled(logits, seeds=seeds, **limits)
    assert left.gather(1, tokens[:, None]).all()
    assert torch.equal(tokens, sampled(logits.masked_fill(~left, -torch.inf), seeds=seeds))


@pytest.mark.parametrize("limits", [{"top_k": 3}, {"top_k": 16, "top_p": 0.5}, {"top_p": 0.01}], ids=str)
def test_kept_tokens_over_several_tiles(limits: Limits) -> None:
    same_as_among_the_kept(0.5 * torch.randn(2, 9000, device=DEVICE), limits)


def test_ties_with_the_last_kept_token_are_kept() -> None:
    logits = -torch.rand(1, 5000, device=DEVICE)
    logits[0, [7, 4097, 4500]] = 2.0
    logits[0, [9, 4999]] = 1.5
    every_kept_token_is_sampled(logits, 16, {"top_k": 4})
    assert kept(logits, top_k=4).sum() == 5


def test_more_ties_than_candidates() -> None:
    """Check equal logits, more than the candidates, so that the row is searched and all are kept."""
    logits = torch.zeros(4, 5000, device=DEVICE)
    assert len(set(sampled(logits, top_k=3).tolist())) == 4


def test_large_k_searches_the_row() -> None:
    logits = torch.randn(3, 4200, device=DEVICE)
    tokens = sampled(logits, top_k=100, temperature=50.0)
    ranks = (logits > logits.gather(1, tokens[:, None])).sum(-1)
    assert (ranks < 100).all() and ranks.max() > 10


def test_forbidden_tokens_are_never_sampled() -> None:
    logits = torch.full((5, 4100), -torch.inf, device=DEVICE)
    logits[:, [5, 4099]] = 0.0
    cases: list[Limits] = [{}, {"top_k": 20, "top_p": 0.99}, {"top_p": 0.99}]
    for limits in cases:
        assert set(sampled(logits, **limits).tolist()) == {5, 4099}


@gpu
@pytest.mark.parametrize(
    "limits",
    [
        {"top_k": 20},
        {"top_k": 50, "top_p": 0.95},
        {"top_p": 0.9},
        {"top_p": 0.3, "min_p": 0.02},
        {"top_k": 999},
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.5, 2.0, 8.0])
def test_kept_sets_of_real_vocabularies(spread: float, limits: Limits) -> None:
    logits = spread * torch.randn(24, 151936, device=DEVICE).bfloat16().float()
    for seed in range(20):
        same_as_among_the_kept(logits, limits, seed)


@pytest.mark.parametrize(("vocab", "words"), [(3, 1), (4100, 100), *more((4100, 131))])
def test_masked_rows_sample_only_allowed_tokens(vocab: int, words: int) -> None:
    """Check masks shorter and longer than the vocabulary in any order, one of them of a single token.

    One row has no mask; limits make the kernel read the logits again.
    """
    logits = (3 * torch.randn(4, vocab + 3, device=DEVICE)).bfloat16()[:, :vocab]
    bits = torch.randint(-(2**31), 2**31, (3, words), dtype=torch.int64, device=DEVICE).int()
    bits[1] = 0
    bits[1, 0] = 2
    mask_of = torch.tensor([2, -1, 0, 1], dtype=torch.int32, device=DEVICE)
    width = torch.tensor([words], dtype=torch.int32, device=DEVICE)
    constrained, alone = ConstrainedDevice(mask_of, width, bits.flatten()), logits.clone()
    places = torch.tensor([[2], [3], [0]], dtype=torch.int32, device=DEVICE)
    apply_masks(alone, torch.cat((places, bits), 1))
    cases: list[Limits] = [{}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.8}]
    for limits in cases:
        actual = sampled(logits.clone(), constrained=constrained, **limits)
        assert torch.equal(actual, sampled(alone, **limits)), limits
    later = constrained._replace(mask_of=torch.full_like(mask_of, LATER))
    kept = logits.clone()
    sampled(kept, top_k=5, constrained=later)
    assert torch.equal(kept, logits), "no row was to be sampled"
