"""Random sampling: a uniform number per row from (seed, position), a least logit (floor), the inverse CDF.

A sample depends on its own row only, never on the rest of the batch, on preemption or on arrival order.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.sampling.transfer import take_rows, to_device


class SamplingTensors(NamedTuple):
    """Sampling parameters and random seeds of N rows, on the device."""

    temperature: Tensor
    """[N] float32; 0 is greedy"""
    top_k: Tensor
    """[N] int32, 0 is off"""
    top_p: Tensor
    """[N] float32, 1 is off"""
    min_p: Tensor
    """[N] float32, 0 is off"""
    seeds: Tensor
    """[N] int64, random seed of each row's request"""
    positions: Tensor
    """[N] int64, the positions of the new tokens in their sequences"""


_BLOCK = 512
"""Tokens per block of the inverse CDF: sums per block come first, then one block is searched."""
_NUCLEUS = 1024
"""Number of best tokens that are ranked for top_p, before the whole vocabulary of a row is sorted."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each (seed, position), the same on every machine."""
    counters = _mix(seeds) + _GOLDEN * (positions.astype(np.uint64) + np.uint64(1))
    return np.asarray((_mix(counters) >> np.uint64(11)) * 2.0**-53, np.float64)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash 64-bit integers by the finalizer of splitmix64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def floors(
    logits: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64], min_p: NDArray[np.float64]
) -> Tensor:
    """Return [R, 1], the smallest logit that min_p, then top_k, then top_p allow in each row of `logits` [R,
    V]. A floor is a value, not a count: tokens whose logits equal the floor are all allowed, by top_k and
    top_p alike, so that the result does not depend on the order of equal values in a sort."""
    peak = logits.amax(dim=-1, keepdim=True)
    with np.errstate(divide="ignore"):
        floor = peak + to_device(np.log(min_p).astype(np.float32)[:, None], logits.device)
    ranked = np.flatnonzero((top_k > 0) | (top_p < 1.0))
    if len(ranked):
        higher = _rank_floors(
            take_rows(logits, ranked), take_rows(floor, ranked), top_k[ranked], top_p[ranked]
        )
        floor.index_copy_(0, to_device(ranked, logits.device), higher)
    return floor


def _rank_floors(
    logits: Tensor, floor: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64]
) -> Tensor:
    width = min(int(np.where(top_k > 0, top_k, _NUCLEUS).max()), logits.shape[1])
    best = logits.topk(width).values
    if top_k.any():
        last = to_device(np.where(top_k > 0, top_k, width)[:, None] - 1, logits.device)
        off = to_device(top_k[:, None] == 0, logits.device)
        floor = torch.maximum(floor, best.gather(1, last).masked_fill(off, -torch.inf))
    nucleus = np.flatnonzero(top_p < 1.0)
    if len(nucleus):
        higher = _nucleus_floors(
            take_rows(logits, nucleus),
            take_rows(best, nucleus),
            take_rows(floor, nucleus),
            to_device(top_p[nucleus][:, None], logits.device),
        )
        floor = floor.index_copy(0, to_device(nucleus, logits.device), higher)
    return floor


def _nucleus_floors(logits: Tensor, best: Tensor, floor: Tensor, top_p: Tensor) -> Tensor:
    """Return [R, 1], the least logit that top_p allows in each row: that of the smallest set of best tokens
    whose probability is `top_p` of that of all logits from `floor` on. `best` are each row's best logits,
    in descending order."""
    peak = best[:, :1]
    target_mass = top_p * _weights(logits, floor, peak).sum(dim=-1, keepdim=True, dtype=torch.float64)
    higher, reached = _find_mass(best, floor, peak, target_mass)
    flat = (~reached[:, 0]).nonzero()[:, 0]
    if len(flat):
        whole = _sort_descending(logits.index_select(0, flat))
        limits = (part.index_select(0, flat) for part in (floor, peak, target_mass))
        higher.index_copy_(0, flat, _find_mass(whole, *limits)[0])
    return higher


def _find_mass(best: Tensor, floor: Tensor, peak: Tensor, target_mass: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each row the logit, at least `floor`, at which the cumulative weight of the logits `best` in
    descending order reaches `target_mass`, and whether `best` reaches it. `peak` is the largest logit."""
    mass = _weights(best, floor, peak).cumsum(dim=-1, dtype=torch.float64)
    num_short = (mass < target_mass).sum(dim=-1, keepdim=True)
    last = num_short.clamp(max=best.shape[1] - 1)
    return torch.maximum(floor, best.gather(1, last)), num_short < best.shape[1]


def _sort_descending(logits: Tensor) -> Tensor:
    """Sort each row, best first. On a CPU numpy sorts plain values several times faster than torch."""
    if logits.device.type == "cpu":
        return torch.from_numpy(np.sort(logits.numpy(), axis=-1)).flip(-1)
    return logits.sort(dim=-1, descending=True).values


def _weights(logits: Tensor, floor: Tensor, peak: Tensor) -> Tensor:
    """Return the unnormalized probabilities exp(logits - peak), with 0 for logits below the floor."""
    return (logits - peak).exp_().masked_fill_(logits < floor, 0.0)


def sample(logits: Tensor, numbers: Tensor) -> Tensor:
    """Return [R], a token of each row of `logits` [R, V], by the row's number in [0, 1) (float64 [R]).

    A row without a distribution (all -inf, a NaN, an infinity) gets its largest logit, NaN being largest.
    """
    peak, fallback = logits.max(dim=-1, keepdim=True)
    weights = (logits - peak).exp_()
    num_rows, vocab = weights.shape
    num_whole = vocab // _BLOCK
    blocks = weights[:, : num_whole * _BLOCK].reshape(num_rows, num_whole, _BLOCK)
    sums = blocks.sum(dim=-1, dtype=torch.float64)
    rest = weights[:, num_whole * _BLOCK :].sum(dim=-1, keepdim=True, dtype=torch.float64)
    sums = torch.cat((sums, rest), dim=1).cumsum_(dim=-1)
    total = sums[:, -1:]
    block, reached = _find(sums, numbers[:, None] * total)

    columns = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(1, columns.clamp(max=vocab - 1)).masked_fill_(columns >= vocab, 0.0)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp_(min=0)), 0.0)
    offset, _ = _find(inside.cumsum(dim=-1, dtype=torch.float64), reached - before)
    token = (block * _BLOCK + offset).clamp_(max=vocab - 1)
    is_valid = total.isfinite() & (total > 0)
    return torch.where(is_valid, token, fallback)[:, 0]


def _find(sums: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the first running sum in `sums` [R, B] above `target` [R, 1], and the target, which
    is reduced if it is not below the last sum."""
    target = torch.minimum(target, sums[:, -1:].nextafter(torch.zeros_like(target)))
    place = torch.searchsorted(sums, target, right=True)
    return place.clamp_(max=sums.shape[1] - 1), target
