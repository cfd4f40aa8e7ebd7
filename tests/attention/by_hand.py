"""Attention written out by hand, one query and one head at a time: what every backend is compared with."""

import numpy as np
import torch
from oracle import make_batch
from torch import Tensor

from quire.attention.backend import AttentionBackend, AttentionSpec
from quire.kernels.reference import write

BLOCK = 4

CHUNKS = {
    "whole prompts": [(7, 0), (4, 0), (1, 0)],
    "decodes": [(1, 5), (1, 0), (1, 12), (1, 3)],
    "one decode": [(1, 9)],
    "chunks with a past": [(3, 5), (2, 8)],
    "all at once, interleaved": [(1, 6), (5, 0), (1, 0), (3, 9), (1, 17), (2, 1)],
}


def by_hand(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
    """[Q, heads, d] queries, the last of which sees the last of the [L, kv_heads, d] keys."""
    out = torch.zeros_like(q)
    first = len(keys) - len(q)
    for i in range(len(q)):
        end = first + i + 1
        start = 0 if spec.window is None else max(0, end - spec.window)
        for head in range(spec.heads):
            kv_head = head // (spec.heads // spec.kv_heads)
            scores = keys[start:end, kv_head] @ q[i, head] * spec.score_scale
            if spec.softcap is not None:
                scores = (scores / spec.softcap).tanh() * spec.softcap
            out[i, head] = scores.softmax(0) @ values[start:end, kv_head]
    return out


def check(backend: AttentionBackend, chunks: list[tuple[int, int]], spec: AttentionSpec) -> None:
    """(new tokens, earlier tokens) per sequence; every slot that is not written holds NaN."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    lens = [new + before for new, before in chunks]
    num_blocks = sum(-(-n // BLOCK) for n in lens) + 3
    free = rng.permutation(num_blocks).tolist()
    tables = [[free.pop() for _ in range(-(-n // BLOCK))] for n in lens]
    shape = (num_blocks, BLOCK, spec.kv_heads, spec.head_dim)
    k_cache, v_cache = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    keys = [torch.randn(n, spec.kv_heads, spec.head_dim) for n in lens]
    values = [torch.randn(n, spec.kv_heads, spec.head_dim) for n in lens]
    earlier = [row for row, (_, before) in enumerate(chunks) if before]
    if earlier:
        past_chunks = [([0] * chunks[row][1], 0) for row in earlier]
        past = make_batch(past_chunks, [tables[row] for row in earlier], BLOCK)
        old_k = torch.cat([keys[row][: chunks[row][1]] for row in earlier])
        old_v = torch.cat([values[row][: chunks[row][1]] for row in earlier])
        write(old_k, k_cache, past.slots)
        write(old_v, v_cache, past.slots)
    batch = make_batch([([0] * new, before) for new, before in chunks], tables, BLOCK)
    q = torch.randn(int(batch.query_lens_host.sum()), spec.heads, spec.head_dim)
    backend.plan(batch)
    new_k = torch.cat([k[before:] for k, (_, before) in zip(keys, chunks, strict=True)])
    new_v = torch.cat([v[before:] for v, (_, before) in zip(values, chunks, strict=True)])
    write(new_k, k_cache, batch.slots)
    write(new_v, v_cache, batch.slots)
    out = backend.forward(q, k_cache, v_cache, batch, spec)
    pieces = q.split([new for new, _ in chunks])
    expected = torch.cat([by_hand(*args, spec) for args in zip(pieces, keys, values, strict=True)])
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
