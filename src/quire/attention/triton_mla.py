"""Latent attention on a GPU: in latent space for few queries per sequence, with expanded keys for prompts."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.attention.batch import Batch
from quire.attention.mla import MLAEntry, MLALoRA, MLASpec, TorchMLA, absorb, release
from quire.kernels import batch_invariant
from quire.kernels.host_to_device import copy_to_device
from quire.kernels.triton import mla_launch as launch
from quire.kernels.triton.attention import AttentionSeqs
from quire.kernels.triton.attention_launch import AttentionShape, sms
from quire.kernels.triton.mla_launch import MLASizes

FEW_QUERIES = 8
"""Maximum queries per sequence for attention in latent space (`absorb`). With more queries, expanding the
latents to keys and values costs fewer operations."""
EXPANDED_BYTES = 256 << 20
"""Maximum bytes of expanded keys and values at a time; it limits the sequences and heads expanded at a
time."""


class _Few(NamedTuple):
    """Sequences with few queries in a batch that has prompts."""

    seqs: Tensor
    """Indices of the sequences in the batch."""
    tokens: Tensor
    """Indices of their tokens in the batch."""
    query_starts: Tensor
    """int32, start of each sequence among `tokens`, and the end of the last."""
    most_queries: int


class _Round(NamedTuple):
    """Prompts for which the keys are expanded together, within `EXPANDED_BYTES` if possible."""

    num_keys: int
    keys: Tensor
    """[tiles, 3] int32, for `gather`: sequence, first key in it, row of that key among the expanded keys."""
    tiles: Tensor
    """[tiles, 3] int32, for `attend_tiles`: sequence, first query in it, row of the sequence's first key."""
    owners: Tensor
    """[num_keys], the index in the batch of the first token of each key's sequence"""


class _PromptSplit(NamedTuple):
    """Assignment of a batch's sequences to kernels: those with few queries to attention in latent space,
    prompts to rounds of attention with expanded keys."""

    few: _Few | None
    rounds: list[_Round]


class TritonMLA(TorchMLA):
    """Latent attention by Triton kernels. The cache has the dtype of the queries, or 8 bits."""

    needs_transposed_lora = False

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
        if batch_invariant.is_on():
            return _attend_fixed(q, weight, cache, _seqs(batch), most, spec, adapted)
        if most <= FEW_QUERIES:
            return _attend_absorbed(q, weight, cache, _seqs(batch), most, spec, adapted)
        shape = launch.tile_shape(q.dtype, sms(q.device)[1])
        most_keys = max(1, EXPANDED_BYTES // (weight[..., 0].numel() * q.element_size()))
        lens = batch.query_lens_host.tobytes(), batch.seq_lens_host.tobytes()
        split = _split(*lens, shape.block_m, most_keys, batch.seq_lens.device)
        out = q.new_empty(len(q), spec.heads, spec.v_dim)
        for prompts in split.rounds:
            _attend_expanded(out, q, weight, cache, _seqs(batch), prompts, most_keys, shape, spec, adapted)
        if (few := split.few) is not None:
            tables = batch.block_tables
            lens_and_rows = batch.seq_lens[few.seqs], batch.rows[few.seqs]
            seqs = AttentionSeqs(few.query_starts, *lens_and_rows, tables, tables.stride(0))
            adapted = None if adapted is None else adapted.of(few.tokens)
            queries, most = q[few.tokens], few.most_queries
            out[few.tokens] = _attend_absorbed(queries, weight, cache, seqs, most, spec, adapted)
        return out


def _attend_absorbed(
    q: Tensor,
    weight: Tensor,
    cache: Tensor,
    seqs: AttentionSeqs,
    most_queries: int,
    spec: MLASpec,
    adapted: MLALoRA | None,
) -> Tensor:
    latent = absorb(q, weight, spec, adapted)
    mixed = q.new_empty(len(q), spec.heads, spec.rank)
    rope = q[..., spec.nope_dim :]
    launch.attend_shares(mixed, latent, rope, launch.latents_of(cache), seqs, _sizes(spec), most_queries)
    return release(mixed, weight, spec, adapted)


def _attend_fixed(
    q: Tensor,
    weight: Tensor,
    cache: Tensor,
    seqs: AttentionSeqs,
    most_queries: int,
    spec: MLASpec,
    adapted: MLALoRA | None,
) -> Tensor:
    """Compute attention in the batch-invariant mode: always in latent space, some heads at a time."""
    out = q.new_empty(len(q), spec.heads, spec.v_dim)
    step = min(max(1, EXPANDED_BYTES // (2 * len(q) * spec.rank * q.element_size())), spec.heads)
    for first in range(0, spec.heads, step):
        some = slice(first, first + step)
        by_some = None if adapted is None else adapted.of_heads(some, spec)
        latent = absorb(q[:, some], weight[some], spec, by_some)
        mixed, rope = q.new_empty(latent.shape), q[:, some, spec.nope_dim :]
        launch.attend_fixed(mixed, latent, rope, launch.latents_of(cache), seqs, _sizes(spec), most_queries)
        out[:, some] = release(mixed, weight[some], spec, by_some)
    return out


def _attend_expanded(
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
    cached = q.new_empty(prompts.num_keys, spec.width)
    launch.gather(cached, launch.latents_of(cache), seqs, prompts.keys, spec.k_scale)
    latents, rope_keys = cached.split([spec.rank, spec.rope_dim], -1)
    step = max(1, spec.heads * most_keys // prompts.num_keys)
    for first in range(0, spec.heads, step):
        heads, sizes = slice(first, first + step), _sizes(spec)
        kv = latents @ weight[heads].flatten(0, 1).T
        if adapted is not None:
            adapted.add(kv, latents, first * weight.shape[1], prompts.owners)
        kv = kv.view(prompts.num_keys, -1, weight.shape[1])
        launch.attend_tiles(out[:, heads], q[:, heads], kv, rope_keys, seqs, prompts.tiles, sizes, shape)


def _sizes(spec: MLASpec) -> MLASizes:
    return MLASizes(spec.heads, spec.rank, spec.nope_dim, spec.rope_dim, spec.v_dim, spec.scale, spec.k_scale)


def _seqs(batch: Batch) -> AttentionSeqs:
    tables = batch.block_tables
    return AttentionSeqs(batch.query_starts, batch.seq_lens, batch.rows, tables, tables.stride(0))


@lru_cache(maxsize=4)
def _split(
    query_lens: bytes, seq_lens: bytes, tile: int, most_keys: int, device: torch.device
) -> _PromptSplit:
    """Assign sequences with few queries to attention in latent space, and the others to rounds of at most
    `most_keys` expanded keys and tiles of `tile` queries. The lengths of all sequences are int32 arrays as
    bytes, which can be keys of the cache of results: all layers of a step share one result."""
    queries, keys = (np.frombuffer(lens, np.int32) for lens in (query_lens, seq_lens))
    rounds: list[list[int]] = []
    room = 0
    for seq in np.flatnonzero(queries > FEW_QUERIES).tolist():
        if keys[seq] > room:
            rounds.append([])
            room = most_keys
        rounds[-1].append(seq)
        room -= int(keys[seq])
    built = [_build_round(queries, keys, np.array(seqs), tile, device) for seqs in rounds]
    few = np.flatnonzero(queries <= FEW_QUERIES)
    return _PromptSplit(_build_few(queries, few, device) if len(few) else None, built)


def _build_round(
    queries: NDArray[np.int32],
    keys: NDArray[np.int32],
    seqs: NDArray[np.intp],
    tile: int,
    device: torch.device,
) -> _Round:
    begins = np.cumsum(keys[seqs]) - keys[seqs]
    gathered = _build_tiles(seqs, keys[seqs], launch.GATHERED_KEYS)
    gathered[:, 2] = begins[gathered[:, 2]] + gathered[:, 1]
    # The last tile of a sequence comes first: it has the most keys.
    tiles = _build_tiles(seqs, queries[seqs], tile)[::-1].copy()
    tiles[:, 2] = begins[tiles[:, 2]]
    work = copy_to_device(np.concatenate((gathered, tiles)).astype(np.int32), device)
    owners = np.repeat((np.cumsum(queries) - queries)[seqs], keys[seqs])
    parts = work[: len(gathered)], work[len(gathered) :]
    return _Round(int(keys[seqs].sum()), *parts, copy_to_device(owners, device))


def _build_tiles(seqs: NDArray[np.intp], lens: NDArray[np.int32], tile: int) -> NDArray[np.intp]:
    """Divide sequences with `lens` tokens into tiles of `tile` tokens. Return [tiles, 3]: the sequence, the
    tile's first token in it, and the sequence's index in `seqs`."""
    counts = -(-lens // tile)
    index = np.repeat(np.arange(len(seqs)), counts)
    firsts = (np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)) * tile
    return np.stack((seqs[index], firsts, index), 1)


def _build_few(queries: NDArray[np.int32], seqs: NDArray[np.intp], device: torch.device) -> _Few:
    lens = queries[seqs]
    starts = np.concatenate(([0], np.cumsum(lens)))
    firsts = np.cumsum(queries)[seqs] - lens
    tokens = np.arange(starts[-1]) + np.repeat(firsts - starts[:-1], lens)
    query_starts = copy_to_device(starts.astype(np.int32), device)
    return _Few(copy_to_device(seqs, device), copy_to_device(tokens, device), query_starts, int(lens.max()))
