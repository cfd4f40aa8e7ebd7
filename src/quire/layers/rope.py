"""Rotary position embedding: the frequencies of each kind, and the table of angles."""

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
    """The base that a sequence of `max_len` would get, for all; theta itself within the original length."""
    stretch = rope.factor * max(max_len, rope.max_len) / rope.max_len - (rope.factor - 1)
    base = rope.theta * math.pow(stretch, rope.dim / (rope.dim - 2))
    return 1.0 / base ** _powers(rope.dim)


def _llama3(rope: RopeFacts, max_len: int) -> Tensor:
    """Low frequencies are divided by the factor, high ones kept, those between interpolated."""
    frequencies = _default(rope, max_len)
    turns = rope.original_max_len * frequencies / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return torch.lerp(frequencies / rope.factor, frequencies, keep.clamp(0, 1))


def _yarn(rope: RopeFacts, max_len: int) -> Tensor:
    """As llama3, but interpolated over the index of the frequency, between two numbers of turns."""

    def index_of(turns: float) -> float:
        return rope.dim * math.log(rope.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

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
    """An engine for sequences beyond the original length divides by other factors, short ones included."""
    factors = rope.long_factors if max_len > rope.original_max_len else rope.factors
    return _default(rope, max_len) / torch.tensor(factors, dtype=torch.float32)


KINDS: dict[str, Callable[[RopeFacts, int], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "factors": _factors,
}
"""kind -> function of the facts and the engine's longest sequence that gives the [dim / 2] frequencies."""


def mscale(rope: RopeFacts, weight: float) -> float:
    """What yarn's stretch asks attention to be scaled with, in each of query and key."""
    return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0


def _amplitude(rope: RopeFacts) -> float:
    """What yarn and longrope multiply cosine and sine with; 1 for all other kinds."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope":
        return math.sqrt(1 + math.log(max(rope.factor, 1.0)) / math.log(rope.original_max_len))
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope, rope.mscale) / mscale(rope, rope.mscale_all_dim)
    return mscale(rope, 1.0)


def halved(num_rows: int, head_dim: int, paired_dim: int) -> Tensor:
    """The rows of a query or key weight in the order in which the halves of each head turn together, where
    the checkpoint has neighbours turn: every score stays the same."""
    heads = torch.arange(num_rows).view(-1, head_dim)
    turning = heads[:, :paired_dim].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
    return torch.cat((turning, heads[:, paired_dim:]), 1).flatten()


def num_turns(max_len: int) -> int:
    """Positions that a table for time, height and width has: those of an item may lie further apart than its
    tokens do."""
    return 2 * max_len


def axes_of(rope: RopeFacts) -> Tensor:
    """[dim / 2] by what each frequency turns: time 0, height 1, width 2."""
    axes = torch.arange(3).repeat_interleave(torch.tensor(rope.sections))
    if rope.interleaved:
        axes = torch.zeros_like(axes)
        for axis in (1, 2):
            axes[axis : 3 * rope.sections[axis] : 3] = axis
    return axes


class Rope(nn.Module):
    """The angles of every position, for the first `dim` dimensions of a head. One serves all layers.

    Without facts no head turns: two of its numbers do, by nothing.
    """

    table: Tensor
    """[max_len, dim]: cosines, then sines."""
    axes: Tensor
    """[dim], of a rope with sections: see `axes_of`."""

    def __init__(self, rope: RopeFacts | None, scope: Scope) -> None:
        super().__init__()
        frequencies = torch.zeros(1) if rope is None else KINDS[rope.kind](rope, scope.max_len)
        has_sections = rope is not None and len(rope.sections) > 0
        max_len = num_turns(scope.max_len) if has_sections else scope.max_len
        positions = torch.arange(max_len, dtype=torch.float32, device=scope.device)
        angles = positions[:, None] * frequencies.to(scope.device)
        table = torch.cat((angles.cos(), angles.sin()), -1)
        table *= 1.0 if rope is None else _amplitude(rope)
        self.paired_dim = rope.dim if rope is not None and rope.pairs else 0
        """How many of a head's numbers turn as neighbours."""
        self.register_buffer("table", table.to(scope.dtype), persistent=False)
        axes = axes_of(rope).repeat(2).to(scope.device) if rope is not None and has_sections else None
        self.register_buffer("axes", axes, persistent=False)

    def of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """A table of angles, and the row of it that each token turns by."""
        turns = batch.turns
        if turns is None or turns.ndim == 1:
            return self.table, batch.positions if turns is None else turns
        if self not in batch.angles:
            numbers = torch.arange(len(self.axes), device=turns.device)
            composed = self.table[turns[self.axes].t(), numbers].contiguous()
            batch.angles[self] = composed, torch.arange(len(composed), device=turns.device)
        return batch.angles[self]
