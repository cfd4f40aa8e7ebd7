"""Rotary position embedding (RoPE): the frequencies of each kind, and the cos/sin table."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import RopeFacts
from quire.layers.scope import Scope


def _powers(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32) / dim


def _default(rope: RopeFacts, max_len: int) -> Tensor:
    return 1.0 / rope.theta ** _powers(rope.dim)


def _linear(rope: RopeFacts, max_len: int) -> Tensor:
    return _default(rope, max_len) / rope.factor


def _dynamic(rope: RopeFacts, max_len: int) -> Tensor:
    """Return the frequencies of dynamic NTK scaling, fixed at the engine's `max_len` for all sequences."""
    stretch = rope.factor * max(max_len, rope.max_len) / rope.max_len - (rope.factor - 1)
    base = rope.theta * math.pow(stretch, rope.dim / (rope.dim - 2))
    return 1.0 / base ** _powers(rope.dim)


def _llama3(rope: RopeFacts, max_len: int) -> Tensor:
    """Return Llama 3's frequencies: low ones divided by the factor, high ones unchanged, others
    interpolated."""
    frequencies = _default(rope, max_len)
    rotations = rope.original_max_len * frequencies / (2 * math.pi)
    keep = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return torch.lerp(frequencies / rope.factor, frequencies, keep.clamp(0, 1))


def _yarn(rope: RopeFacts, max_len: int) -> Tensor:
    """Return YaRN's frequencies: low ones divided by the factor, high ones unchanged, others interpolated by
    the index of the frequency."""

    def index_of(rotations: float) -> float:
        period = rope.original_max_len / (rotations * 2 * math.pi)
        return rope.dim * math.log(period) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low or 0.001
    keep = 1 - ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    frequencies = _default(rope, max_len)
    return torch.lerp(frequencies / rope.factor, frequencies, keep)


def _factors(rope: RopeFacts, max_len: int) -> Tensor:
    return _default(rope, max_len) / torch.tensor(rope.factors, dtype=torch.float32)


def _longrope(rope: RopeFacts, max_len: int) -> Tensor:
    """Return LongRoPE's frequencies. If `max_len` exceeds the original length, they are divided by the long
    factors for all sequences, even short ones; otherwise by the short factors."""
    factors = rope.long_factors if max_len > rope.original_max_len else rope.factors
    return _default(rope, max_len) / torch.tensor(factors, dtype=torch.float32)


def _none(rope: RopeFacts, max_len: int) -> Tensor:
    return torch.zeros(rope.dim // 2)


KINDS: dict[str, Callable[[RopeFacts, int], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "factors": _factors,
    "none": _none,
}
"""RoPE kind -> function (facts, max_model_len) that returns the [dim / 2] frequencies."""


def mscale(rope: RopeFacts, weight: float) -> float:
    """Return YaRN's attention scale, 0.1 * weight * ln(factor) + 1. `weight` is mscale or mscale_all_dim of
    config.json."""
    return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0


def _amplitude(rope: RopeFacts) -> float:
    """Return the factor of YaRN and LongRoPE on cosines and sines; 1 for other kinds."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope":
        return math.sqrt(1 + math.log(max(rope.factor, 1.0)) / math.log(rope.original_max_len))
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope, rope.mscale) / mscale(rope, rope.mscale_all_dim)
    return mscale(rope, 1.0)


def half_split_order(num_rows: int, head_dim: int, paired_dim: int) -> Tensor:
    """Return the order of a query or key projection's rows that turns interleaved RoPE into half-split RoPE;
    attention scores stay the same. The first `paired_dim` dimensions of each head are rotated."""
    heads = torch.arange(num_rows).view(-1, head_dim)
    rotary = heads[:, :paired_dim].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
    return torch.cat((rotary, heads[:, paired_dim:]), 1).flatten()


def num_mrope_positions(max_len: int) -> int:
    """Return the number of rows of an M-RoPE table for sequences of `max_len` tokens: positions in an image
    may exceed its number of tokens."""
    return 2 * max_len


def axes_of(rope: RopeFacts) -> Tensor:
    """Return [dim / 2], the M-RoPE axis of each frequency: time 0, height 1, width 2."""
    axes = torch.arange(3).repeat_interleave(torch.tensor(rope.sections))
    if rope.interleaved:
        axes = torch.zeros_like(axes)
        for axis in (1, 2):
            axes[axis : 3 * rope.sections[axis] : 3] = axis
    return axes


class Rope(nn.Module):
    """Cos/sin table of all positions, for the first `rope.dim` dimensions of a head; shared by all layers.

    If `rope` is None there is no RoPE: the table rotates two dimensions by an angle of 0.
    """

    table: Tensor
    """Table [max_len, dim] by position: in each row cosines, then sines."""
    axes: Tensor
    """[dim], the M-RoPE axis of each column of the table (see `axes_of`); None without M-RoPE"""

    def __init__(self, rope: RopeFacts | None, scope: Scope) -> None:
        super().__init__()
        frequencies = torch.zeros(1) if rope is None else KINDS[rope.kind](rope, scope.max_len)
        has_sections = rope is not None and len(rope.sections) > 0
        max_len = num_mrope_positions(scope.max_len) if has_sections else scope.max_len
        positions = torch.arange(max_len, dtype=torch.float32, device=scope.device)
        angles = positions[:, None] * frequencies.to(scope.device)
        table = torch.cat((angles.cos(), angles.sin()), -1)
        table *= 1.0 if rope is None else _amplitude(rope)
        self.paired_dim = rope.dim if rope is not None and rope.pairs else 0
        """Number of dimensions of a head with interleaved RoPE; 0 if RoPE is half-split."""
        self.register_buffer("table", table.to(scope.dtype), persistent=False)
        axes = axes_of(rope).repeat(2).to(scope.device) if rope is not None and has_sections else None
        self.register_buffer("axes", axes, persistent=False)

    def of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return a cos/sin table, and for each token of the batch its row in the table. For M-RoPE the table
        is composed for the tokens of the batch, once per step."""
        positions = batch.mrope_positions
        if positions is None or positions.ndim == 1:
            return self.table, batch.positions if positions is None else positions
        if self not in batch.angles:
            columns = torch.arange(len(self.axes), device=positions.device)
            composed = self.table[positions[self.axes].t(), columns].contiguous()
            batch.angles[self] = composed, torch.arange(len(composed), device=positions.device)
        return batch.angles[self]
