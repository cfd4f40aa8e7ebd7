"""Attention in float64, the reference of every backend."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.attention.backend import AttentionBackend, AttentionSpec
from quire.attention.batch import Batch

Chunks = list[tuple[int, int]]
"""(new tokens, earlier tokens) of each sequence; (1, -1) is padding."""

BLOCK = 4
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Tolerances for scores of about 1: a score's relative error becomes that of a weight."""
CHUNKS: dict[str, Chunks] = {
    "whole prompts": [(7, 0), (4, 0), (1, 0)],
    "decodes": [(1, 5), (1, 0), (1, 12), (1, 3)],
    "one decode": [(1, 9)],
    "chunks with a past": [(3, 5), (2, 8)],
    "all at once, interleaved": [(1, 6), (5, 0), (1, 0), (3, 9), (1, 17), (2, 1)],
}


Runs = list[list[tuple[int, int]]]
"""(first, count) of the tokens of each sequence that attend to each other bidirectionally."""


def by_hand(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    spec: AttentionSpec,
    sinks: Tensor | None = None,
    reach: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Compute attention of [Q, heads, d] queries, of which the last is aligned with the last of the [L,
    kv_heads, d] keys.
    """
    if not len(keys):
        return torch.zeros_like(q)
    group = spec.heads // spec.kv_heads
    k, v = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * spec.score_scale
    if spec.softcap is not None:
        scores = (scores / spec.softcap).tanh() * spec.softcap
    key = torch.arange(len(k), device=q.device)
    place = key[-len(q) :, None]
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * (place - key)
    hidden = key > (place if reach is None else reach[:, None])
    if spec.window is not None:
        hidden |= key < (place - place % spec.window if spec.chunked else place - spec.window + 1)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


@dataclass
class Case:
    """Sequences with keys in a cache; every unwritten slot holds NaN."""

    spec: AttentionSpec
    batch: Batch
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    sinks: Tensor | None
    alibi_slopes: Tensor | None

    def expected(self) -> Tensor:
        lens = self.batch.query_lens_host.tolist()
        pieces, reach = self.q.split(lens), self.batch.last_visible
        reaches = [None] * len(lens) if reach is None else reach.split(lens)
        return torch.cat(
            [
                by_hand(q, k, v, self.spec, self.sinks, seen, self.alibi_slopes)
                for q, k, v, seen in zip(pieces, self.keys, self.values, reaches, strict=True)
            ]
        )


def in_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return heads rounded to 8 bits, and the bytes of their codes and scales; NaN is in the scale."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    codes = (x / scale).nan_to_num(0).round()
    return codes * scale, torch.cat((codes.to(torch.int8), scale.view(torch.int8)), -1)


def make_case(
    chunks: Chunks,
    spec: AttentionSpec,
    *,
    block: int = BLOCK,
    cache_dtype: torch.dtype | None = None,
    sinks: bool = False,
    device: str = "cpu",
    runs: Runs | None = None,
    seed: int = 0,
) -> Case:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    query_lens = np.array([new for new, _ in chunks], np.int32)
    seq_lens = np.array([new + before for new, before in chunks], np.int32)
    widths = -(-seq_lens // block)
    num_blocks = int(widths.sum()) + 3
    free = rng.permutation(num_blocks).tolist()
    nobodys = free.pop()
    rows = rng.permutation(len(chunks) + 2)[: len(chunks)].astype(np.int32)
    tables = np.full((len(chunks) + 2, max(1, int(widths.max()))), nobodys, np.int32)
    caches = [torch.full((num_blocks, block, spec.kv_heads, spec.head_dim), torch.nan) for _ in "kv"]
    cache_dtype = cache_dtype or spec.dtype
    kept: list[list[Tensor]] = [[], []]
    for row, n, width in zip(rows, seq_lens, widths, strict=True):
        tables[row, :width] = [free.pop() for _ in range(width)]
        place = np.arange(n)
        slots = torch.from_numpy(tables[row, place // block].astype(np.int64) * block + place % block)
        for cache, seen, scale in zip(caches, kept, (spec.k_scale, spec.v_scale), strict=True):
            stored = torch.randn(n, spec.kv_heads, spec.head_dim) / scale
            stored = in_int8(stored)[0] if cache_dtype == torch.int8 else stored.to(cache_dtype).float()
            cache.view(-1, spec.kv_heads, spec.head_dim)[slots] = stored
            seen.append((stored * scale).to(device))
    places = [np.arange(n - new, n) for (new, _), n in zip(chunks, seq_lens, strict=True)]
    reach = [positions.astype(np.int32) for positions in places]
    for positions, seen in zip(reach, runs or [], strict=runs is not None):
        for first, count in seen:
            positions[(positions >= first) & (positions < first + count)] = first + count - 1
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    nothing = torch.zeros(0, dtype=torch.int64)
    batch = Batch(
        token_ids=nothing,
        positions=torch.from_numpy(np.concatenate(places)).to(device),
        slots=nothing,
        query_starts=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(seq_lens).to(device),
        rows=torch.from_numpy(rows).to(device),
        block_tables=torch.from_numpy(tables).to(device),
        logit_tokens=nothing,
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
        last_visible=None if runs is None else torch.from_numpy(np.concatenate(reach)).to(device),
    )
    if cache_dtype == torch.int8:
        caches = [in_int8(cache)[1] for cache in caches]
    return Case(
        spec,
        batch,
        torch.randn(int(starts[-1]), spec.heads, spec.head_dim, device=device).to(spec.dtype),
        caches[0].to(cache_dtype).to(device),
        caches[1].to(cache_dtype).to(device),
        kept[0],
        kept[1],
        torch.randn(spec.heads, device=device).to(spec.dtype) if sinks else None,
        0.5 ** torch.arange(1, spec.heads + 1, device=device) if spec.uses_alibi else None,
    )


def attend(backend: AttentionBackend, case: Case) -> Tensor:
    backend.plan(case.batch)
    caches = case.k_cache, case.v_cache
    return backend.forward(case.q, *caches, case.batch, case.spec, case.sinks, case.alibi_slopes)


def check(
    backend: AttentionBackend,
    chunks: Chunks,
    spec: AttentionSpec,
    *,
    block: int = BLOCK,
    cache_dtype: torch.dtype | None = None,
    sinks: bool = False,
    device: str = "cpu",
    runs: Runs | None = None,
) -> None:
    case = make_case(
        chunks, spec, block=block, cache_dtype=cache_dtype, sinks=sinks, device=device, runs=runs
    )
    tolerance = TOLERANCE[spec.dtype] * max(1.0, spec.score_scale * spec.head_dim**0.5)
    torch.testing.assert_close(attend(backend, case), case.expected(), atol=tolerance, rtol=tolerance)
