"""Token selection of the sparse indexer: each token attends to the earlier tokens with the best scores.

A score is the sum over heads of weight * relu(q . k), with weights per query token; all heads share a key.
The selection consists of cache slots, so that attention reads them as blocks of one token, in any order.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.attention.batch import Batch
from quire.kernels import batch_invariant

_SCORES_BYTES = 64 << 20
"""Maximum bytes of scores in memory at a time; the tokens are processed in parts that fit."""


class SparseIndices(NamedTuple):
    """Cache slots of the earlier tokens that the indexer has selected for each token to attend to."""

    slots: Tensor
    """[T, top_k] int32 cache slots, valid up to `lens`: best first, or in the batch-invariant mode in the
    order of their positions"""
    lens: Tensor
    """[T] int32, number of valid slots"""

    def as_batch(self, batch: Batch) -> Batch:
        """Return a batch with which a backend attends to the selected tokens: each token is a sequence of its
        own, whose block table lists the selected slots as blocks of one token."""
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


def select(q: Tensor, weights: Tensor, keys: Tensor, batch: Batch, most: int) -> SparseIndices | None:
    """Select for each of T tokens the up to `most` best-scored tokens up to itself. `q` [T, heads, dim]
    are the indexer's queries, `weights` [T, heads] float32 its head weights, and `keys` [num_blocks,
    block_size, dim] its key cache, which already has the keys of the batch. Return None if no sequence is
    longer than `most`: then every token attends to all earlier ones."""
    num, block_size = len(q), keys.shape[1]
    width = batch.block_tables.shape[1] * block_size
    if not (q.is_cuda and (batch.are_decodes or batch.are_mixed)):  # host lengths are valid
        longest = batch.max_seq_len if q.is_cuda else int(batch.seq_lens.max())
        if longest <= most:
            return None
        width = min(width, longest)
    ends, last = batch.query_starts[1:], len(batch.rows) - 1
    seqs = torch.searchsorted(ends, torch.arange(num, device=q.device), right=True).clamp_(max=last)
    rows, num_keys = batch.rows[seqs].long(), torch.where(batch.seq_lens[seqs] > 0, batch.positions + 1, 0)
    most = min(most, width)
    slots = torch.empty(num, most, dtype=torch.int32, device=q.device)
    step = max(1, _SCORES_BYTES // (4 * width))
    for first in range(0, num, step):
        chunk = slice(first, first + step)
        args = rows[chunk], num_keys[chunk], width
        scores = _compute_scores(q[chunk], weights[chunk], keys, batch.block_tables, *args)
        best = _best_in_order(scores, most) if batch_invariant.is_on() else scores.topk(most, -1).indices
        blocks = batch.block_tables[rows[chunk, None], best // block_size]
        slots[chunk] = blocks * block_size + best % block_size
    return SparseIndices(slots, num_keys.clamp(max=most).int())


def _best_in_order(scores: Tensor, most: int) -> Tensor:
    """Return the positions of the `most` best scores of each row, ascending; of equal scores the first ones.
    Neither the number of columns nor the algorithm of `topk` changes the result, and attention adds in the
    order in which it adds without a selection."""
    bits = (scores + 0.0).view(torch.int32)  # one sign of zeros
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats
    unique = (ordered.long() << 32) - torch.arange(scores.shape[1], device=scores.device)
    return unique.topk(most, -1).indices.sort(-1).values


def _compute_scores(
    q: Tensor, weights: Tensor, keys: Tensor, tables: Tensor, rows: Tensor, num_keys: Tensor, width: int
) -> Tensor:
    """Return float32 scores [T, width] of the cached keys at the first `width` positions of each token's
    sequence. `rows` [T] are rows of the block tables `tables`. Scores from position `num_keys` [T] on are
    -inf."""
    if not q.is_cuda:
        return reference(q, weights, keys, tables, rows, num_keys, width)
    from quire.kernels.triton.sparse_indexer import scores

    return scores(q, weights, keys, tables, rows, num_keys, width)


def reference(
    q: Tensor, weights: Tensor, keys: Tensor, tables: Tensor, rows: Tensor, num_keys: Tensor, width: int
) -> Tensor:
    """Compute the scores of `_compute_scores` in plain torch, for one sequence after the other."""
    out = torch.full((len(q), width), -torch.inf, device=q.device)
    size, flat = keys.shape[1], keys.flatten(0, 1)
    unique_rows, counts = torch.unique_consecutive(rows, return_counts=True)
    at = 0
    for row, count in zip(unique_rows.tolist(), counts.tolist(), strict=True):
        length = min(width, int(num_keys[at : at + count].max()))
        positions = torch.arange(length, device=q.device)
        row_keys = flat[tables[row].long()[positions // size] * size + positions % size].float()
        step = max(1, _SCORES_BYTES // (4 * q.shape[1] * max(length, 1)))
        for first in range(at, at + count, step):
            chunk = slice(first, min(first + step, at + count))
            by_head = (q[chunk].float() @ row_keys.t()).relu_()
            scores = torch.einsum("th,thk->tk", weights[chunk], by_head)
            out[chunk, :length] = scores.masked_fill(positions >= num_keys[chunk, None], -torch.inf)
        at += count
    return out


def write_keys(x: Tensor, keys: Tensor, slots: Tensor) -> None:
    """Write the indexer keys x [T, dim] to `slots` [T] of the cache `keys` [num_blocks, block_size, dim].
    Tokens with a negative slot are written to slot 0, which is never read."""
    flat = keys.flatten(0, 1)
    if keys.dtype.itemsize == 1:
        limit = torch.finfo(keys.dtype).max
        x = x.float().clamp(-limit, limit).to(keys.dtype).view(torch.uint8)
        flat = flat.view(torch.uint8)
    flat[slots.clamp_min(0)] = x.to(flat.dtype)
