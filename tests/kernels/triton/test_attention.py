"""Tests of the launch parameters of paged attention; tests/attention tests its results."""

from typing import Any

import numpy as np
import pytest
import torch
from by_hand import Chunks, attend, check, make_case
from interpreter import more
from torch import Tensor

from quire.attention.backend import AttentionSpec
from quire.attention.batch import Batch
from quire.attention.triton_attn import MOST_ROWS, TritonAttention
from quire.kernels import batch_invariant
from quire.kernels.triton import attention_launch as launch
from quire.kernels.triton.attention_launch import AttentionLayer, shares_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYER = AttentionLayer(32, 8, 128, 0.1, 0, 0.0, 1.0, 1.0)


def test_splits_fill_the_device() -> None:
    assert shares_of(LAYER, 4, 1, 132) == 4 * 132 // 8
    assert shares_of(LAYER, 4, 32, 132) == 2 * 132 // 8
    assert shares_of(LAYER, 4, 64, 132) == 4 * 132 // 8
    assert shares_of(LAYER._replace(kv_heads=1000), 4, 1, 132) == 1


@pytest.mark.parametrize(("sm_kib", "programs"), [(228, 4), (164, 3), (100, 2), (30, 1)])
def test_programs_per_multiprocessor_fit_its_memory(sm_kib: int, programs: int) -> None:
    """Check that no program waits for a second wave."""
    shape = launch.AttentionShape(16, 32, 2, 3, per_sm=4)
    assert launch.programs_at_once(shape, 2 * 128 * 2, sm_kib << 10) == programs


@pytest.mark.parametrize("group", [1, 2, 7, 16, 40, 71])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_heads_of_a_query_fit_a_tile(group: int, dtype: torch.dtype) -> None:
    layer = LAYER._replace(heads=group, kv_heads=1)
    assert launch.tile_shape(layer, dtype, 500).block_m >= group
    assert launch.tile_shape(layer, dtype, 2).block_m >= group
    assert launch.share_shape(layer, dtype, dtype).block_m >= group * layer.few


@pytest.mark.parametrize(
    ("num_sms", "window"),
    [(1, None), (3, 90), (40, None), *more((1, 90), (3, None), (4, None), (4, 90), (40, 90))],
)
def test_uneven_sequences(monkeypatch: pytest.MonkeyPatch, num_sms: int, window: int | None) -> None:
    """Check splits that end within a sequence, span several, are empty, or start at a wrong key."""
    monkeypatch.setattr(launch, "MIN_KEYS", 32)
    monkeypatch.setattr(launch, "sms", lambda device: (num_sms, 1 << 18))
    chunks: Chunks = [(1, 5), (1, 140), (3, 31), (1, -1), (2, 100), (1, 63), (1, 260)]
    check(
        TritonAttention(), chunks, AttentionSpec(4, 2, 16, torch.float32, window), sinks=True, device=DEVICE
    )
    check(
        TritonAttention(), [*chunks, (40, 9)], AttentionSpec(4, 2, 16, torch.float32, window), device=DEVICE
    )


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    ("heads", "sinks", "num_sms"), [((4, 2), True, 40), *more(((6, 1), False, 12), ((4, 2), False, 80))]
)
def test_tiles_far_into_a_prompt_are_cut(
    monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int], sinks: bool, num_sms: int, on_device: bool
) -> None:
    """Check pieces that are missing or counted twice, sinks that are counted in each piece, and tiles beside
    decodes and padding. Lengths are known to the host, or only on the device."""
    for name, value in (("MIN_PIECE", 32), ("PIECE_GAIN", 0), ("_STEP", 32)):
        monkeypatch.setattr(launch, name, value)
    monkeypatch.setattr(launch, "sms", lambda device: (num_sms, 1 << 18))
    chunks: Chunks = [(40, 9), (1, 5), (20, 140), (3, 31), (1, 70), (70, 2), (1, -1)]
    spec = AttentionSpec(*heads, 16, torch.float32)
    case = make_case(chunks, spec, block=16, sinks=sinks, device=DEVICE)
    expected, num_tokens = case.expected(), len(case.q)
    if on_device:
        case.batch.are_mixed, case.batch.token_ids = True, torch.zeros(num_tokens)
        case.batch.query_lens_host = np.full(len(chunks), num_tokens, np.int32)
    merged: list[int] = []
    attend_tiles = launch.attend_tiles

    def attend_and_count(args: Any, work: Tensor, *others: Any) -> None:
        merged.append(int(work[:, 5].max()))
        attend_tiles(args, work, *others)

    monkeypatch.setattr(launch, "attend_tiles", attend_and_count)
    torch.testing.assert_close(attend(TritonAttention(), case), expected, atol=1e-5, rtol=1e-5)
    assert max(merged) > 1


def test_only_tiles_that_are_longer_than_a_share_are_cut() -> None:
    tiles = np.zeros((2, 2), np.int64)
    assert launch.cut_on_host(tiles, np.array([500, 900]), 16) is tiles
    assert launch.cut_on_host(tiles, np.array([32_000, 32_000]), 0) is tiles
    pieces = launch.cut_on_host(tiles, np.array([8192, 100]), 16)[:, 2:].tolist()
    assert len(pieces) == 14
    assert pieces[:2] == [[0, 640, 0, 13], [640, 1280, 0, 13]]
    assert pieces[-2:] == [[7680, 8320, 0, 13], [0, 2**31 - 1, 13, 1]]


@pytest.mark.parametrize("on_device", [False, True])
def test_results_of_pieces_are_bounded_by_the_number_of_programs(on_device: bool) -> None:
    """Check that tiles which are not cut have no results: a step may have hundreds of them."""
    random = np.random.default_rng(3)
    tile, programs = 16, 8
    for _ in range(20):
        lens = np.append(random.integers(17, 70, random.integers(1, 12)), 1)
        seq_lens = (lens + random.choice([0, 100, 3000, 20_000], len(lens))).astype(np.int32)
        counts = -(-lens // tile)
        seqs = np.repeat(np.arange(len(lens)), counts)
        firsts = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * tile
        keys = seq_lens[seqs] - lens[seqs] + np.minimum(firsts + tile, lens[seqs])
        pieces = launch.cut_on_host(np.column_stack((seqs, firsts)), keys, programs)
        if on_device:
            starts = torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32, device=DEVICE)
            lengths = torch.from_numpy(seq_lens).to(DEVICE)
            work = launch.cut_on_device(starts, lengths, int(lens.sum()), 1, tile, programs)[1]
            pieces = work.cpu().numpy().astype(np.int64)
        if pieces.shape[1] > 2:
            cut = pieces[pieces[:, 5] > 1]
            results = cut[:, 4] + cut[:, 2] // np.maximum(cut[:, 3] - cut[:, 2], 1)
            assert sorted(results) == [*range(len(cut))]
            assert len(cut) <= 2 * programs


@pytest.mark.parametrize(
    ("fixed", "window"), [(False, 9), (True, None), *more((False, None), (True, 9))], ids=str
)
def test_int8_cache(fixed: bool, window: int | None) -> None:
    """Check scales of tokens and heads for decodes, which are split, and prompts."""
    chunks: Chunks = [(1, 5), (1, 70), (3, 31), (1, -1), (20, 9)]
    batch_invariant.switch(fixed)
    try:
        for dtype in (torch.float32, torch.float16):
            spec = AttentionSpec(4, 2, 24, dtype, window)
            check(TritonAttention(), chunks, spec, cache_dtype=torch.int8, sinks=True, device=DEVICE)
    finally:
        batch_invariant.switch(False)


@pytest.mark.slow
def test_more_sequences_than_are_counted_at_once() -> None:
    chunks: Chunks = [(1, 3 + index % 50) for index in range(270)]
    check(TritonAttention(), chunks, AttentionSpec(1, 1, 16, torch.float32), device=DEVICE)


def test_counters_are_zero_after_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the second layer or step does not merge too early."""
    made: list[Tensor] = []

    def zeros(shares: int, device: torch.device) -> Tensor:
        made.append(torch.zeros(shares, dtype=torch.int32, device=device))
        return made[-1]

    monkeypatch.setattr(launch, "_arrivals", zeros)
    check(TritonAttention(), [(1, 400), (2, 130)], AttentionSpec(4, 2, 16, torch.float32), device=DEVICE)
    assert made
    assert not any(item.any() for item in made)


class AsDecodes(TritonAttention):
    """A plan in which every sequence is a decode with drafts."""

    def plan(self, batch: Batch) -> None:
        batch.are_decodes = True
        super().plan(batch)


@pytest.mark.parametrize(
    ("heads", "num_queries", "window"),
    [
        ((4, 1), 5, 20),
        ((6, 2), 9, None),
        ((32, 1), 5, None),
        *more(((4, 1), 5, None), ((6, 2), 9, 20), ((32, 1), 5, 20)),
    ],
)
def test_decodes_with_drafts(
    heads: tuple[int, int], num_queries: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check more queries than rows of the smallest tile, and more than the key splits allow."""
    monkeypatch.setattr(launch, "MIN_KEYS", 32)
    chunks: Chunks = [(num_queries, 5), (num_queries, 140), (1, 63), (num_queries, 31)]
    spec = AttentionSpec(*heads, 16, torch.float32, window)
    cut = heads[0] // heads[1] * num_queries <= MOST_ROWS
    with monkeypatch.context() as patched:
        if cut:
            patched.setattr(launch, "attend_tiles", None)
        check(AsDecodes(), chunks, spec, device=DEVICE)
