"""Tests of every backend against attention in float64: Triton in its interpreter or, marked gpu,
on the GPU.
"""

import itertools
import sys
from dataclasses import replace

import numpy as np
import pytest
import stand_ins
import torch
from by_hand import CHUNKS, Case, Chunks, Runs, attend, check, make_case
from interpreter import more

from quire.attention import flash_attn
from quire.attention.backend import AttentionBackend, AttentionSpec, choose
from quire.attention.cpu_attn import CPUAttention
from quire.attention.flash_attn import FlashAttention
from quire.attention.flashinfer import FlashInfer
from quire.attention.torch_sdpa import TorchSDPA
from quire.attention.triton_attn import TritonAttention
from quire.config.machine import Machine
from quire.errors import ConfigError
from quire.kernels.cpu import native

BACKENDS: dict[str, type[AttentionBackend]] = {
    "TORCH_SDPA": TorchSDPA,
    "TRITON_ATTN": TritonAttention,
    "FLASH_ATTN": FlashAttention,
    "FLASHINFER": FlashInfer,
}
SPEC = AttentionSpec(4, 2, 16, torch.float32)
MIXED: Chunks = [(19, 3), (1, 150), (3, 100), (36, 20), (1, 0)]
needs_native = pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install stand-ins for packages that need a GPU."""
    wrapper = stand_ins.BatchPrefillWithPagedKVCacheWrapper
    for module in (
        stand_ins.package("vllm_flash_attn", flash_attn_varlen_func=stand_ins.by_lens),
        stand_ins.package("flashinfer", BatchPrefillWithPagedKVCacheWrapper=wrapper),
    ):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("quire.attention.flashinfer._WORKSPACE_BYTES", 16)
    monkeypatch.setattr(flash_attn, "_PACKAGES", {"vllm_flash_attn": 1})
    flash_attn._package.cache_clear()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, packages: None) -> AttentionBackend:
    return BACKENDS[request.param]()


@pytest.fixture(params=["TORCH_SDPA", "TRITON_ATTN", "FLASH_ATTN", "FLASHINFER"])
def capped(request: pytest.FixtureRequest, packages: None) -> AttentionBackend:
    return BACKENDS[request.param]()


@pytest.fixture(params=["TORCH_SDPA", "TRITON_ATTN"])
def full(request: pytest.FixtureRequest) -> AttentionBackend:
    """Skip backends without soft cap, sinks, 8-bit caches and padding."""
    return BACKENDS[request.param]()


@pytest.fixture(params=["TORCH_SDPA", "TRITON_ATTN", pytest.param("CPU_ATTN", marks=needs_native)])
def chunking(request: pytest.FixtureRequest) -> AttentionBackend:
    """Skip backends without chunked attention."""
    return (BACKENDS | {"CPU_ATTN": CPUAttention})[request.param]()


HEADS = (4, 4), (4, 2), (6, 1)


@pytest.mark.parametrize("shift", [0, *more(1, 2)])
def test_small_sequences(backend: AttentionBackend, shift: int) -> None:
    """Check masks, head groups, window edges, slots and rows, and that no NaN leaks from unwritten slots.

    Each batch runs with each window, and heads in rotation: every combination over all shifts.
    """
    for number, (name, window) in enumerate(itertools.product(CHUNKS, (None, 1, 4, 100))):
        spec = AttentionSpec(*HEADS[(number + shift) % len(HEADS)], 8, torch.float32, window)
        try:
            check(backend, CHUNKS[name], spec)
        except AssertionError as error:
            raise AssertionError(f"{name}, {spec}") from error


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("head_dim", [16, 40])
def test_many_tiles_and_ranges(backend: AttentionBackend, head_dim: int, window: int | None) -> None:
    """Check for lost or doubly merged splits, wrong tile bounds, and dimensions beyond the head."""
    check(backend, MIXED, replace(SPEC, head_dim=head_dim, window=window), block=16)


@pytest.mark.parametrize("window", [1, 4, 33])
def test_chunked_attention(chunking: AttentionBackend, window: int) -> None:
    """Check chunks that begin inside of blocks, tiles and queries of a step, and decodes at their edges."""
    edges: Chunks = [(1, window), (1, window - 1), (1, 2 * window - 1), (2, 2 * window - 1), (window, window)]
    for batch in (MIXED, edges, *CHUNKS.values()):
        check(chunking, batch, replace(SPEC, window=window, chunked=True), block=16)


def test_more_query_heads_per_kv_head_than_tile_rows(backend: AttentionBackend) -> None:
    check(backend, [(3, 4), (1, 9)], AttentionSpec(40, 1, 16, torch.float32))


def test_heads_that_do_not_fill_the_rows_of_a_tile(backend: AttentionBackend) -> None:
    """Check a query whose heads are split at the end of a tile."""
    check(backend, [(23, 9), (2, 5), (1, 30)], AttentionSpec(14, 2, 16, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_wide_heads(dtype: torch.dtype, full: AttentionBackend) -> None:
    """Check the heads of Gemma 4."""
    check(full, [(19, 3), (1, 40), (1, 0)], AttentionSpec(8, 2, 512, dtype, scale=0.05), block=16)


@pytest.mark.parametrize("kind", ["TORCH_SDPA", "TRITON_ATTN", pytest.param("CPU_ATTN", marks=needs_native)])
def test_layers_interleaved_in_memory(kind: str) -> None:
    """Check keys with a stride above their width, so that other layers' keys lie between them."""
    case = make_case(MIXED, AttentionSpec(4, 2, 8, torch.float32, 33), block=16)
    for name in ("k_cache", "v_cache"):
        cache = getattr(case, name)
        shared = torch.full((cache.shape[0], cache.shape[1], 4, *cache.shape[2:]), torch.nan)
        shared[:, :, 2] = cache
        setattr(case, name, shared[:, :, 2])
    backend = CPUAttention() if kind == "CPU_ATTN" else BACKENDS[kind]()
    torch.testing.assert_close(attend(backend, case), case.expected(), atol=1e-5, rtol=1e-5)


def test_custom_scale(backend: AttentionBackend) -> None:
    check(backend, [(4, 0), (1, 3)], replace(SPEC, scale=0.9))


@pytest.mark.parametrize("window", [None, 33])
def test_half_precision_is_summed_in_float32(backend: AttentionBackend, window: int | None) -> None:
    check(backend, MIXED, replace(SPEC, dtype=torch.float16, window=window), block=16)


def test_cache_of_a_narrower_dtype(full: AttentionBackend) -> None:
    check(full, MIXED, SPEC, cache_dtype=torch.float16)


@pytest.mark.parametrize("window", [None, 33])
def test_soft_cap(capped: AttentionBackend, window: int | None) -> None:
    check(capped, MIXED, replace(SPEC, scale=3.0, softcap=2.0, window=window), block=16)


@pytest.mark.parametrize("window", [None, 33])
def test_sinks(full: AttentionBackend, window: int | None) -> None:
    """Check that a sink counts once, not per split or tile, and that each head uses its own."""
    check(full, MIXED, replace(SPEC, window=window), sinks=True, block=16)


@pytest.mark.parametrize(("heads", "window"), [((4, 4), None), ((6, 1), None), ((4, 2), 33)])
def test_alibi_slopes(full: AttentionBackend, heads: tuple[int, int], window: int | None) -> None:
    """Check each head's slope and its units, and distances with chunks, splits and windows."""
    check(full, MIXED, AttentionSpec(*heads, 16, torch.float32, window, uses_alibi=True), block=16)


@pytest.mark.parametrize(("cache_dtype", "window"), [(torch.float8_e4m3fn, None), (torch.float8_e5m2, 33)])
def test_8_bit_caches(full: AttentionBackend, cache_dtype: torch.dtype, window: int | None) -> None:
    """Check that scales are applied once and not swapped, and that FP8 types are not confused."""
    spec = replace(SPEC, dtype=torch.float16, k_scale=0.5, v_scale=2.0, window=window)
    check(full, MIXED, spec, cache_dtype=cache_dtype, sinks=window is not None, block=16)


REACHING: Chunks = [(50, 3), (1, 50), (5, 60), (36, 20), (1, 0), (7, 0)]
RUNS: Runs = [[(5, 40), (48, 3)], [], [(61, 4)], [(10, 46)], [], [(0, 7)]]
"""Spans of whole tiles and of few tokens; one that began before the step; a whole sequence."""


@pytest.mark.parametrize(("heads", "window"), [((4, 2), None), ((6, 1), 9), ((4, 2), 33)])
def test_bidirectional_spans(full: AttentionBackend, heads: tuple[int, int], window: int | None) -> None:
    """Check tiles that end at the last query, windows with spans, and few queries split by keys."""
    spec = AttentionSpec(*heads, 16, torch.float32, window)
    check(full, REACHING, spec, block=16, runs=RUNS)


@pytest.mark.parametrize("name", ["FLASH_ATTN", "FLASHINFER"])
@pytest.mark.usefixtures("packages")
def test_packages_without_bidirectional_spans_are_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: does not support bidirectional attention"):
        choose(name, replace(SPEC, head_dim=64, dtype=torch.bfloat16, bidirectional=True), H200)


@pytest.mark.parametrize("name", ["FLASH_ATTN", "FLASHINFER"])
@pytest.mark.usefixtures("packages")
def test_packages_without_alibi_are_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: does not support ALiBi slopes"):
        choose(name, replace(SPEC, head_dim=64, dtype=torch.bfloat16, uses_alibi=True), H200)


@pytest.mark.parametrize(
    ("heads", "window", "sinks", "pad"),
    [
        ((4, 2), None, True, 1),
        ((6, 1), 9, False, 70),
        *more(
            ((4, 2), None, True, 6), ((4, 2), None, True, 70), ((6, 1), 9, False, 1), ((6, 1), 9, False, 6)
        ),
    ],
)
def test_lengths_known_only_on_the_device(
    heads: tuple[int, int], window: int | None, sinks: bool, pad: int
) -> None:
    """Check for missing or duplicate tiles, and for padding taken for a sequence with keys."""
    chunks = [*MIXED, (0, 0), (2, 9), (0, 0), (pad, -pad)]
    case = make_case(chunks, AttentionSpec(*heads, 16, torch.float32, window), block=16, sinks=sinks)
    expected, num_tokens = case.expected(), len(case.q)
    case.batch.are_mixed, case.batch.token_ids = True, torch.zeros(num_tokens)
    case.batch.query_lens_host = np.full(len(chunks), num_tokens, np.int32)
    torch.testing.assert_close(attend(TritonAttention(), case), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sinks", [False, True])
def test_padding_gives_zeros(full: AttentionBackend, sinks: bool) -> None:
    """Check for a division by zero weights and a read before the first position."""
    check(full, [(1, -1), (1, 70), (1, -1), (1, -1)], SPEC, sinks=sinks)


def alone(case: Case, seq: int) -> Case:
    batch = case.batch
    lens = batch.query_lens_host
    start, count = int(lens[:seq].sum()), int(lens[seq])
    batch = replace(
        batch,
        query_starts=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=batch.seq_lens[seq : seq + 1],
        rows=batch.rows[seq : seq + 1],
        query_lens_host=lens[seq : seq + 1],
        seq_lens_host=batch.seq_lens_host[seq : seq + 1],
    )
    return replace(case, batch=batch, q=case.q[start : start + count])


def test_outputs_are_equal_alone_and_in_a_batch(backend: AttentionBackend) -> None:
    """Check that no keys or partial sums of another sequence are included."""
    case = make_case([(1, 130), (5, 60), (1, 7), (20, 1)], SPEC)
    together = attend(backend, case).split(case.batch.query_lens_host.tolist())
    for seq, expected in enumerate(together):
        torch.testing.assert_close(attend(backend, alone(case, seq)), expected, atol=1e-5, rtol=1e-5)


H200 = Machine("cuda", "a GPU", 1, 1, 1, 1, capability=(9, 0))


def test_backends_that_are_not_installed_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AttentionSpec(4, 2, 128, torch.bfloat16)
    for name in ("flash_attn", "vllm_flash_attn", "flashinfer", "triton"):
        monkeypatch.setitem(sys.modules, name, stand_ins.package(name))
    for kind in (FlashAttention, FlashInfer, TritonAttention):
        assert kind().fits(spec, H200) is None
        assert "this is cpu" in (kind().fits(spec, replace(H200, device="cpu")) or "")
        assert "8.0, this is 7.5" in (kind().fits(spec, replace(H200, capability=(7, 5))) or "")
        assert "head size" in (kind().fits(replace(spec, head_dim=600), H200) or "")
        assert "not float64" in (kind().fits(replace(spec, dtype=torch.float64), H200) or "")
    for module in ("flash_attn", "flashinfer", "triton_attn"):
        monkeypatch.setattr(f"quire.attention.{module}.find_spec", lambda name: None)
    for kind in (FlashAttention, FlashInfer, TritonAttention):
        assert "installed" in (kind().fits(spec, H200) or "")


def test_unsupported_cache_dtype_does_not_fit(packages: None) -> None:
    """Check for a reason at start-up instead of an assertion in the first step."""
    spec, cache_dtype = AttentionSpec(4, 2, 128, torch.bfloat16), torch.float8_e4m3fn
    for kind in (FlashAttention, FlashInfer):
        assert kind().fits(replace(spec, cache_dtype=torch.bfloat16), H200) is None
    narrow = replace(spec, cache_dtype=cache_dtype)
    with pytest.raises(ConfigError, match="FLASH_ATTN: needs a KV cache of the model's dtype, not float8"):
        choose("FLASH_ATTN", narrow, H200)
    assert choose("FLASHINFER", narrow, H200).name == "FLASHINFER"
    with pytest.raises(ConfigError, match="or float8_e4m3fn, not float8_e5m2"):
        choose("FLASHINFER", replace(spec, cache_dtype=torch.float8_e5m2), H200)


def test_flashinfer_gets_the_scales_of_an_8_bit_cache(packages: None) -> None:
    spec = replace(SPEC, dtype=torch.float16, k_scale=0.5, v_scale=2.0)
    check(FlashInfer(), MIXED, spec, cache_dtype=torch.float8_e4m3fn, block=16)


def test_older_flash_attn_needs_starts_and_large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that it gets starts instead of lengths, and no unsupported block size."""
    package = stand_ins.package("flash_attn", flash_attn_varlen_func=stand_ins.by_starts)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(flash_attn, "_PACKAGES", {"flash_attn": 256})
    flash_attn._package.cache_clear()
    check(FlashAttention(), [(4, 300), (1, 2)], SPEC, block=256)
    with pytest.raises(ConfigError, match="multiple of 256, not 16"):
        check(FlashAttention(), [(4, 300), (1, 2)], SPEC, block=16)
    flash_attn._package.cache_clear()


REAL = {
    "prompts": [(700, 0), (513, 0), (64, 0), (2048, 0)],
    "chunks": [(300, 1000), (33, 4000), (500, 1), (17, 0)],
    "decodes": [(1, n) for n in (0, 1, 15, 16, 63, 64, 575, 576, 4000, 9001)],
    "padded": [(1, 700), (1, -1), (1, 300), (1, -1)],
    "drafts": [(4, 700), (2, 90), (1, 3), (3, 5000)],
    "many": [(1, 17 + 37 * n % 900) for n in range(300)],
    "mixed": [(1, 900), (400, 30), (1, 64), (5, 50), (1, -1), (129, 0)],
}


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [
        ((32, 8), 128),
        ((16, 8), 128),
        ((8, 8), 64),
        ((14, 2), 64),
        ((6, 2), 80),
        ((4, 1), 256),
        ((16, 2), 96),
        ((32, 4), 512),
    ],
)
@pytest.mark.parametrize("chunks", REAL.values(), ids=REAL.keys())
def test_backends_on_the_gpu(
    chunks: Chunks, heads: tuple[int, int], head_dim: int, window: int | None
) -> None:
    spec = AttentionSpec(*heads, head_dim, torch.bfloat16, window)
    check(TritonAttention(), chunks, spec, block=16, device="cuda")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(("heads", "head_dim", "window"), [((8, 4), 256, None), ((32, 8), 128, 100)])
def test_bidirectional_spans_on_the_gpu(heads: tuple[int, int], head_dim: int, window: int | None) -> None:
    """Check Gemma's images beside a decode."""
    chunks: Chunks = [(700, 30), (1, 900), (300, 0), (40, 7)]
    runs: Runs = [[(40, 256), (320, 256)], [], [(0, 256)], []]
    spec = AttentionSpec(*heads, head_dim, torch.bfloat16, window)
    check(TritonAttention(), chunks, spec, block=16, device="cuda", runs=runs)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 512])
@pytest.mark.parametrize("extra", ["plain", "cap", "sinks", "slopes", "e4m3fn", "e5m2"])
def test_variants_on_the_gpu(dtype: torch.dtype, head_dim: int, extra: str) -> None:
    spec = AttentionSpec(8, 2, head_dim, dtype)
    if extra == "cap":
        spec = replace(spec, softcap=2.0, scale=1.0)
    if extra == "slopes":
        spec = replace(spec, uses_alibi=True)
    cache_dtype = getattr(torch, f"float8_{extra}", None)
    if cache_dtype is not None:
        spec = replace(spec, k_scale=0.5, v_scale=2.0)
    chunks = REAL["mixed"] + [(1, 5000)]
    check(
        TritonAttention(),
        chunks,
        spec,
        block=16,
        cache_dtype=cache_dtype,
        sinks=extra == "sinks",
        device="cuda",
    )


@pytest.mark.gpu
@on_gpu
def test_decodes_in_a_graph() -> None:
    """Check for grids or addresses that depend on the captured lengths, and for counters that are
    not reset.
    """
    spec = AttentionSpec(32, 8, 128, torch.bfloat16)
    backend = TritonAttention()
    case = make_case([(1, 1500), (1, 40), (1, 3000)], spec, block=16, device="cuda")
    attend(backend, case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(backend, case)
    for lens in [(1501, 41, 3001), (3, 0, 2000), (700, 7, 1)]:
        case.batch.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        fewer = replace(
            case,
            keys=[k[:n] for k, n in zip(case.keys, lens, strict=True)],
            values=[v[:n] for v, n in zip(case.values, lens, strict=True)],
        )
        for _ in range(3):
            out.fill_(torch.nan)
            graph.replay()
            torch.testing.assert_close(out, fewer.expected(), atol=2e-2, rtol=2e-2)
