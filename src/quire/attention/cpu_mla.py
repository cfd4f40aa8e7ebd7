"""Latent attention on a CPU, by the native kernel of paged attention.

With queries projected into latent space (`absorb`), it is multi-query attention: one KV head, whose keys and
values are the same latents. For long chunks the latents are expanded to keys and values in a temporary cache.
"""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from quire.attention.backend import AttentionSpec
from quire.attention.batch import Batch
from quire.attention.cpu_attn import CPUAttention
from quire.attention.mla import MLAEntry, MLALoRA, MLASpec, TorchMLA
from quire.attention.torch_sdpa import read
from quire.kernels import batch_invariant
from quire.kernels.cpu import attention
from quire.kernels.reference import mla

FEW_QUERIES = 160
"""Maximum queries per sequence for attention in latent space. With more queries, expanding the latents to
keys and values costs fewer operations."""
EXPANDED_BYTES = 64 << 20
"""Maximum bytes of expanded keys and values at a time; beyond it, fewer heads are expanded at a time."""
_BLOCK = 16


class CPUMLA(TorchMLA):
    """MLA by native CPU kernels, which write the cache, project queries and outputs, and compute paged
    attention."""

    needs_transposed_lora = True

    def enter(self, q: Tensor, kv: Tensor, entry: MLAEntry, spec: MLASpec) -> None:
        mla.rotate_and_write_latents(
            q,
            kv,
            entry.cache,
            norm=entry.norm,
            eps=entry.eps,
            table=entry.table,
            positions=entry.positions,
            slots=entry.slots,
            neighbours=spec.neighbours,
            scale=spec.k_scale,
        )

    def attend(
        self,
        q: Tensor,
        weight: Tensor,
        cache: Tensor,
        batch: Batch,
        spec: MLASpec,
        adapted: MLALoRA | None = None,
    ) -> Tensor:
        if spec.width % attention.HEAD_DIM_STEP:
            return super().attend(q, weight, cache, batch, spec, adapted)
        expands = spec.query_dim % attention.HEAD_DIM_STEP == 0 and spec.v_dim <= spec.query_dim
        if batch.max_query_len <= FEW_QUERIES or not expands or batch_invariant.is_on():
            return _attend_absorbed(q, weight, cache, batch, spec, adapted)
        out, lens = q.new_empty(len(q), spec.heads, spec.v_dim), batch.query_lens_host
        is_few = lens <= FEW_QUERIES
        for chosen, attend in ((is_few, _attend_absorbed), (~is_few, _attend_expanded)):
            if chosen.any():
                tokens, part = _select_sequences(batch, np.flatnonzero(chosen))
                part_adapted = None if adapted is None else adapted.of(tokens)
                out[tokens] = attend(q[tokens], weight, cache, part, spec, part_adapted)
        return out


def _attend_absorbed(
    q: Tensor, weight: Tensor, cache: Tensor, batch: Batch, spec: MLASpec, adapted: MLALoRA | None
) -> Tensor:
    queries = mla.absorb(q, weight, rope_dim=spec.rope_dim)
    if adapted is not None:
        _add_absorbed(queries, q, adapted, spec)
    keys = cache[:, :, None]
    mixed = _attend(queries, keys, keys, batch, spec.scale, spec.k_scale)
    out = mla.release(mixed, weight, v_dim=spec.v_dim)
    if adapted is not None:
        _add_released(out, mixed, adapted, spec)
    return out


def _add_absorbed(queries: Tensor, q: Tensor, adapted: MLALoRA, spec: MLASpec) -> None:
    assert adapted.transposed is not None
    keys, down = adapted.transposed
    for head in range(spec.heads):
        out, x = queries[:, head, : spec.rank], q[:, head, : spec.nope_dim]
        adapted.ops.lora(out, x, keys[:, head], down, (spec.rank,), adapted.slots)


def _add_released(out: Tensor, mixed: Tensor, adapted: MLALoRA, spec: MLASpec) -> None:
    _, values = adapted.by_heads(spec)
    for head in range(spec.heads):
        x, up = mixed[:, head, : spec.rank], values[:, head]
        adapted.ops.lora(out[:, head], x, adapted.a, up, (spec.v_dim,), adapted.slots)


def _attend_expanded(
    q: Tensor, weight: Tensor, cache: Tensor, batch: Batch, spec: MLASpec, adapted: MLALoRA | None
) -> Tensor:
    rows, tables, cached = _gather_latents(cache, batch, q.dtype, spec.k_scale)
    expanded = replace(batch, rows=rows, block_tables=tables)
    latents, rope_keys = cached.split([spec.rank, spec.rope_dim], -1)
    out = q.new_empty(len(q), spec.heads, spec.v_dim)
    bytes_of_head = 2 * len(cached) * spec.query_dim * q.itemsize
    step = max(1, EXPANDED_BYTES // bytes_of_head)
    for first in range(0, spec.heads, step):
        heads = slice(first, first + step)
        kv = F.linear(latents, weight[heads].flatten(0, 1))
        if adapted is not None:
            adapted.add(kv, latents, first * weight.shape[1], _first_tokens(batch))
        kv = kv.view(len(latents), -1, weight.shape[1])
        keys, values = kv.split([spec.nope_dim, spec.v_dim], -1)
        keys = torch.cat((keys, rope_keys[:, None].expand(-1, kv.shape[1], -1)), -1)
        values = F.pad(values, (0, spec.query_dim - spec.v_dim))
        keys, values = (x.unflatten(0, (-1, _BLOCK)) for x in (keys, values))
        mixed = _attend(q[:, heads], keys, values, expanded, spec.scale)
        out[:, heads] = mixed[..., : spec.v_dim]
    return out


def _gather_latents(
    cache: Tensor, batch: Batch, dtype: torch.dtype, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Copy the latents and RoPE keys of all sequences, dequantized to `dtype`, to consecutive blocks of a
    temporary cache. Return the sequences' rows in its block tables, the block tables, and the cache [slots,
    width]."""
    lens = batch.seq_lens_host
    widths = -(-lens // _BLOCK)
    firsts = np.cumsum(widths) - widths
    tables = torch.from_numpy((firsts[:, None] + np.arange(int(widths.max()))).astype(np.int32))
    latents = torch.zeros(int(widths.sum()) * _BLOCK, cache.shape[2], dtype=dtype)
    block_size = cache.shape[1]
    for row, first, num_keys in zip(batch.rows.tolist(), firsts.tolist(), lens.tolist(), strict=True):
        blocks = batch.block_tables[row, : -(-num_keys // block_size)].long()
        slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[:num_keys]
        latents[first * _BLOCK : first * _BLOCK + num_keys] = read(cache, slots, dtype, scale)
    return torch.arange(len(lens), dtype=torch.int32), tables, latents


def _first_tokens(batch: Batch) -> Tensor:
    """Return for each slot of the temporary cache that `_gather_latents` fills the index in the batch of the
    first token of the slot's sequence."""
    num_keys = -(-batch.seq_lens_host // _BLOCK) * _BLOCK
    return torch.from_numpy(np.repeat(np.cumsum(batch.query_lens_host) - batch.query_lens_host, num_keys))


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, batch: Batch, scale: float, cache_scale: float = 1.0
) -> Tensor:
    """Return the attention output of `q` [T, heads, head_dim], in the same shape, over paged keys and values,
    which are stored divided by `cache_scale`."""
    (_, heads, head_dim), kv_heads = q.shape, keys.shape[2]
    spec = AttentionSpec(heads, kv_heads, head_dim, q.dtype, scale=scale)
    spec = replace(spec, k_scale=cache_scale, v_scale=cache_scale)
    return CPUAttention().forward(q, keys, values, batch, spec)


def _select_sequences(batch: Batch, seqs: NDArray[np.intp]) -> tuple[Tensor, Batch]:
    """Return the indices of the tokens of the sequences `seqs` in a batch, and a batch of only these
    sequences, for attention."""
    lens = batch.query_lens_host[seqs]
    starts = np.concatenate(([0], np.cumsum(lens)))
    firsts = np.cumsum(batch.query_lens_host)[seqs] - lens
    tokens = torch.from_numpy(np.arange(starts[-1]) + np.repeat(firsts - starts[:-1], lens))
    index = torch.from_numpy(seqs)
    return tokens, Batch(
        token_ids=batch.token_ids,
        positions=batch.positions,
        slots=batch.slots,
        query_starts=torch.from_numpy(starts.astype(np.int32)),
        seq_lens=batch.seq_lens[index],
        rows=batch.rows[index],
        block_tables=batch.block_tables,
        logit_tokens=batch.logit_tokens,
        query_lens_host=lens,
        seq_lens_host=batch.seq_lens_host[seqs],
    )
