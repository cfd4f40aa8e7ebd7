"""TRITON_ATTN: Triton kernels for GPUs, one launch per layer for decodes and one for prompts."""

from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.attention.backend import AttentionSpec, named, why_no_gpu
from quire.attention.batch import Batch
from quire.config.machine import Machine
from quire.data.step_plan import Ints
from quire.kernels import batch_invariant
from quire.kernels.host_to_device import copy_to_device

if TYPE_CHECKING:
    from quire.kernels.triton.attention_launch import AttentionArgs, AttentionLayer

MOST_ROWS = 128
"""Maximum rows per KV head (queries times query heads of a KV head) with which decodes with draft tokens use
the decode kernel."""


@dataclass(frozen=True, slots=True)
class _Split:
    """Assignment of the sequences of a batch to kernels: those with few queries to the decode kernel, the
    others to the prompt kernel."""

    few: Tensor | None
    """[num_few] int32: sequences with few queries; None for all sequences of the batch."""
    num_few: int
    tiles: Tensor | None
    """[tiles, 2] int32: query tiles of the sequences with more queries, as (sequence, first query); None if
    there are none. If some tiles are cut, [pieces, 6]: see `attention_pieces.cut_tiles`."""


@dataclass(slots=True)
class _Step:
    batch: Batch
    splits: dict[tuple[int, int, int], _Split] = field(default_factory=dict)

    def split(self, few: int, tile: int, programs: int) -> _Split:
        """Assign sequences with at most `few` queries to the decode kernel, and the others, in tiles of
        `tile` queries, to the prompt kernel. `programs` programs share the keys of all tiles; 0: tiles are
        not cut into pieces. The result is cached for the next layers of the step."""
        split = self.splits.get((few, tile, programs))
        if split is None:
            split = self.splits[few, tile, programs] = _split(self.batch, few, tile, programs)
        return split


def _split(batch: Batch, few: int, tile: int, programs: int) -> _Split:
    from quire.kernels.triton.attention_launch import cut_on_device

    lens, device = batch.query_lens_host, batch.seq_lens.device
    if batch.are_mixed:
        num_tokens = len(batch.token_ids)
        starts, seq_lens = batch.query_starts, batch.seq_lens
        selected, work = cut_on_device(starts, seq_lens, num_tokens, few, tile, programs)
        return _Split(selected, len(selected), work)
    if batch.are_decodes:  # a captured CUDA graph keeps reading the same tensors, so they are cached
        return _split_decodes(lens.tobytes(), few, tile, device)
    return _split_on_host(lens, batch.seq_lens_host, few, tile, programs, device)


def _split_on_host(
    lens: Ints, seq_lens: Ints, few: int, tile: int, programs: int, device: torch.device
) -> _Split:
    from quire.kernels.triton.attention_launch import cut_on_host

    many = np.flatnonzero(lens > few)
    if not len(many):
        return _Split(None, len(lens), None)
    counts = -(-lens[many] // tile)
    ends = np.cumsum(counts)
    # The last tile of a sequence comes first: it has the most keys.
    seqs, firsts = np.repeat(many, counts), (np.repeat(ends, counts) - 1 - np.arange(ends[-1])) * tile
    tiles: NDArray[np.int64] = np.column_stack((seqs, firsts))
    num_keys = seq_lens[seqs] - lens[seqs] + np.minimum(firsts + tile, lens[seqs])
    work, short = cut_on_host(tiles, num_keys, programs), np.flatnonzero(lens <= few)
    indices = copy_to_device(np.concatenate((work.ravel(), short)).astype(np.int32), device)
    return _Split(indices[work.size :], len(short), indices[: work.size].view(work.shape))


@cache
def _split_decodes(query_lens: bytes, few: int, tile: int, device: torch.device) -> _Split:
    lens = np.frombuffer(query_lens, np.int32)
    return _split_on_host(lens, lens, few, tile, 0, device)


class TritonAttention:
    """Attention by Triton kernels."""

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
            return f"needs compute capability 8.9 for fp8_e4m3, this is {capability}; use fp8_e5m2"
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
        from quire.kernels.triton.launch import only_compiles

        layer = _layer(spec)
        few, most = 1 if batch.last_visible is not None else layer.few, batch.max_query_len
        if batch.are_decodes and layer.few < most <= MOST_ROWS // layer.group:
            few = most
        if q.stride()[1:] != (spec.head_dim, 1):
            q = q.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        cache = launch.cache_of(k_cache, v_cache)
        tables = batch.block_tables
        seqs = AttentionSeqs(batch.query_starts, batch.seq_lens, batch.rows, tables, tables.stride(0))
        args = launch.AttentionArgs(out, q, cache, seqs, layer, sinks, alibi_slopes)
        if batch_invariant.is_on():
            self._attend_fixed(batch, args)
            return out
        shape = launch.tile_shape(layer, q.dtype, most)
        programs = 0 if batch.last_visible is not None else launch.programs_of(layer, q.device)
        split: _Split = batch.attention.split(few, shape.block_m // layer.group, programs)
        if split.tiles is not None:
            launch.attend_tiles(args, split.tiles, batch.last_visible, shape)
            if programs and only_compiles() and not batch.are_decodes:
                launch.attend_tiles(args, split.tiles.new_zeros((1, 6)), None, shape)
        if split.num_few:
            launch.attend_shares(args, split.few, most_queries=few if few > layer.few else 1)
        return out

    def _attend_fixed(self, batch: Batch, args: "AttentionArgs") -> None:
        """Compute attention in the batch-invariant mode, in which a query gets bitwise the same result from
        the decode kernel and from the prompt kernel."""
        from quire.kernels.triton import attention_launch as launch

        layer, dtype, most = args.layer, args.q.dtype, batch.max_query_len
        least = launch.fixed_shape(layer, dtype, 1)
        few = most if batch.are_decodes else 1
        if not launch.fits_fixed_shares(layer, least, len(batch.seq_lens), few):
            few = 0
        shape = launch.fixed_shape(layer, dtype, most)
        split: _Split = batch.attention.split(few, shape.block_m // layer.group, 0)
        if split.tiles is not None:
            launch.attend_fixed_tiles(args, split.tiles, batch.last_visible, shape)
        if few and split.num_few:
            launch.attend_fixed_shares(args, split.few, least, few)


@cache
def _layer(spec: AttentionSpec) -> "AttentionLayer":
    from quire.kernels.triton.attention_launch import AttentionLayer

    return AttentionLayer(
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        scale=spec.score_scale,
        window=spec.window or 0,
        chunked=spec.chunked,
        softcap=spec.softcap or 0.0,
        k_scale=spec.k_scale,
        v_scale=spec.v_scale,
    )
