"""Latent attention on a CPU, by the native kernel of paged attention.

Absorbed, all heads attend to one head of keys that are its values too. The keys and values of long chunks are
multiplied out into a cache of their own.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from quire.attention.batch import Batch
from quire.attention.mla import MLAEntry, MLALoRA, MLASpec, TorchMLA
from quire.attention.torch_sdpa import read
from quire.kernels.cpu import attention
from quire.kernels.reference import mla

FEW_QUERIES = 160
"""Up to here a sequence's queries are absorbed: fewer products than multiplying out its keys."""
EXPANDED_BYTES = 64 << 20
"""Keys and values are multiplied out up to this size at a time, by heads."""
_BLOCK = 16


class CPUMLA(TorchMLA):
    """The native kernels: those around latents, and paged attention."""

    turns = True

    def enter(self, q: Tensor, kv: Tensor, entry: MLAEntry, spec: MLASpec) -> None:
        mla.enter(
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
        if batch.max_query_len <= FEW_QUERIES or not expands:
            return _absorbed(q, weight, cache, batch, spec, adapted)
        out, lens = q.new_empty(len(q), spec.heads, spec.v_dim), batch.query_lens_host
        for chosen, kind in ((lens <= FEW_QUERIES, _absorbed), (lens > FEW_QUERIES, _expanded)):
            if chosen.any():
                tokens, some = _part(batch, np.flatnonzero(chosen))
                own = None if adapted is None else adapted.of(tokens)
                out[tokens] = kind(q[tokens], weight, cache, some, spec, own)
        return out


def _absorbed(
    q: Tensor, weight: Tensor, cache: Tensor, batch: Batch, spec: MLASpec, adapted: MLALoRA | None
) -> Tensor:
    queries = mla.absorb(q, weight, rope_dim=spec.rope_dim)
    if adapted is not None:
        _add_absorbed(queries, q, adapted, spec)
    keys = cache[:, :, None]
    tables, scales = batch.block_tables, (spec.k_scale, spec.k_scale)
    seen = _attend(queries, keys, keys, batch, batch.rows, tables, spec.scale, scales)
    out = mla.release(seen, weight, v_dim=spec.v_dim)
    if adapted is not None:
        _add_released(out, seen, adapted, spec)
    return out


def _add_absorbed(queries: Tensor, q: Tensor, adapted: MLALoRA, spec: MLASpec) -> None:
    assert adapted.turned is not None
    keys, down = adapted.turned
    for head in range(spec.heads):
        out, x = queries[:, head, : spec.rank], q[:, head, : spec.nope_dim]
        adapted.ops.lora(out, x, keys[:, head], down, (spec.rank,), adapted.tokens)


def _add_released(out: Tensor, seen: Tensor, adapted: MLALoRA, spec: MLASpec) -> None:
    _, values = adapted.by_heads(spec)
    for head in range(spec.heads):
        x, up = seen[:, head, : spec.rank], values[:, head]
        adapted.ops.lora(out[:, head], x, adapted.a, up, (spec.v_dim,), adapted.tokens)


def _expanded(
    q: Tensor, weight: Tensor, cache: Tensor, batch: Batch, spec: MLASpec, adapted: MLALoRA | None
) -> Tensor:
    rows, tables, latents = _gathered(cache, batch, q.dtype, spec.k_scale)
    plain, turned = latents.split([spec.rank, spec.rope_dim], -1)
    out = q.new_empty(len(q), spec.heads, spec.v_dim)
    bytes_of_head = 2 * len(latents) * spec.query_dim * q.itemsize
    step = max(1, EXPANDED_BYTES // bytes_of_head)
    for first in range(0, spec.heads, step):
        some = slice(first, first + step)
        kv = F.linear(plain, weight[some].flatten(0, 1))
        if adapted is not None:
            adapted.add(kv, plain, first * weight.shape[1], _owners(batch))
        kv = kv.view(len(latents), -1, weight.shape[1])
        keys, values = kv.split([spec.nope_dim, spec.v_dim], -1)
        keys = torch.cat((keys, turned[:, None].expand(-1, kv.shape[1], -1)), -1)
        values = F.pad(values, (0, spec.query_dim - spec.v_dim))
        keys, values = (x.unflatten(0, (-1, _BLOCK)) for x in (keys, values))
        mixed = _attend(q[:, some], keys, values, batch, rows, tables, spec.scale)
        out[:, some] = mixed[..., : spec.v_dim]
    return out


def _gathered(cache: Tensor, batch: Batch, dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The latents of all sequences in blocks one after the other: rows, block tables, the blocks."""
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


def _owners(batch: Batch) -> Tensor:
    """The first token of the sequence that each of the gathered latents is of."""
    num_keys = -(-batch.seq_lens_host // _BLOCK) * _BLOCK
    return torch.from_numpy(np.repeat(np.cumsum(batch.query_lens_host) - batch.query_lens_host, num_keys))


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: Batch,
    rows: Tensor,
    tables: Tensor,
    scale: float,
    scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    return attention.attend(
        q,
        keys,
        values,
        rows=rows,
        block_tables=tables,
        query_starts=batch.query_starts,
        seq_lens=batch.seq_lens,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        scale=scale,
        window=None,
        softcap=None,
        scales=scales,
    )


def _part(batch: Batch, seqs: NDArray[np.intp]) -> tuple[Tensor, Batch]:
    """Some sequences of a batch: where their tokens stand in it, and a batch of them alone."""
    lens = batch.query_lens_host[seqs]
    starts = np.concatenate(([0], np.cumsum(lens)))
    firsts = np.cumsum(batch.query_lens_host)[seqs] - lens
    tokens = torch.from_numpy(np.arange(starts[-1]) + np.repeat(firsts - starts[:-1], lens))
    some = torch.from_numpy(seqs)
    return tokens, Batch(
        token_ids=batch.token_ids,
        positions=batch.positions,
        slots=batch.slots,
        query_starts=torch.from_numpy(starts.astype(np.int32)),
        seq_lens=batch.seq_lens[some],
        rows=batch.rows[some],
        block_tables=batch.block_tables,
        logit_tokens=batch.logit_tokens,
        query_lens_host=lens,
        seq_lens_host=batch.seq_lens_host[seqs],
    )
