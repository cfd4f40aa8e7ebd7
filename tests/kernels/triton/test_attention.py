"""How paged attention is launched; what it computes is tested in tests/attention."""

import pytest
import torch
from by_hand import Chunks, check

from quire.attention.backend import AttentionSpec
from quire.attention.triton_attn import TritonAttention
from quire.kernels.triton import attention_launch as launch
from quire.kernels.triton.attention_launch import Layer, Ranges, ranges_of

LAYER = Layer(32, 8, 128, 0.1, 0, 0.0, 1.0, 1.0)


def test_ranges_fill_the_device_and_no_more() -> None:
    assert ranges_of(8, 4096, 132) == Ranges(41, 41, 64)
    assert ranges_of(2048, 4096, 132) == Ranges(1, 1, 64)
    assert ranges_of(64, 4096, 132) == Ranges(8, 8, 64)
    # In a full batch only what is long enough to be worth a merge.
    assert ranges_of(256, 4096, 132) == Ranges(4, 4, 640)
    # What has few keys at most is not cut at all.
    assert ranges_of(8, 64, 132) == Ranges(1, 1, 64)


def test_a_long_sequence_can_be_cut_where_short_ones_are_not() -> None:
    """A full batch in which one sequence alone takes longer than all others together."""
    ranges = ranges_of(512, 131072, 132)
    assert ranges == Ranges(1, 6, 64)
    # Where none can be very long, no time is spent on empty ranges.
    assert ranges_of(512, 4096, 132) == Ranges(1, 1, 64)
    assert ranges_of(1 << 20, 131072, 132) == Ranges(1, 1, 64)


@pytest.mark.parametrize("group", [1, 2, 7, 16, 40, 71])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_heads_of_a_query_fit_a_tile(group: int, dtype: torch.dtype) -> None:
    layer = LAYER._replace(heads=group, kv_heads=1)
    assert launch.tile_shape(layer, dtype, 500).block_m >= group
    assert launch.tile_shape(layer, dtype, 2).block_m >= group
    for groups in (8, 64, 256, 2048):
        assert launch.range_shape(layer, dtype, groups, 132).block_m >= group * layer.few


@pytest.mark.parametrize("window", [None, 90])
def test_sequences_cut_finely(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    """Many sequences with one long among them; a range that starts behind the last key, or at a wrong one."""
    monkeypatch.setattr(launch, "MAX_KEYS", 32)
    monkeypatch.setattr(launch, "_num_sms", lambda device: 4)
    chunks: Chunks = [(1, 5), (1, 140), (3, 31), (1, -1), (2, 100)]
    check(TritonAttention(), chunks, AttentionSpec(4, 2, 16, torch.float32, window), sinks=True)
    monkeypatch.setattr(launch, "_num_sms", lambda device: 40)
    check(TritonAttention(), chunks, AttentionSpec(4, 2, 16, torch.float32, window))


def test_counts_are_zero_again_after_every_launch() -> None:
    """The second layer or step would merge too early."""
    check(TritonAttention(), [(1, 400), (2, 130)], AttentionSpec(4, 2, 16, torch.float32))
    assert not launch._arrivals(torch.device("cpu")).any()
