"""Bidirectional attention over concatenated sequences, without a KV cache."""

from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.reference.ops import rotate

Angles = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary angles of each token, [T, up to head_dim / 2] each."""
HEIGHTS = 64, 128
"""Queries per tile of the GPU kernel, for short and for long sequences."""
_LONG = 256
"""Mean tokens per sequence from which the sequences of a batch count as long."""


class Spans(NamedTuple):
    """The sequences of a batch and their tiles of queries, computed once for all layers."""

    lens: list[int]
    tiles: Tensor | None
    """[tiles, 3] int32 on a GPU: for each tile, the first token and the end of its sequence, and its first
    query; all are token indices in the batch. None on a CPU."""
    height: int = HEIGHTS[0]
    """Queries per tile."""


def spans_of(lens: NDArray[np.int32], device: torch.device) -> Spans:
    if device.type != "cuda" or not len(lens):
        return Spans(lens.tolist(), None)
    height = HEIGHTS[bool(lens.mean() >= _LONG)]
    return Spans(lens.tolist(), torch.from_numpy(tiles_of(lens, height)).to(device), height)


def tiles_of(lens: NDArray[np.int32], height: int) -> NDArray[np.int32]:
    counts = -(-lens // height)
    ends = np.cumsum(lens)
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts, ends = np.repeat(ends - lens, counts), np.repeat(ends, counts)
    return np.stack([starts, ends, starts + height * place], 1).astype(np.int32)


def attend(
    q: Tensor, k: Tensor, v: Tensor, spans: Spans, window: int | None = None, *, bias: Tensor | None = None
) -> Tensor:
    """Return the attention [T, heads, head_dim] of q, k and v of this shape, with all sequences concatenated.
    A token attends to tokens of its sequence at most `window` positions away in both directions; None: all.
    `bias` [heads, L, L] is added to the scores, for sequences of at most L tokens and without a window."""
    out = torch.empty_like(q)
    start = 0
    for length, alike in groupby(length for length in spans.lens if length):
        here = slice(start, start + length * len(list(alike)))
        start = here.stop
        mask = None if window is None or length <= window else _band(length, window, q.device)
        if bias is not None:
            mask = bias[:, :length, :length]
        queries, keys, values = (x[here].unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        out[here] = mixed.transpose(1, 2).flatten(0, 1)
    return out


def rotate_in_place(x: Tensor, angles: Angles) -> None:
    """Apply RoPE to x [T, heads, head_dim] in place, by the angles of its tokens; computed in float32."""
    cos, sin = (angle[:, None].float() for angle in angles)
    x.copy_(rotate(x.float(), cos, sin))


def _band(length: int, window: int, device: torch.device) -> Tensor:
    places = torch.arange(length, device=device)
    return (places[:, None] - places).abs() <= window
