"""TORCH_SDPA: attention in plain torch, on any device; the reference for every other backend."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from quire.attention.backend import AttentionSpec
from quire.attention.batch import Batch
from quire.config.machine import Machine
from quire.kernels.reference.ops import dequantize_heads

_Positions = TypeVar("_Positions", Tensor, NDArray[Any])
# Decodes are padded to the longest of their group; below this length padding costs less than another call.
_ALWAYS_TOGETHER_LEN = 128
# Largest mask (queries x keys) of one call; longer chunks are split.
_MAX_MASK = 1 << 24


@dataclass(frozen=True, slots=True)
class _Span:
    """Group of N sequences that are computed together: Q queries each, and keys padded to length L."""

    tokens: Tensor | slice
    """Indices of the N * Q queries in the batch."""
    slots: Tensor
    """[N, L] cache slots to read; padding reads some written slot and is masked."""
    mask: Tensor | None
    """True where a query attends to a key, broadcast over [N, heads, Q, L]; None: see `causal`."""
    distances: Tensor
    """[N, Q, L], position of each query minus position of each key"""
    causal: bool = False
    """Whether attention is causal, which requires Q == L. If false and without a mask, all queries attend to
    all keys."""


class _Window(NamedTuple):
    """Sliding window or attention chunk of a layer; a `size` of None means full attention."""

    size: int | None
    chunked: bool

    def first_visible(self, positions: _Positions) -> _Positions:
        """Return the first position that each query at `positions` attends to."""
        if self.size is None:
            return positions * 0
        return positions // self.size * self.size if self.chunked else (positions - self.size + 1).clip(0)


@dataclass(slots=True)
class _Step:
    """A batch with its spans (groups of sequences that are computed together), which are cached by block size
    and window of the layer."""

    batch: Batch
    spans: dict[tuple[int, _Window], list[_Span]] = field(default_factory=dict)

    def split(self, block_size: int, window: _Window) -> list[_Span]:
        key = (block_size, window)
        if key not in self.spans:
            self.spans[key] = [
                *_decode_spans(self.batch, block_size, window),
                *_chunk_spans(self.batch, block_size, window),
            ]
        return self.spans[key]


class TorchSDPA:
    """Attention in torch over keys and values gathered from the paged cache: the reference for all
    backends."""

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
        for span in batch.attention.split(k_cache.shape[1], _Window(spec.window, spec.chunked)):
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
    """Return the keys or values [*slots.shape, kv_heads, head_dim] in the cache `slots`, converted to
    `dtype`. Those of an fp8 cache are multiplied by `scale`; an int8 cache stores its own scales."""
    flat = cache.view(-1, *cache.shape[2:])
    if cache.dtype.itemsize > 1:
        return flat[slots].to(dtype)
    if cache.dtype == torch.int8:
        return dequantize_heads(flat[slots]).to(dtype)
    # Indexing of 8-bit floats is not supported on all devices.
    return flat.view(torch.uint8)[slots].view(cache.dtype).to(dtype) * scale


def _attend(queries: Tensor, keys: Tensor, values: Tensor, span: _Span, spec: AttentionSpec) -> Tensor:
    """Return the attention output, in the shape of `queries` [N, Q, heads, head_dim], for `keys` and `values`
    [N, L, kv_heads, head_dim] of the sequences of `span`."""
    # With one query per sequence, the heads of a KV head become its queries: keys are not repeated.
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
    """Compute `_attend` with a soft cap, ALiBi slopes or sinks, which torch's attention does not support."""
    group = spec.heads // spec.kv_heads
    q, k, v = queries.float(), keys.float(), values.float()
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("nqhd,nlhd->nhql", q, k) * spec.score_scale
    if spec.softcap is not None:
        scores = (scores / spec.softcap).tanh() * spec.softcap
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None, None] * span.distances[:, None]
    mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril() if span.causal else span.mask
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(len(q), -1, q.shape[1], 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return torch.einsum("nhql,nlhd->nqhd", weights, v).to(queries.dtype)


def _slots(batch: Batch, seqs: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Return the cache slots of positions [N, L] of the sequences [N]."""
    blocks = batch.block_tables[batch.rows[seqs]].long().gather(1, positions // block_size)
    return blocks * block_size + positions % block_size


def _decode_spans(batch: Batch, block_size: int, window: _Window) -> list[_Span]:
    """Group the sequences with one query by similar length, to limit padding; return a span per group."""
    rows = np.flatnonzero((batch.query_lens_host == 1) & (batch.seq_lens_host > 0))
    lens = batch.seq_lens_host[rows]
    lens = lens - window.first_visible(lens - 1)
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
    batch: Batch, rows: NDArray[np.intp], longest: int, block_size: int, window: _Window
) -> _Span:
    device = batch.slots.device
    index = torch.from_numpy(rows).to(device)
    seq_lens = batch.seq_lens[index].long()[:, None]
    first = window.first_visible(seq_lens - 1)
    positions = first + torch.arange(longest, device=device)
    mask = positions < seq_lens
    slots = _slots(batch, index, torch.where(mask, positions, first), block_size)
    tokens = batch.query_starts[index].long()
    distances = (seq_lens - 1 - positions)[:, None]
    return _Span(tokens, slots, mask[:, None, None] if len(rows) > 1 else None, distances)


def _chunk_spans(batch: Batch, block_size: int, window: _Window) -> list[_Span]:
    """Return spans of the sequences with several queries: one per sequence, or several for a long one."""
    spans = []
    starts = np.cumsum(batch.query_lens_host) - batch.query_lens_host
    for row in np.flatnonzero(batch.query_lens_host > 1):
        start, num_queries = int(starts[row]), int(batch.query_lens_host[row])
        first_query = int(batch.seq_lens_host[row]) - num_queries
        whole = (
            first_query == 0
            and (window.size is None or num_queries <= window.size)
            and batch.last_visible is None
        )
        step = num_queries if whole else max(1, _MAX_MASK // (first_query + num_queries))
        for at in range(0, num_queries, step):
            size = min(step, num_queries - at)
            tokens = slice(start + at, start + at + size)
            spans.append(_chunk_span(batch, int(row), tokens, first_query + at, whole, block_size, window))
    return spans


def _chunk_span(
    batch: Batch, row: int, tokens: slice, first_query: int, whole: bool, block_size: int, window: _Window
) -> _Span:
    """Build a span of one sequence's queries from position `first_query` on. `whole` means that they are the
    whole sequence, so that causal attention needs no mask."""
    device = batch.slots.device
    end = first_query + tokens.stop - tokens.start
    num_keys = end if batch.last_visible is None else int(batch.seq_lens_host[row])
    queries = torch.arange(first_query, end, device=device)[:, None]
    first_visible = window.first_visible(queries)
    keys = torch.arange(int(first_visible[0]), num_keys, device=device)
    slots = _slots(batch, torch.tensor([row], device=device), keys[None], block_size)
    distances = (queries - keys)[None]
    if whole:
        return _Span(tokens, slots, None, distances, causal=True)
    mask = keys <= (queries if batch.last_visible is None else batch.last_visible[tokens][:, None])
    mask &= keys >= first_visible
    return _Span(tokens, slots, mask, distances)
