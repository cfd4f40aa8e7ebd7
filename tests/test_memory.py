"""Tests of cache capacity: exact block counts, and advice that works when it is followed."""

import dataclasses
import math
import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from quire.checkpoint.facts import ArchFacts, LayerFacts, RopeFacts
from quire.checkpoint.layout import CacheSpec, cache_specs, layout
from quire.errors import ConfigError
from quire.memory import (
    CacheRoom,
    CacheSize,
    activation_bytes,
    choose_offloaded,
    human,
    size_cache,
    smallest_cache,
)

FACTS = ArchFacts("LlamaForCausalLM", 320, 64, 128, 4, 2, 16, 1e-5, (LayerFacts(RopeFacts()),) * 2)
BLOCK = 2 * 2 * 2 * 16 * 2 * 16
"""Keys and values, layers, heads, head size, bytes of bfloat16, tokens."""
GIB = 1 << 30


def size(kv_bytes: int = 0, **settings: Any) -> CacheSize:
    of_room = {field.name for field in dataclasses.fields(CacheRoom)} & settings.keys()
    room = {"other_bytes": 0, "total_bytes": GIB} | {name: settings.pop(name) for name in of_room}
    options = {"max_model_len": 64, "auto_fit": False, "num_rows": 10**6, "block_size": 16, "max_chunk": 32}
    options |= {"layout": layout(cache_specs(FACTS), 1 << 20)} | settings
    return size_cache(kv_dtype="bfloat16", room=CacheRoom(kv_bytes=kv_bytes, **room), **options)


def blocks_and_len(size: CacheSize) -> tuple[int, int]:
    return size.num_blocks, size.max_model_len


def test_bytes_of_a_block() -> None:
    made = layout(cache_specs(FACTS), 64)
    assert made.block_bytes(16, 2) == BLOCK and made.block_bytes(1, 4) == BLOCK // 8
    assert size(5 * BLOCK + 7).num_bytes == 5 * BLOCK


def test_fp8_cache_holds_twice_the_tokens() -> None:
    sizes = {
        kind: size_cache(
            layout(cache_specs(FACTS), 1 << 20), kv_dtype=kind, block_size=16, max_model_len=64, max_chunk=32,
            num_rows=10**6, auto_fit=False, room=CacheRoom(100 * BLOCK, 0, GIB),
        )
        for kind in ("bfloat16", "fp8_e4m3", "fp8_e5m2")
    }  # fmt: skip
    assert sizes["fp8_e4m3"] == sizes["fp8_e5m2"] and sizes["fp8_e4m3"].num_blocks == 200
    assert sizes["bfloat16"].num_blocks == 100


def test_checkpoints_of_states_take_a_quarter_of_what_rows_leave() -> None:
    state = 10 * BLOCK
    specs = (CacheSpec("state", bytes_per_row=state), CacheSpec("full", elements=32))
    hybrid = layout(specs, 1 << 20)
    page, settings = hybrid.block_bytes(16, 2), {"layout": hybrid, "num_rows": 3, "checkpoint_unit": 16}
    room = 4 * state + 80 * state
    made = size(room, **settings | {"max_model_len": 4096})
    assert made.num_checkpoints == 20 and made.all_checkpoint_bytes == 20 * state
    assert made.num_bytes + made.all_checkpoint_bytes <= room < made.num_bytes + 20 * state + page
    assert size(room, **settings).num_checkpoints == 3 * 4, "no more than rows have boundaries"
    longest = {"max_model_len": 4096}
    tight = 4 * state + 257 * page
    assert size(tight + 3 * state // 2, **settings | longest).num_checkpoints == 1, "one request comes first"
    assert size(tight, **settings | longest).num_checkpoints == 0
    assert size(room, **settings | {"checkpoint_unit": None}).num_checkpoints == 0


def test_smallest_cache_fits_on_every_device() -> None:
    sizes = [CacheSize(9, 64, 128, num_checkpoints=5), CacheSize(7, 64, 96, num_checkpoints=8)]
    assert smallest_cache(sizes) == CacheSize(7, 64, 96, num_checkpoints=5)


def test_activations_grow_with_tokens_and_sequences() -> None:
    base = activation_bytes(FACTS, "bfloat16", num_tokens=10, num_seqs=1)
    assert activation_bytes(FACTS, "bfloat16", num_tokens=10, num_seqs=2) - base == 9 * 4 * 320
    assert activation_bytes(FACTS, "bfloat16", num_tokens=20, num_seqs=1) > base


@pytest.mark.parametrize(("spare", "blocks"), [(0, 5), (BLOCK - 1, 5), (BLOCK, 6)])
def test_as_many_blocks_as_fit(spare: int, blocks: int) -> None:
    assert blocks_and_len(size(5 * BLOCK + spare)) == (blocks, 64)


def test_null_block_is_counted() -> None:
    """64 tokens are four blocks; without the fifth a request would never be admitted."""
    with pytest.raises(ConfigError, match=f"{human(BLOCK)} is missing"):
        size(4 * BLOCK)
    with pytest.raises(ConfigError, match="needs 5 KV cache blocks, but num_gpu_blocks_override=4"):
        size(num_blocks_override=4)


def test_override_ignores_free_memory() -> None:
    assert blocks_and_len(size(-5, num_blocks_override=7)) == (7, 64)


def test_default_size_is_limited_by_rows_and_an_explicit_one_is_not() -> None:
    assert size(1000 * BLOCK, soft=True, num_rows=2).num_blocks == 9
    assert size(1000 * BLOCK, soft=False, num_rows=2).num_blocks == 1000


def test_auto_fit_shortens_only_if_needed() -> None:
    assert blocks_and_len(size(4 * BLOCK, auto_fit=True)) == (4, 48)
    assert blocks_and_len(size(9 * BLOCK, auto_fit=True)) == (9, 64)
    with pytest.raises(ConfigError, match="maximum model length is 0"):
        size(BLOCK, auto_fit=True)


def test_too_small_device_gets_no_flag_advice() -> None:
    with pytest.raises(ConfigError, match="needs a device with more memory") as caught:
        size(-100, total_bytes=4 * BLOCK)
    assert "--" not in str(caught.value)


def flag(message: str, name: str) -> str | None:
    match = re.search(rf"--{name} ([\d.]*\d)", message)
    return match[1] if match else None


@given(
    max_model_len=st.integers(1, 5000),
    block_size=st.sampled_from([1, 4, 16, 64]),
    total_bytes=st.integers(1 << 20, 1 << 28),
    other_share=st.floats(0, 1),
    utilization=st.floats(0.01, 1),
)
def test_model_fits_with_each_advised_flag(
    max_model_len: int, block_size: int, total_bytes: int, other_share: float, utilization: float
) -> None:
    """Each flag of the message, used alone, makes the same model fit."""
    other = int(total_bytes * other_share)
    same: dict[str, Any] = {"block_size": block_size, "total_bytes": total_bytes, "other_bytes": other}
    have = int(total_bytes * utilization) - other
    try:
        size(have, max_model_len=max_model_len, **same)
    except ConfigError as error:
        message = str(error)
    else:
        assume(False)
    if (shorter := flag(message, "max-model-len")) is not None:
        assert size(have, max_model_len=int(shorter), **same).max_model_len == int(shorter)
        assert size(have, max_model_len=max_model_len, auto_fit=True, **same).max_model_len == int(shorter)
        with pytest.raises(ConfigError):
            size(have, max_model_len=int(shorter) + 1, **same)
    if (share := flag(message, "gpu-memory-utilization")) is not None:
        assert float(share) <= 1.0
        size(int(total_bytes * float(share)) - other, max_model_len=max_model_len, **same)
    if (wanted := flag(message, "kv-cache-memory-bytes")) is not None:
        size(int(wanted), max_model_len=max_model_len, **same)
        with pytest.raises(ConfigError):
            size(int(wanted) - 1, max_model_len=max_model_len, **same)
    missing = re.search(r"([\d.]+) ([GM])iB is missing", message)
    assert missing
    rounded_up = (float(missing[1]) + 0.005) * 2 ** {"G": 30, "M": 20}[missing[2]]
    size(max(have, 0) + math.ceil(rounded_up), max_model_len=max_model_len, **same)


@given(max_model_len=st.integers(17, 5000), blocks=st.integers(2, 300))
def test_model_fits_with_the_advised_block_override(max_model_len: int, blocks: int) -> None:
    assume((blocks - 1) * 16 < max_model_len)
    with pytest.raises(ConfigError) as caught:
        size(num_blocks_override=blocks, max_model_len=max_model_len)
    needed = int(flag(str(caught.value), "num-gpu-blocks-override") or 0)
    assert size(num_blocks_override=needed, max_model_len=max_model_len).max_model_len == max_model_len
    with pytest.raises(ConfigError):
        size(num_blocks_override=needed - 1, max_model_len=max_model_len)
    shorter = int(flag(str(caught.value), "max-model-len") or 0)
    assert size(num_blocks_override=blocks, max_model_len=shorter)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0.00 MiB"), (1 << 20, "1.00 MiB"), (1 << 28, "0.25 GiB"), (3 << 29, "1.50 GiB")],
)
def test_bytes_are_human_readable(num_bytes: int, text: str) -> None:
    assert human(num_bytes) == text


def test_sliding_windows_leave_room_for_more_tokens() -> None:
    """Five windows per full layer, at 32k: more than three times the tokens in the same memory."""
    full, narrow = CacheSpec("full", elements=64), CacheSpec("window", elements=64, window=1024)
    results = {}
    for name, specs in {"full": [full] * 36, "windows": ([narrow] * 5 + [full]) * 6}.items():
        settings = {"layout": layout(specs, 1 << 17), "max_model_len": 32768, "max_chunk": 8192}
        results[name] = size(GIB, total_bytes=2 * GIB, **settings)
        assert results[name].num_bytes <= GIB
    assert results["full"].num_tokens == (results["full"].num_blocks - 1) * 16
    assert results["windows"].num_tokens > 5 * results["full"].num_tokens
    assert results["windows"].windows == (None, *(1024,) * 5)


def test_window_only_model_holds_any_length() -> None:
    """During a chunk of 32, a window of 32 takes at most 5 blocks of 16."""
    narrow = {"layout": layout([CacheSpec("window", elements=64, window=32)], 2**20), "max_model_len": 10**5}
    assert size(num_blocks_override=6, **narrow).max_model_len == 10**5
    with pytest.raises(ConfigError, match="needs 6 KV cache blocks"):
        size(num_blocks_override=5, **narrow)


def test_states_of_all_rows_are_reserved_first() -> None:
    specs = [CacheSpec("state", bytes_per_row=BLOCK), *cache_specs(FACTS)]
    states = {"layout": layout(specs, 64), "num_rows": 3}
    assert blocks_and_len(size(9 * BLOCK, **states)) == (5, 64)
    assert size(9 * BLOCK, **states).num_bytes == 9 * BLOCK
    with pytest.raises(ConfigError, match=f"{human(BLOCK)} is missing"):
        size(8 * BLOCK, **states)


def test_states_without_room_report_how_many_requests_fit() -> None:
    """Catches advice that names only a shorter length, although the states need the memory."""
    specs = [CacheSpec("state", bytes_per_row=100 * BLOCK), *cache_specs(FACTS)]
    with pytest.raises(ConfigError, match=r"--max-num-seqs 6\b"):
        size(800 * BLOCK, layout=layout(specs, 64), num_rows=16)


@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=40), wanted=st.integers(1, 5000))
def test_offloaded_layers_reach_the_wanted_bytes(sizes: list[int], wanted: int) -> None:
    layers, host_bytes, buffer_bytes = choose_offloaded(sizes, wanted)
    assert list(layers) == sorted({*layers}) and host_bytes == sum(sizes[layer] for layer in layers)
    if len(sizes) < 3:
        assert not layers
        return
    assert host_bytes >= wanted or len(layers) == len(sizes)
    assert buffer_bytes == 2 * max(sizes[layer] for layer in layers)


def test_fewest_layers_are_offloaded_evenly() -> None:
    assert choose_offloaded([10] * 8, 0).layers == ()
    assert choose_offloaded([10] * 8, 40) == ((1, 3, 5, 7), 40, 20)
    assert len(choose_offloaded([10] * 8, 41).layers) == 5
    assert choose_offloaded([10] * 9, 10) == ((2, 5, 8), 30, 20)  # one layer less on the device
    assert choose_offloaded([10] * 4, float("inf")).layers == (0, 1, 2, 3)
