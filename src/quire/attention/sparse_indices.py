"""An indexer's choice: of all tokens before it, a token sees those that it scores best.

A score is the sum over heads of relu(q . k), each times a weight of the token's own; all heads share a key.
What is picked are slots of the cache, so that attention reads them as blocks of one token, in no order.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.attention.batch import Batch

_SCORES_BYTES = 64 << 20
"""Of scores that exist at once."""


class SparseIndices(NamedTuple):
    """What each token sees."""

    slots: Tensor
    """[T, most] int32, the best first"""
    lens: Tensor
    """[T] int32, how many of them it sees"""

    def seen_by(self, batch: Batch) -> Batch:
        """The tokens of `batch` as sequences of their own, in blocks of one token."""
        num, most = self.slots.shape
        tokens = torch.arange(num + 1, dtype=torch.int32, device=self.slots.device)
        lens = np.full(num, most, np.int32) if self.lens.is_cuda else self.lens.numpy()
        return Batch(
            token_ids=batch.token_ids,
            positions=batch.positions,
            slots=batch.slots,
            query_starts=tokens,
            seq_lens=self.lens,
            rows=tokens[:-1],
            block_tables=self.slots,
            logit_tokens=batch.logit_tokens,
            query_lens_host=np.ones(num, np.int32),
            seq_lens_host=lens,
        )


def pick(q: Tensor, weights: Tensor, keys: Tensor, batch: Batch, most: int) -> SparseIndices | None:
    """[T, heads, dim] queries, [T, heads] float32 weights, [num_blocks, block_size, dim] keys, those of the
    batch among them; None: no token has more than `most` to see."""
    num, block_size = len(q), keys.shape[1]
    width = batch.block_tables.shape[1] * block_size
    if not (q.is_cuda and (batch.are_decodes or batch.are_any)):  # lengths on the host mean something
        longest = batch.max_seq_len if q.is_cuda else int(batch.seq_lens.max())
        if longest <= most:
            return None
        width = min(width, longest)
    ends, last = batch.query_starts[1:], len(batch.rows) - 1
    seqs = torch.searchsorted(ends, torch.arange(num, device=q.device), right=True).clamp_(max=last)
    rows, seen = batch.rows[seqs].long(), torch.where(batch.seq_lens[seqs] > 0, batch.positions + 1, 0)
    most = min(most, width)
    slots = torch.empty(num, most, dtype=torch.int32, device=q.device)
    step = max(1, _SCORES_BYTES // (4 * width))
    for first in range(0, num, step):
        some = slice(first, first + step)
        scores = _scores(q[some], weights[some], keys, batch.block_tables, rows[some], seen[some], width)
        best = scores.topk(most, -1).indices
        blocks = batch.block_tables[rows[some, None], best // block_size]
        slots[some] = blocks * block_size + best % block_size
    return SparseIndices(slots, seen.clamp(max=most).int())


def _scores(
    q: Tensor, weights: Tensor, keys: Tensor, tables: Tensor, rows: Tensor, seen: Tensor, width: int
) -> Tensor:
    """[T, width] float32, of the keys of each token's row; -inf where it sees none."""
    if not q.is_cuda:
        return reference(q, weights, keys, tables, rows, seen, width)
    from quire.kernels.triton.sparse_indexer import scores

    return scores(q, weights, keys, tables, rows, seen, width)


def reference(
    q: Tensor, weights: Tensor, keys: Tensor, tables: Tensor, rows: Tensor, seen: Tensor, width: int
) -> Tensor:
    """The same in torch, row by row."""
    out = torch.full((len(q), width), -torch.inf, device=q.device)
    size, flat = keys.shape[1], keys.flatten(0, 1)
    own, counts = torch.unique_consecutive(rows, return_counts=True)
    at = 0
    for row, count in zip(own.tolist(), counts.tolist(), strict=True):
        length = min(width, int(seen[at : at + count].max()))
        places = torch.arange(length, device=q.device)
        read = flat[tables[row].long()[places // size] * size + places % size].float()
        step = max(1, _SCORES_BYTES // (4 * q.shape[1] * max(length, 1)))
        for first in range(at, at + count, step):
            some = slice(first, min(first + step, at + count))
            by_head = (q[some].float() @ read.t()).relu_()
            scores = torch.einsum("th,thk->tk", weights[some], by_head)
            out[some, :length] = scores.masked_fill(places >= seen[some, None], -torch.inf)
        at += count
    return out


def keep(x: Tensor, keys: Tensor, slots: Tensor) -> None:
    """[T, dim] into their slots; those without one into the first, which nobody reads."""
    into = keys.flatten(0, 1)
    if keys.dtype.itemsize == 1:
        limit = torch.finfo(keys.dtype).max
        x = x.float().clamp(-limit, limit).to(keys.dtype).view(torch.uint8)
        into = into.view(torch.uint8)
    into[slots.clamp_min(0)] = x.to(into.dtype)
