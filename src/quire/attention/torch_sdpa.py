"""TORCH_SDPA: attention in plain torch, on any device; the reference for every other backend."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from quire.attention.backend import AttentionSpec
from quire.attention.batch import Batch
from quire.config.machine import Machine

# Decodes are padded to the longest of their group; below this length padding costs less than one more call.
_ALWAYS_TOGETHER_LEN = 128
# Largest mask (queries x keys) of one call; longer chunks go in pieces.
_MAX_MASK = 1 << 24


@dataclass(frozen=True, slots=True)
class _Span:
    """N sequences with Q queries each, all padded to L keys."""

    tokens: Tensor | slice
    """Where the N * Q queries stand in the batch."""
    slots: Tensor
    """[N, L] cache slots to read; padding reads a slot that is written for sure, and is masked."""
    mask: Tensor | None
    """True where a query sees a key, broadcast over [N, heads, Q, L]; None: see `causal`."""
    behind: Tensor
    """[N, Q, L], how many tokens each key stands behind each query"""
    causal: bool = False
    """Q == L and a query sees all keys up to itself; without this and without a mask it sees all."""


@dataclass(slots=True)
class _Step:
    """How one batch is cut into spans; block size and window differ by layer at most in a few ways."""

    batch: Batch
    spans: dict[tuple[int, int | None], list[_Span]] = field(default_factory=dict)

    def cut(self, block_size: int, window: int | None) -> list[_Span]:
        key = (block_size, window)
        if key not in self.spans:
            self.spans[key] = [
                *_decode_spans(self.batch, block_size, window),
                *_chunk_spans(self.batch, block_size, window),
            ]
        return self.spans[key]


class TorchSDPA:
    """torch's own attention over gathered keys: the reference."""

    name = "TORCH_SDPA"
    capturable = captures_prompts = False

    def fits(self, spec: AttentionSpec, machine: Machine) -> str | None:
        return None

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
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        for span in batch.attention.cut(k_cache.shape[1], spec.window):
            queries = q[span.tokens].reshape(len(span.slots), -1, spec.heads, spec.head_dim)
            keys = read(k_cache, span.slots, q.dtype, spec.k_scale)
            values = read(v_cache, span.slots, q.dtype, spec.v_scale)
            if spec.softcap is None and sinks is None and alibi_slopes is None:
                attended = _attend(queries, keys, values, span, spec)
            else:
                attended = _attend_by_scores(queries, keys, values, span, spec, sinks, alibi_slopes)
            out[span.tokens] = attended.flatten(0, 1)
        return out


def read(cache: Tensor, slots: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """What is in slots, of any shape."""
    flat = cache.view(-1, *cache.shape[2:])
    if cache.dtype.itemsize > 1:
        return flat[slots].to(dtype)
    # 8-bit floats cannot be indexed everywhere.
    return flat.view(torch.uint8)[slots].view(cache.dtype).to(dtype) * scale


def _attend(queries: Tensor, keys: Tensor, values: Tensor, span: _Span, spec: AttentionSpec) -> Tensor:
    """[N, Q, heads, head_dim] against [N, L, kv_heads, head_dim]."""
    # With one query each, the heads that share a key head take the place of queries: nothing is repeated.
    fold = queries.shape[1] == 1
    folded = (len(queries), spec.kv_heads, -1, spec.head_dim)
    q = queries.view(folded) if fold else queries.transpose(1, 2)
    out = F.scaled_dot_product_attention(
        q,
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=span.mask,
        is_causal=span.causal,
        scale=spec.score_scale,
        enable_gqa=not fold and spec.heads != spec.kv_heads,
    )
    return out.flatten(1, 2).unsqueeze(1) if fold else out.transpose(1, 2)


def _attend_by_scores(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    span: _Span,
    spec: AttentionSpec,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
) -> Tensor:
    """`_attend`, with what torch's own attention does not have: a soft cap on scores, slopes, and sinks."""
    group = spec.heads // spec.kv_heads
    q, k, v = queries.float(), keys.float(), values.float()
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("nqhd,nlhd->nhql", q, k) * spec.score_scale
    if spec.softcap is not None:
        scores = (scores / spec.softcap).tanh() * spec.softcap
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None, None] * span.behind[:, None]
    seen = torch.ones_like(scores[0, 0], dtype=torch.bool).tril() if span.causal else span.mask
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(len(q), -1, q.shape[1], 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return torch.einsum("nhql,nlhd->nqhd", weights, v).to(queries.dtype)


def _slots(batch: Batch, seqs: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """[N, L] positions of the [N] sequences -> the slots that hold them."""
    blocks = batch.block_tables[batch.rows[seqs]].long().gather(1, positions // block_size)
    return blocks * block_size + positions % block_size


def _decode_spans(batch: Batch, block_size: int, window: int | None) -> list[_Span]:
    """The sequences with one query, in few groups of like length: a long one must not pad them all."""
    rows = np.flatnonzero((batch.query_lens_host == 1) & (batch.seq_lens_host > 0))
    lens = batch.seq_lens_host[rows]
    if window is not None:
        lens = np.minimum(lens, window)
    order = np.argsort(-lens, kind="stable")
    spans = []
    while len(order):
        longest = int(lens[order[0]])
        shortest = 0 if longest <= _ALWAYS_TOGETHER_LEN else longest / 2
        num_fitting = int((lens[order] >= shortest).sum())
        group, order = order[:num_fitting], order[num_fitting:]
        spans.append(_decode_span(batch, np.sort(rows[group]), longest, block_size, window))
    return spans


def _decode_span(
    batch: Batch, rows: NDArray[np.intp], longest: int, block_size: int, window: int | None
) -> _Span:
    device = batch.slots.device
    index = torch.from_numpy(rows).to(device)
    seq_lens = batch.seq_lens[index].long()[:, None]
    first = (seq_lens - window).clamp_(min=0) if window is not None else torch.zeros_like(seq_lens)
    positions = first + torch.arange(longest, device=device)
    seen = positions < seq_lens
    slots = _slots(batch, index, torch.where(seen, positions, first), block_size)
    tokens = batch.query_starts[index].long()
    behind = (seq_lens - 1 - positions)[:, None]
    return _Span(tokens, slots, seen[:, None, None] if len(rows) > 1 else None, behind)


def _chunk_spans(batch: Batch, block_size: int, window: int | None) -> list[_Span]:
    """The sequences with several queries, one at a time, the last query seeing the last key."""
    spans = []
    starts = np.cumsum(batch.query_lens_host) - batch.query_lens_host
    for row in np.flatnonzero(batch.query_lens_host > 1):
        start, num_queries = int(starts[row]), int(batch.query_lens_host[row])
        first_query = int(batch.seq_lens_host[row]) - num_queries
        whole = first_query == 0 and (window is None or num_queries <= window) and batch.reach is None
        step = num_queries if whole else max(1, _MAX_MASK // (first_query + num_queries))
        for at in range(0, num_queries, step):
            size = min(step, num_queries - at)
            tokens = slice(start + at, start + at + size)
            spans.append(_chunk_span(batch, int(row), tokens, first_query + at, whole, block_size, window))
    return spans


def _chunk_span(
    batch: Batch, row: int, tokens: slice, first_query: int, whole: bool, block_size: int, window: int | None
) -> _Span:
    """Queries at `first_query` and after it; `whole` means that the sequence starts with them."""
    device = batch.slots.device
    end = first_query + tokens.stop - tokens.start
    num_keys = end if batch.reach is None else int(batch.seq_lens_host[row])
    first_key = 0 if window is None else max(0, first_query - window + 1)
    keys = torch.arange(first_key, num_keys, device=device)
    slots = _slots(batch, torch.tensor([row], device=device), keys[None], block_size)
    queries = torch.arange(first_query, end, device=device)[:, None]
    behind = (queries - keys)[None]
    if whole:
        return _Span(tokens, slots, None, behind, causal=True)
    mask = keys <= (queries if batch.reach is None else batch.reach[tokens][:, None])
    if window is not None:
        mask &= keys > queries - window
    return _Span(tokens, slots, mask, behind)
