"""Tests of the native backend against float64, against the reference, and bitwise in any batch."""

import numpy as np
import pytest
import torch
from by_hand import CHUNKS, check
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_batch import make_batch
from torch import Tensor

from quire.attention.backend import AttentionBackend, AttentionSpec
from quire.attention.cpu_attn import CPUAttention
from quire.attention.torch_sdpa import TorchSDPA
from quire.kernels.cpu import native

pytestmark = pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")
Chunks = list[tuple[int, int]]


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS.keys())
def test_matches_float64_with_nan_in_unused_slots(
    chunks: Chunks, heads: tuple[int, int], window: int | None
) -> None:
    """Check masks, head groups, window edges and slots, and that no NaN leaks from unwritten slots."""
    check(CPUAttention(), chunks, AttentionSpec(*heads, 8, torch.float32, window))


@pytest.mark.parametrize("chunks", [[(1, 700), (3, 300), (1, 63), (1, 64)], [(70, 190), (1, 256)]])
@pytest.mark.parametrize("window", [None, 130])
@pytest.mark.usefixtures("threads")
def test_sequences_of_many_tiles_and_splits(chunks: Chunks, window: int | None) -> None:
    """Check for lost, doubly merged or swapped splits, and for scratch shared by threads."""
    check(CPUAttention(), chunks, AttentionSpec(6, 2, 16, torch.float32, window))


@pytest.mark.parametrize("head_dim", [16, 40, 64, 72])
@pytest.mark.parametrize("window", [None, 70])
def test_prompts_longer_than_a_block_of_rows(window: int | None, head_dim: int) -> None:
    """Check keys that only the first or the last rows of a block attend to."""
    check(
        CPUAttention(), [(150, 101), (66, 62), (1, 5)], AttentionSpec(3, 1, head_dim, torch.float32, window)
    )


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("threads", [1], indirect=True)
def test_prompt_of_several_long_blocks_of_rows() -> None:
    """Check the larger blocks of long prompts, of which the last has fewer rows."""
    check(CPUAttention(), [(210, 30), (1, 40)], AttentionSpec(8, 2, 16, torch.float32))


def test_custom_scale_and_soft_cap() -> None:
    check(CPUAttention(), [(4, 0), (1, 3)], AttentionSpec(2, 2, 8, torch.float32, scale=0.9))
    check(CPUAttention(), [(4, 0), (1, 80)], AttentionSpec(2, 2, 8, torch.float32, scale=3.0, softcap=2.0))


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks(dtype: torch.dtype, window: int | None) -> None:
    """Check that a sink counts once per row, in the units of the scores, of its own head.

    Padding attends to nothing else.
    """
    chunks = [(150, 101), (1, 300), (3, 62), (1, 0), (1, -1)]
    check(CPUAttention(), chunks, AttentionSpec(6, 2, 16, dtype, window), sinks=True)


@pytest.mark.parametrize("window", [None, 9, 70])
@pytest.mark.parametrize("heads", [(6, 2), (3, 1), (4, 4)])
@pytest.mark.usefixtures("threads")
def test_bidirectional_spans(heads: tuple[int, int], window: int | None) -> None:
    """Check keys after the last query of a block of rows, and rows with different spans."""
    chunks = [(150, 101), (1, 300), (3, 62), (66, 0), (1, 0)]
    runs = [[(90, 30), (140, 100)], [], [(62, 3)], [(0, 66)], []]
    check(CPUAttention(), chunks, AttentionSpec(*heads, 16, torch.float32, window), runs=runs)


@pytest.mark.parametrize("heads", [(6, 2), (3, 3), (5, 1)])
@pytest.mark.parametrize("window", [None, 33])
def test_alibi_slopes(heads: tuple[int, int], window: int | None) -> None:
    """Check each head's slope and its units, distances within tiles, and keys of few and of many rows."""
    chunks = [(150, 101), (1, 300), (3, 62), (1, 0), (1, -1)]
    check(CPUAttention(), chunks, AttentionSpec(*heads, 16, torch.float32, window, uses_alibi=True))


def test_scores_far_below_the_largest_have_no_weight() -> None:
    """Check for an exponent that wraps around to a huge or negative weight."""
    check(CPUAttention(), [(4, 0), (60, 90), (1, 80)], AttentionSpec(2, 1, 8, torch.float32, scale=20.0))


def test_more_query_heads_per_kv_head_than_block_rows() -> None:
    check(CPUAttention(), [(3, 4), (1, 9)], AttentionSpec(40, 1, 8, torch.float32))


class Case:
    """Sequences with filled caches, whose new tokens can run in any batch."""

    def __init__(
        self, chunks: Chunks, spec: AttentionSpec, block: int, seed: int, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.chunks, self.spec, self.block = chunks, spec, block
        widths = [-(-(new + before) // block) for new, before in chunks]
        free = np.random.default_rng(seed).permutation(sum(widths) + 1).tolist()
        self.tables = [[free.pop() for _ in range(width)] for width in widths]
        shape = (sum(widths) + 1, block, spec.kv_heads, spec.head_dim)
        self.k_cache = torch.randn(shape, generator=generator).to(dtype)
        self.v_cache = torch.randn(shape, generator=generator).to(dtype)
        self.q = [
            torch.randn(new, spec.heads, spec.head_dim, generator=generator).to(spec.dtype)
            for new, _ in chunks
        ]

    def attend(self, backend: AttentionBackend, rows: list[int]) -> list[Tensor]:
        chunks = [([0] * self.chunks[row][0], self.chunks[row][1]) for row in rows]
        batch = make_batch(chunks, [self.tables[row] for row in rows], self.block)
        backend.plan(batch)
        q = torch.cat([self.q[row] for row in rows])
        out = backend.forward(q, self.k_cache, self.v_cache, batch, self.spec)
        return list(out.split([len(ids) for ids, _ in chunks]))


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> Case:
    chunks = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 300)), min_size=1, max_size=5))
    kv_heads, group = draw(st.sampled_from([(1, 1), (3, 3), (2, 4), (1, 7)]))
    head_dim = draw(st.sampled_from([8, 24, 40, 64, 80, 128]))
    window = draw(st.one_of(st.none(), st.integers(1, 200)))
    spec = AttentionSpec(kv_heads * group, kv_heads, head_dim, dtype, window)
    return Case(chunks, spec, draw(st.sampled_from([1, 4, 16])), draw(st.integers(0, 99)), dtype)


@given(case=cases())
@settings(max_examples=40)
def test_random_shapes_against_the_reference(case: Case) -> None:
    rows = list(range(len(case.chunks)))
    actual, expected = case.attend(CPUAttention(), rows), case.attend(TorchSDPA(), rows)
    torch.testing.assert_close(torch.cat(actual), torch.cat(expected), atol=2e-5, rtol=1e-4)


@given(case=cases(), threads=st.sampled_from([1, 2, 3]), cut=st.integers(1, 39))
@settings(max_examples=30)
def test_bits_are_equal_alone_in_a_batch_and_in_chunks(case: Case, threads: int, cut: int) -> None:
    """Check that results do not depend on the batch, the threads or the chunks."""
    together = case.attend(CPUAttention(), list(range(len(case.chunks))))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for row, expected in enumerate(together):
            assert torch.equal(case.attend(CPUAttention(), [row])[0], expected)
        new, past = case.chunks[0]
        if cut < new:
            q = case.q[0]
            case.chunks[0], case.q[0] = (cut, past), q[:cut]
            first = case.attend(CPUAttention(), [0])[0]
            case.chunks[0], case.q[0] = (new - cut, past + cut), q[cut:]
            second = case.attend(CPUAttention(), [0])[0]
            assert torch.equal(torch.cat((first, second)), together[0])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("window", [None, 90])
def test_long_prompt_in_chunks_has_the_same_bits(window: int | None) -> None:
    """Check groups of four rows, fewer, and one, and tiles that a chunk attends to in part."""
    case = Case([(200, 30)], AttentionSpec(6, 2, 64, torch.float32, window), 16, 0, torch.float32)
    together, q = case.attend(CPUAttention(), [0])[0], case.q[0]
    for start, end in ((0, 1), (0, 99), (63, 128), (97, 98), (98, 200), (199, 200)):
        case.chunks[0], case.q[0] = (end - start, 30 + start), q[start:end]
        assert torch.equal(case.attend(CPUAttention(), [0])[0], together[start:end])


@given(case=cases(torch.bfloat16))
@settings(max_examples=15)
def test_bfloat16_is_summed_in_float32(case: Case) -> None:
    """Check that sums are not rounded at every key, and that rounding does not truncate."""
    rows = list(range(len(case.chunks)))
    actual = torch.cat(case.attend(CPUAttention(), rows))
    assert actual.dtype == torch.bfloat16
    case.q, case.k_cache, case.v_cache = (
        [q.float() for q in case.q],
        case.k_cache.float(),
        case.v_cache.float(),
    )
    expected = torch.cat(case.attend(TorchSDPA(), rows))
    torch.testing.assert_close(actual.float(), expected, atol=1e-4, rtol=2**-8)


def test_padding_reads_nothing_and_is_zero() -> None:
    """Check a sequence of length 0 in a decode batch, whose row and table are undefined."""
    spec = AttentionSpec(4, 2, 16, torch.float32)
    case = Case([(1, 40), (1, 300), (1, 7)], spec, 4, 0, torch.float32)
    alone = [case.attend(CPUAttention(), [row])[0] for row in range(3)]
    batch = make_batch([([0], before) for _, before in case.chunks], case.tables, 4)
    batch.seq_lens[1] = 0
    batch.block_tables[1] = 1 << 30
    out = CPUAttention().forward(torch.cat(case.q), case.k_cache, case.v_cache, batch, spec)
    assert torch.equal(out[0], alone[0][0]) and torch.equal(out[2], alone[2][0])
    assert torch.equal(out[1], torch.zeros_like(out[1]))
