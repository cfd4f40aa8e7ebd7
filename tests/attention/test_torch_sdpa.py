"""The reference backend against attention written out by hand, one query and one head at a time."""

import math

import numpy as np
import pytest
import torch
from oracle import make_batch
from torch import Tensor

from quire.attention import torch_sdpa
from quire.attention.backend import AttentionSpec
from quire.attention.torch_sdpa import TorchSDPA

BLOCK = 4


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
            out[i, head] = scores.softmax(0) @ values[start:end, kv_head]
    return out


def check(chunks: list[tuple[int, int]], spec: AttentionSpec) -> TorchSDPA:
    """(new tokens, earlier tokens) per sequence; every slot that is not written holds NaN."""
    backend = TorchSDPA()
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
        backend.write(old_k, old_v, k_cache, v_cache, past.slots)
    batch = make_batch([([0] * new, before) for new, before in chunks], tables, BLOCK)
    q = torch.randn(int(batch.query_lens_host.sum()), spec.heads, spec.head_dim)
    backend.plan(batch)
    new_k = torch.cat([k[before:] for k, (_, before) in zip(keys, chunks, strict=True)])
    new_v = torch.cat([v[before:] for v, (_, before) in zip(values, chunks, strict=True)])
    backend.write(new_k, new_v, k_cache, v_cache, batch.slots)
    out = backend.forward(q, k_cache, v_cache, batch, spec)
    pieces = q.split([new for new, _ in chunks])
    expected = torch.cat([by_hand(*args, spec) for args in zip(pieces, keys, values, strict=True)])
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    return backend


CHUNKS = {
    "whole prompts": [(7, 0), (4, 0), (1, 0)],
    "decodes": [(1, 5), (1, 0), (1, 12), (1, 3)],
    "one decode": [(1, 9)],
    "chunks with a past": [(3, 5), (2, 8)],
    "all at once, interleaved": [(1, 6), (5, 0), (1, 0), (3, 9), (1, 17), (2, 1)],
}


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS.keys())
def test_matches_attention_by_hand_with_nan_in_unused_slots(
    chunks: list[tuple[int, int]], heads: tuple[int, int], window: int | None
) -> None:
    """A wrong mask, head grouping, window edge, slot; or NaN leaking from slots that nobody wrote."""
    check(chunks, AttentionSpec(*heads, 8, torch.float32, window))


def test_an_own_scale_is_used() -> None:
    spec = AttentionSpec(2, 2, 8, torch.float32, scale=0.9)
    assert not math.isclose(spec.score_scale, AttentionSpec(2, 2, 8, torch.float32).score_scale)
    check([(4, 0), (1, 3)], spec)


@pytest.mark.parametrize("window", [None, 3])
def test_long_chunks_go_in_pieces(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """Pieces that overlap, skip queries, or see too much."""
    monkeypatch.setattr(torch_sdpa, "_MAX_MASK", 30)
    check([(11, 4), (1, 2), (9, 1)], AttentionSpec(2, 1, 8, torch.float32, window))


def test_one_long_sequence_does_not_pad_the_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_sdpa, "_ALWAYS_TOGETHER_LEN", 4)
    lens = [3, 40, 4, 35, 5, 2, 12]
    spec = AttentionSpec(2, 1, 8, torch.float32)
    check([(1, n - 1) for n in lens], spec)
    tables, at = [], 0
    for n in lens:
        tables.append(list(range(at, at + -(-n // BLOCK))))
        at += -(-n // BLOCK)
    batch = make_batch([([0], n - 1) for n in lens], tables, BLOCK)
    TorchSDPA().plan(batch)
    spans = batch.attention.cut(BLOCK, None)
    assert sum(len(span.slots) for span in spans) == len(lens)
    assert sum(span.slots.numel() for span in spans) <= 2 * sum(lens)


def test_a_sequence_reads_blocks_that_another_of_the_same_batch_writes() -> None:
    """Attention of one sequence computed before the keys of the next are written (a shared prefix)."""
    spec = AttentionSpec(2, 2, 8, torch.float32)
    backend = TorchSDPA()
    torch.manual_seed(1)
    shape = (4, BLOCK, 2, 8)
    k_cache, v_cache = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    k, v, q = torch.randn(8, 2, 8), torch.randn(8, 2, 8), torch.randn(8, 2, 8)
    # The first sequence has block 2 as its prefix, which the second one is writing just now.
    batch = make_batch([([0] * 2, 4), ([0] * 6, 0)], [[2, 1], [2, 3]], BLOCK)
    backend.plan(batch)
    backend.write(k, v, k_cache, v_cache, batch.slots)
    out = backend.forward(q, k_cache, v_cache, batch, spec)
    seen_k, seen_v = torch.cat((k[2:6], k[:2])), torch.cat((v[2:6], v[:2]))
    torch.testing.assert_close(out[:2], by_hand(q[:2], seen_k, seen_v, spec))


def test_spans_are_cut_once_per_step_not_once_per_layer() -> None:
    batch = make_batch([([0, 0], 0)], [[0]], BLOCK)
    TorchSDPA().plan(batch)
    assert batch.attention.cut(BLOCK, None) is batch.attention.cut(BLOCK, None)
    assert batch.attention.cut(BLOCK, 1) is not batch.attention.cut(BLOCK, None)
