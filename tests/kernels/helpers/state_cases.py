"""Random inputs for the SSM kernels: ragged batches, strided rows, reused state rows."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.kernels.reference.ssm import (
    DecayRates,
    DeltaForm,
    DeltaInputs,
    MambaInputs,
    SSMSequences,
    StateOps,
)

ROWS = 9
LENS = {
    "decodes": [1, 1, 1],
    "one decode": [1],
    "mixed": [1, 70, 1, 3, 64],
    "long": [200],
    "short": [2, 5],
}
"""Number of tokens of each sequence in a batch."""
STATES_PER_ROW = 4
DRAFTED = {"drafts": [4, 1, 3, 4], "drafts and prompts": [1, 4, 70, 2, 5]}
"""Batches with drafts, for rows with `STATES_PER_ROW` states."""


class Case(NamedTuple):
    seqs: SSMSequences
    x: Tensor
    """[T, width], a slice of wider rows"""
    small: Tensor
    """[T, 2 * heads], another slice"""
    rates: DecayRates
    skip: Tensor
    state: Tensor


def make_case(
    lens: list[int],
    width: int,
    state: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    states_per_row: int = 1,
) -> Case:
    """Build a case in which every other sequence continues from a random state and the others start on NaN
    rows.
    """
    torch.manual_seed(seed)
    starts = np.concatenate([[0], np.cumsum(lens)])
    positions = np.concatenate([np.arange(n) + (7 if i % 2 else 0) for i, n in enumerate(lens)])
    rows = torch.randperm(ROWS)[: len(lens)]
    kept = torch.randn(ROWS, states_per_row, *state) * 0.5
    kept[rows[::2]] = torch.nan
    seqs = SSMSequences(
        torch.from_numpy(starts).to(device, torch.int32),
        rows.to(device, torch.int32),
        torch.from_numpy(positions).to(device),
        np.array(lens, np.int32),
        states_per_row,
    )
    heads, total = state[0], int(starts[-1])
    rows_of = (torch.randn(total, size + 5).to(device, dtype)[:, 3 : 3 + size] for size in (width, 2 * heads))
    rate, bias, skip = -torch.rand(heads) * 2, torch.randn(heads), torch.randn(heads)
    rates = DecayRates(rate.to(device), bias.to(device))
    return Case(seqs, *rows_of, rates, skip.to(device), kept.flatten(0, 1).to(device))


def select_case(
    lens: list[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    shape: tuple[int, int] = (70, 12),
    states_per_row: int = 1,
) -> Case:
    """Build a case for Mamba with this number of channels and state size."""
    channels, size = shape
    options = {"dtype": dtype, "device": device, "states_per_row": states_per_row}
    case = make_case(lens, 3 * channels + 2 * size, shape, **options)
    rates = DecayRates(-torch.rand(shape).to(device) * 4, case.rates.bias)
    return case._replace(rates=rates)


def with_channel_decays(case: Case) -> Case:
    """Return the case with a bias of time steps per key channel."""
    bias = case.skip.repeat_interleave(case.state.shape[2])
    return case._replace(rates=DecayRates(case.rates.rate, bias))


def run_channel_delta(ops: StateOps, case: Case, state: Tensor, log_bound: float = 0.0) -> Tensor:
    """Run the delta rule with a decay per key channel."""
    heads, key_dim, _ = state.shape[1:]
    form = DeltaForm(log_bound, beta_scale=2.0)
    a, b = case.x[:, : heads * key_dim], case.small[:, :heads]
    return ops.delta(case.x, DeltaInputs(a, b, case.rates, form), state, case.seqs)


def run_select(ops: StateOps, case: Case, state: Tensor) -> Tensor:
    channels, size = state.shape[1:]
    x, gate, dt, b, c = case.x.split([channels, channels, channels, size, size], 1)
    return ops.select(x, gate, MambaInputs(dt, b, c, case.rates, case.skip), state, case.seqs)
