"""Tests of the reference backend against attention in float64."""

import math

import pytest
import torch
from by_hand import BLOCK, CHUNKS, by_hand, check
from paged_batch import make_batch

from quire.attention import torch_sdpa
from quire.attention.backend import AttentionSpec
from quire.attention.torch_sdpa import TorchSDPA, _Window
from quire.kernels.reference.ops import write

FULL = _Window(None, chunked=False)


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS.keys())
def test_matches_float64_with_nan_in_unused_slots(
    chunks: list[tuple[int, int]], heads: tuple[int, int], window: int | None
) -> None:
    """Check masks, head groups, window edges and slots, and that no NaN leaks from unwritten slots."""
    check(TorchSDPA(), chunks, AttentionSpec(*heads, 8, torch.float32, window))


def test_custom_scale() -> None:
    spec = AttentionSpec(2, 2, 8, torch.float32, scale=0.9)
    assert not math.isclose(spec.score_scale, AttentionSpec(2, 2, 8, torch.float32).score_scale)
    check(TorchSDPA(), [(4, 0), (1, 3)], spec)


@pytest.mark.parametrize("window", [None, 3])
def test_long_chunks_are_split(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """Check for overlapping parts, skipped queries, and wrong masks."""
    monkeypatch.setattr(torch_sdpa, "_MAX_MASK", 30)
    check(TorchSDPA(), [(11, 4), (1, 2), (9, 1)], AttentionSpec(2, 1, 8, torch.float32, window))


def test_long_sequence_does_not_pad_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_sdpa, "_ALWAYS_TOGETHER_LEN", 4)
    lens = [3, 40, 4, 35, 5, 2, 12]
    spec = AttentionSpec(2, 1, 8, torch.float32)
    check(TorchSDPA(), [(1, n - 1) for n in lens], spec)
    tables, at = [], 0
    for n in lens:
        tables.append(list(range(at, at + -(-n // BLOCK))))
        at += -(-n // BLOCK)
    batch = make_batch([([0], n - 1) for n in lens], tables, BLOCK)
    TorchSDPA().plan(batch)
    spans = batch.attention.split(BLOCK, FULL)
    assert sum(len(span.slots) for span in spans) == len(lens)
    assert sum(span.slots.numel() for span in spans) <= 2 * sum(lens)


def test_sequence_reads_blocks_that_the_same_batch_writes() -> None:
    """Check a shared prefix: all keys are written before attention is computed."""
    spec = AttentionSpec(2, 2, 8, torch.float32)
    backend = TorchSDPA()
    torch.manual_seed(1)
    shape = (4, BLOCK, 2, 8)
    k_cache, v_cache = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    k, v, q = torch.randn(8, 2, 8), torch.randn(8, 2, 8), torch.randn(8, 2, 8)
    # The first sequence has block 2 as its prefix, which the second one writes in this step.
    batch = make_batch([([0] * 2, 4), ([0] * 6, 0)], [[2, 1], [2, 3]], BLOCK)
    backend.plan(batch)
    write(k, k_cache, batch.slots)
    write(v, v_cache, batch.slots)
    out = backend.forward(q, k_cache, v_cache, batch, spec)
    seen_k, seen_v = torch.cat((k[2:6], k[:2])), torch.cat((v[2:6], v[:2]))
    torch.testing.assert_close(out[:2], by_hand(q[:2], seen_k, seen_v, spec))


def test_spans_are_computed_once_per_step() -> None:
    batch = make_batch([([0, 0], 0)], [[0]], BLOCK)
    TorchSDPA().plan(batch)
    assert batch.attention.split(BLOCK, FULL) is batch.attention.split(BLOCK, FULL)
    assert batch.attention.split(BLOCK, _Window(1, chunked=False)) is not batch.attention.split(BLOCK, FULL)
