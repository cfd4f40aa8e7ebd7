"""Latent attention on a GPU: absorbed for sequences with few queries, multiplied out for prompts."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.attention.batch import Batch
from quire.attention.mla import MLAEntry, MLALoRA, MLASpec, absorb, release
from quire.kernels.host_to_device import sent
from quire.kernels.triton import mla_launch as launch
from quire.kernels.triton.attention import AttentionSeqs
from quire.kernels.triton.attention_launch import AttentionShape, sms
from quire.kernels.triton.mla_launch import MLASizes

FEW_QUERIES = 8
"""Up to here a sequence's queries are absorbed: fewer products than multiplying out its keys."""
EXPANDED_BYTES = 256 << 20
"""Keys and values are multiplied out up to this size at a time, by sequences, then by heads."""


class _Few(NamedTuple):
    """Sequences with few queries, among others."""

    seqs: Tensor
    tokens: Tensor
    query_starts: Tensor
    most_queries: int


class _Round(NamedTuple):
    """Prompts whose keys are multiplied out at once."""

    num_keys: int
    keys: Tensor
    """[tiles, 3] int32, for `gather`"""
    tiles: Tensor
    """[tiles, 3] int32, for `attend_tiles`"""
    owners: Tensor
    """[num_keys], the first token of each one's sequence"""


class _PromptSplit(NamedTuple):
    """Which kernel takes which sequences of a batch that has prompts."""

    few: _Few | None
    rounds: list[_Round]


class TritonMLA:
    """Our kernels for a GPU. The cache is of the type of the queries, or of 8 bits."""

    turns = False

    def enter(self, q: Tensor, kv: Tensor, entry: MLAEntry, spec: MLASpec) -> None:
        norm, eps, table, positions, slots, cache = entry
        latents = launch.latents_of(cache)
        neighbours = spec.neighbours
        sizes = _sizes(spec)
        launch.enter(q, kv, norm, eps, table, positions, slots, latents, sizes, neighbours=neighbours)

    def attend(
        self,
        q: Tensor,
        weight: Tensor,
        cache: Tensor,
        batch: Batch,
        spec: MLASpec,
        adapted: MLALoRA | None = None,
    ) -> Tensor:
        most = batch.max_query_len
        if most <= FEW_QUERIES:
            return _absorbed(q, weight, cache, _seqs(batch), most, spec, adapted)
        shape = launch.tile_shape(q.dtype, sms(q.device)[1])
        most_keys = max(1, EXPANDED_BYTES // (weight[..., 0].numel() * q.element_size()))
        lens = batch.query_lens_host.tobytes(), batch.seq_lens_host.tobytes()
        cut = _cut(*lens, shape.block_m, most_keys, batch.seq_lens.device)
        out = q.new_empty(len(q), spec.heads, spec.v_dim)
        for each in cut.rounds:
            _expanded(out, q, weight, cache, _seqs(batch), each, most_keys, shape, spec, adapted)
        if (few := cut.few) is not None:
            tables = batch.block_tables
            lens_and_rows = batch.seq_lens[few.seqs], batch.rows[few.seqs]
            seqs = AttentionSeqs(few.query_starts, *lens_and_rows, tables, tables.stride(0))
            own = None if adapted is None else adapted.of(few.tokens)
            out[few.tokens] = _absorbed(q[few.tokens], weight, cache, seqs, few.most_queries, spec, own)
        return out


def _absorbed(
    q: Tensor,
    weight: Tensor,
    cache: Tensor,
    seqs: AttentionSeqs,
    most_queries: int,
    spec: MLASpec,
    adapted: MLALoRA | None,
) -> Tensor:
    latent = absorb(q, weight, spec, adapted)
    seen = q.new_empty(len(q), spec.heads, spec.rank)
    rope = q[..., spec.nope_dim :]
    launch.attend_shares(seen, latent, rope, launch.latents_of(cache), seqs, _sizes(spec), most_queries)
    return release(seen, weight, spec, adapted)


def _expanded(
    out: Tensor,
    q: Tensor,
    weight: Tensor,
    cache: Tensor,
    seqs: AttentionSeqs,
    prompts: _Round,
    most_keys: int,
    shape: AttentionShape,
    spec: MLASpec,
    adapted: MLALoRA | None,
) -> None:
    latents = q.new_empty(prompts.num_keys, spec.width)
    launch.gather(latents, launch.latents_of(cache), seqs, prompts.keys, spec.k_scale)
    latent, turned = latents.split([spec.rank, spec.rope_dim], -1)
    step = max(1, spec.heads * most_keys // prompts.num_keys)
    for first in range(0, spec.heads, step):
        some = slice(first, first + step)
        kv = latent @ weight[some].flatten(0, 1).T
        if adapted is not None:
            adapted.add(kv, latent, first * weight.shape[1], prompts.owners)
        kv = kv.view(prompts.num_keys, -1, weight.shape[1])
        launch.attend_tiles(out[:, some], q[:, some], kv, turned, seqs, prompts.tiles, _sizes(spec), shape)


def _sizes(spec: MLASpec) -> MLASizes:
    return MLASizes(spec.heads, spec.rank, spec.nope_dim, spec.rope_dim, spec.v_dim, spec.scale, spec.k_scale)


def _seqs(batch: Batch) -> AttentionSeqs:
    tables = batch.block_tables
    return AttentionSeqs(batch.query_starts, batch.seq_lens, batch.rows, tables, tables.stride(0))


@lru_cache(maxsize=4)
def _cut(query_lens: bytes, seq_lens: bytes, tile: int, most_keys: int, device: torch.device) -> _PromptSplit:
    """The same for all layers: kept until other lengths come."""
    queries, keys = (np.frombuffer(lens, np.int32) for lens in (query_lens, seq_lens))
    rounds: list[list[int]] = []
    room = 0
    for seq in np.flatnonzero(queries > FEW_QUERIES).tolist():
        if keys[seq] > room:
            rounds.append([])
            room = most_keys
        rounds[-1].append(seq)
        room -= int(keys[seq])
    made = [_round(queries, keys, np.array(seqs), tile, device) for seqs in rounds]
    few = np.flatnonzero(queries <= FEW_QUERIES)
    return _PromptSplit(_few(queries, few, device) if len(few) else None, made)


def _round(
    queries: NDArray[np.int32],
    keys: NDArray[np.int32],
    seqs: NDArray[np.intp],
    tile: int,
    device: torch.device,
) -> _Round:
    begins = np.cumsum(keys[seqs]) - keys[seqs]
    gathered = _work(seqs, keys[seqs], launch.GATHERED_KEYS)
    gathered[:, 2] = begins[gathered[:, 2]] + gathered[:, 1]
    # A sequence's last tile first: it has the most keys.
    tiles = _work(seqs, queries[seqs], tile)[::-1].copy()
    tiles[:, 2] = begins[tiles[:, 2]]
    work = sent(np.concatenate((gathered, tiles)).astype(np.int32), device)
    owners = np.repeat((np.cumsum(queries) - queries)[seqs], keys[seqs])
    cut = work[: len(gathered)], work[len(gathered) :]
    return _Round(int(keys[seqs].sum()), *cut, sent(owners, device))


def _work(seqs: NDArray[np.intp], lens: NDArray[np.int32], tile: int) -> NDArray[np.intp]:
    """[tiles, 3]: the sequence, the first of its tokens, and the place of the sequence among `seqs`."""
    counts = -(-lens // tile)
    which = np.repeat(np.arange(len(seqs)), counts)
    firsts = (np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)) * tile
    return np.stack((seqs[which], firsts, which), 1)


def _few(queries: NDArray[np.int32], seqs: NDArray[np.intp], device: torch.device) -> _Few:
    lens = queries[seqs]
    starts = np.concatenate(([0], np.cumsum(lens)))
    firsts = np.cumsum(queries)[seqs] - lens
    tokens = np.arange(starts[-1]) + np.repeat(firsts - starts[:-1], lens)
    firsts_of_few = sent(starts.astype(np.int32), device)
    return _Few(sent(seqs, device), sent(tokens, device), firsts_of_few, int(lens.max()))
