"""TRITON_ATTN: our own kernels for GPUs, one launch per layer for decodes and one for prompts."""

from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.attention.backend import AttentionSpec, named, why_no_gpu
from quire.attention.batch import Batch
from quire.config.machine import Machine
from quire.kernels.host_to_device import sent

if TYPE_CHECKING:
    from quire.kernels.triton.attention_launch import AttentionLayer

MOST_ROWS = 128
"""Of queries of a decode with drafts, times heads: up to here its keys are cut as those of others are."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """Which kernel takes which sequences of a batch."""

    few: Tensor | None
    """The sequences with few queries; None: all of the batch."""
    num_few: int
    tiles: Tensor | None
    """[tiles, 2] int32: the others' queries in tiles, as (sequence, first query)."""


@dataclass(slots=True)
class _Step:
    batch: Batch
    cuts: dict[tuple[int, int], _Cut] = field(default_factory=dict)

    def cut(self, few: int, tile: int) -> _Cut:
        """Up to `few` queries are few, `tile` of them make a tile; the same for most layers of a model."""
        if (few, tile) not in self.cuts:
            self.cuts[few, tile] = _cut(self.batch, few, tile)
        return self.cuts[few, tile]


def _cut(batch: Batch, few: int, tile: int) -> _Cut:
    if batch.are_any:
        return _cut_there(batch.query_starts, len(batch.token_ids), few, tile)
    lens, device = batch.query_lens_host, batch.seq_lens.device
    # What was captured reads it where it was then.
    return (_kept_cut if batch.are_decodes else _new_cut)(lens.tobytes(), few, tile, device)


def _new_cut(query_lens: bytes, few: int, tile: int, device: torch.device) -> _Cut:
    lens = np.frombuffer(query_lens, np.int32)
    many = np.flatnonzero(lens > few)
    if not len(many):
        return _Cut(None, len(lens), None)
    counts = -(-lens[many] // tile)
    ends = np.cumsum(counts)
    # A sequence's last tile first: it has the most keys.
    firsts = (np.repeat(ends, counts) - 1 - np.arange(ends[-1])) * tile
    tiles = np.stack((np.repeat(many, counts), firsts), axis=1)
    short = np.flatnonzero(lens <= few)
    work = sent(np.concatenate((tiles.ravel(), short)).astype(np.int32), device)
    return _Cut(work[tiles.size :], len(short), work[: tiles.size].view(-1, 2))


_kept_cut = cache(_new_cut)


def _cut_there(query_starts: Tensor, num_tokens: int, few: int, tile: int) -> _Cut:
    """By what the device knows of the lengths: as many tiles as there may be, of which some are nothing."""
    lens, last = query_starts.diff(), len(query_starts) - 2
    index = torch.arange(last + 1, device=lens.device)
    pads = index == last
    counts = torch.where((lens > few) | pads, (lens + (tile - 1)) // tile, 0)
    ends = counts.cumsum(0)
    most = num_tokens // tile + 1 + min(last, num_tokens // (few + 1))
    place = torch.arange(most, device=lens.device)
    seqs = torch.searchsorted(ends, place, right=True).clamp_(max=last)
    # A tile behind all others has none of the queries that it would begin with.
    firsts = torch.where(place < ends[-1], (ends[seqs] - 1 - place) * tile, num_tokens)
    short = torch.where((lens > 0) & (lens <= few) & ~pads, index, last)
    return _Cut(short.int(), last + 1, torch.stack((seqs, firsts), 1).int())


class TritonAttention:
    """Our kernels for a GPU."""

    name = "TRITON_ATTN"
    capturable = captures_prompts = True

    def fits(self, spec: AttentionSpec, machine: Machine) -> str | None:
        if (why := why_no_gpu(machine)) is not None:
            return why
        if spec.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"computes float32, float16 and bfloat16, not {named(spec.dtype)}"
        if spec.head_dim > 512:
            return f"needs a head size up to 512, not {spec.head_dim}"
        if spec.cache_dtype == torch.float8_e4m3fn and machine.capability < (8, 9):
            capability = ".".join(map(str, machine.capability))
            return f"reads fp8_e4m3 from compute capability 8.9 on, this is {capability}; fp8_e5m2 it can"
        return None if find_spec("triton") else "the package triton is not installed"

    def plan(self, batch: Batch) -> None:
        batch.attention = _Step(batch)

    def forward(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: Batch,
        spec: AttentionSpec,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        from quire.kernels.triton import attention_launch as launch
        from quire.kernels.triton.attention import AttentionSeqs

        layer = _layer(spec)
        few, most = 1 if batch.reach is not None else layer.few, batch.max_query_len
        if batch.are_decodes and layer.few < most <= MOST_ROWS // layer.group:
            few = most
        if q.stride()[1:] != (spec.head_dim, 1):
            q = q.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        cache = launch.cache_of(k_cache, v_cache)
        tables = batch.block_tables
        seqs = AttentionSeqs(batch.query_starts, batch.seq_lens, batch.rows, tables, tables.stride(0))
        shape = launch.tile_shape(layer, q.dtype, most)
        cut: _Cut = batch.attention.cut(few, shape.block_m // layer.group)
        if cut.tiles is not None:
            launch.attend_tiles(
                out, q, cache, seqs, cut.tiles, layer, sinks, alibi_slopes, batch.reach, shape
            )
        if cut.num_few:
            each = few if few > layer.few else 1
            launch.attend_shares(out, q, cache, seqs, cut.few, layer, sinks, alibi_slopes, most_queries=each)
        return out


@cache
def _layer(spec: AttentionSpec) -> "AttentionLayer":
    from quire.kernels.triton.attention_launch import AttentionLayer

    return AttentionLayer(
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        scale=spec.score_scale,
        window=spec.window or 0,
        softcap=spec.softcap or 0.0,
        k_scale=spec.k_scale,
        v_scale=spec.v_scale,
    )
