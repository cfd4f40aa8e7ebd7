"""Every backend against attention in float64: Triton in its interpreter or, marked gpu, on the GPU."""

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
    """Stand-ins for packages that need a GPU."""
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
    """Those with soft cap, sinks, 8-bit caches and padding."""
    return BACKENDS[request.param]()


HEADS = (4, 4), (4, 2), (6, 1)


@pytest.mark.parametrize("shift", [0, *more(1, 2)])
def test_small_sequences(backend: AttentionBackend, shift: int) -> None:
    """A wrong mask, head grouping, window edge, slot, row; or NaN leaking from slots that nobody wrote. Each
    batch with each window, and the heads in turn: with every shift, all with all."""
    for number, (name, window) in enumerate(itertools.product(CHUNKS, (None, 1, 4, 100))):
        spec = AttentionSpec(*HEADS[(number + shift) % len(HEADS)], 8, torch.float32, window)
        try:
            check(backend, CHUNKS[name], spec)
        except AssertionError as error:
            raise AssertionError(f"{name}, {spec}") from error


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("head_dim", [16, 40])
def test_many_tiles_and_ranges(backend: AttentionBackend, head_dim: int, window: int | None) -> None:
    """A range lost or merged twice, a tile that starts or ends at the wrong key, dims beyond the head."""
    check(backend, MIXED, replace(SPEC, head_dim=head_dim, window=window), block=16)


def test_more_heads_on_one_key_head_than_a_tile_has_rows(backend: AttentionBackend) -> None:
    check(backend, [(3, 4), (1, 9)], AttentionSpec(40, 1, 16, torch.float32))


def test_heads_that_do_not_fill_the_rows_of_a_tile(backend: AttentionBackend) -> None:
    """A query whose heads are cut at the end of a tile."""
    check(backend, [(23, 9), (2, 5), (1, 30)], AttentionSpec(14, 2, 16, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_wide_heads(dtype: torch.dtype, full: AttentionBackend) -> None:
    """Those of Gemma 4, in the shapes that the kernels have for them."""
    check(full, [(19, 3), (1, 40), (1, 0)], AttentionSpec(8, 2, 512, dtype, scale=0.05), block=16)


@pytest.mark.parametrize("kind", ["TORCH_SDPA", "TRITON_ATTN", pytest.param("CPU_ATTN", marks=needs_native)])
def test_layers_side_by_side(kind: str) -> None:
    """A token's keys that lie further apart than they are wide: those of another layer read for them."""
    case = make_case(MIXED, AttentionSpec(4, 2, 8, torch.float32, 33), block=16)
    for name in ("k_cache", "v_cache"):
        own = getattr(case, name)
        shared = torch.full((own.shape[0], own.shape[1], 4, *own.shape[2:]), torch.nan)
        shared[:, :, 2] = own
        setattr(case, name, shared[:, :, 2])
    backend = CPUAttention() if kind == "CPU_ATTN" else BACKENDS[kind]()
    torch.testing.assert_close(attend(backend, case), case.expected(), atol=1e-5, rtol=1e-5)


def test_an_own_scale(backend: AttentionBackend) -> None:
    check(backend, [(4, 0), (1, 3)], replace(SPEC, scale=0.9))


@pytest.mark.parametrize("window", [None, 33])
def test_half_precision_is_summed_in_float32(backend: AttentionBackend, window: int | None) -> None:
    check(backend, MIXED, replace(SPEC, dtype=torch.float16, window=window), block=16)


def test_a_narrower_cache(full: AttentionBackend) -> None:
    check(full, MIXED, SPEC, cache_dtype=torch.float16)


@pytest.mark.parametrize("window", [None, 33])
def test_soft_cap(capped: AttentionBackend, window: int | None) -> None:
    check(capped, MIXED, replace(SPEC, scale=3.0, softcap=2.0, window=window), block=16)


@pytest.mark.parametrize("window", [None, 33])
def test_sinks(full: AttentionBackend, window: int | None) -> None:
    """A sink counted once per range or per tile instead of once; the sink of another head."""
    check(full, MIXED, replace(SPEC, window=window), sinks=True, block=16)


@pytest.mark.parametrize(("heads", "window"), [((4, 4), None), ((6, 1), None), ((4, 2), 33)])
def test_slopes(full: AttentionBackend, heads: tuple[int, int], window: int | None) -> None:
    """The slope of another head or in other units; distances from the start of a chunk, a share, a window."""
    check(full, MIXED, AttentionSpec(*heads, 16, torch.float32, window, uses_alibi=True), block=16)


@pytest.mark.parametrize(("cache_dtype", "window"), [(torch.float8_e4m3fn, None), (torch.float8_e5m2, 33)])
def test_8_bit_caches(full: AttentionBackend, cache_dtype: torch.dtype, window: int | None) -> None:
    """Scales left out, swapped or applied twice; a kind taken for the other."""
    spec = replace(SPEC, dtype=torch.float16, k_scale=0.5, v_scale=2.0, window=window)
    check(full, MIXED, spec, cache_dtype=cache_dtype, sinks=window is not None, block=16)


REACHING: Chunks = [(50, 3), (1, 50), (5, 60), (36, 20), (1, 0), (7, 0)]
RUNS: Runs = [[(5, 40), (48, 3)], [], [(61, 4)], [(10, 46)], [], [(0, 7)]]
"""Of whole tiles and of few tokens; one that began before the step; all of a sequence."""


@pytest.mark.parametrize(("heads", "window"), [((4, 2), None), ((6, 1), 9), ((4, 2), 33)])
def test_tokens_that_see_what_follows_them(
    full: AttentionBackend, heads: tuple[int, int], window: int | None
) -> None:
    """A tile that ends at its last query; a window that moves with the reach; few queries cut by keys."""
    spec = AttentionSpec(*heads, 16, torch.float32, window)
    check(full, REACHING, spec, block=16, runs=RUNS)


@pytest.mark.parametrize("name", ["FLASH_ATTN", "FLASHINFER"])
@pytest.mark.usefixtures("packages")
def test_packages_without_reach_say_so(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: does not support bidirectional attention"):
        choose(name, replace(SPEC, head_dim=64, dtype=torch.bfloat16, bidirectional=True), H200)


@pytest.mark.parametrize("name", ["FLASH_ATTN", "FLASHINFER"])
@pytest.mark.usefixtures("packages")
def test_packages_without_slopes_say_so(name: str) -> None:
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
def test_lengths_that_only_the_device_knows(
    heads: tuple[int, int], window: int | None, sinks: bool, pad: int
) -> None:
    """A tile that nobody has, or two; what pads the batch taken for a sequence with keys."""
    chunks = [*MIXED, (0, 0), (2, 9), (0, 0), (pad, -pad)]
    case = make_case(chunks, AttentionSpec(*heads, 16, torch.float32, window), block=16, sinks=sinks)
    expected, num_tokens = case.expected(), len(case.q)
    case.batch.are_any, case.batch.token_ids = True, torch.zeros(num_tokens)
    case.batch.query_lens_host = np.full(len(chunks), num_tokens, np.int32)
    torch.testing.assert_close(attend(TritonAttention(), case), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sinks", [False, True])
def test_padding_gives_zeros(full: AttentionBackend, sinks: bool) -> None:
    """A division by no weights at all; a read at a place before the first."""
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


def test_the_same_alone_and_in_company(backend: AttentionBackend) -> None:
    """Keys or partial sums of one sequence counted in another."""
    case = make_case([(1, 130), (5, 60), (1, 7), (20, 1)], SPEC)
    together = attend(backend, case).split(case.batch.query_lens_host.tolist())
    for seq, expected in enumerate(together):
        torch.testing.assert_close(attend(backend, alone(case, seq)), expected, atol=1e-5, rtol=1e-5)


H200 = Machine("cuda", "a GPU", 1, 1, 1, 1, capability=(9, 0))


def test_what_is_not_installed_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_cache_that_cannot_be_read_does_not_fit(packages: None) -> None:
    """An assert in the first step instead of a reason at the start."""
    spec, cache_dtype = AttentionSpec(4, 2, 128, torch.bfloat16), torch.float8_e4m3fn
    for kind in (FlashAttention, FlashInfer):
        assert kind().fits(replace(spec, cache_dtype=torch.bfloat16), H200) is None
    narrow = replace(spec, cache_dtype=cache_dtype)
    with pytest.raises(ConfigError, match="FLASH_ATTN: needs a KV cache of the model's dtype, not float8"):
        choose("FLASH_ATTN", narrow, H200)
    assert choose("FLASHINFER", narrow, H200).name == "FLASHINFER"
    with pytest.raises(ConfigError, match="or float8_e4m3fn, not float8_e5m2"):
        choose("FLASHINFER", replace(spec, cache_dtype=torch.float8_e5m2), H200)


def test_flashinfer_is_told_the_scales_of_an_8_bit_cache(packages: None) -> None:
    spec = replace(SPEC, dtype=torch.float16, k_scale=0.5, v_scale=2.0)
    check(FlashInfer(), MIXED, spec, cache_dtype=torch.float8_e4m3fn, block=16)


def test_the_older_flash_attn_wants_starts_and_large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths given where it reads starts; blocks that it would read as others."""
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
def test_on_the_gpu(chunks: Chunks, heads: tuple[int, int], head_dim: int, window: int | None) -> None:
    spec = AttentionSpec(*heads, head_dim, torch.bfloat16, window)
    check(TritonAttention(), chunks, spec, block=16, device="cuda")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(("heads", "head_dim", "window"), [((8, 4), 256, None), ((32, 8), 128, 100)])
def test_reach_on_the_gpu(heads: tuple[int, int], head_dim: int, window: int | None) -> None:
    """Images as Gemma has them, beside a decode."""
    chunks: Chunks = [(700, 30), (1, 900), (300, 0), (40, 7)]
    runs: Runs = [[(40, 256), (320, 256)], [], [(0, 256)], []]
    spec = AttentionSpec(*heads, head_dim, torch.bfloat16, window)
    check(TritonAttention(), chunks, spec, block=16, device="cuda", runs=runs)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 512])
@pytest.mark.parametrize("extra", ["plain", "cap", "sinks", "slopes", "e4m3fn", "e5m2"])
def test_kinds_on_the_gpu(dtype: torch.dtype, head_dim: int, extra: str) -> None:
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
    """A grid or an address that depends on the lengths at capture; counts that are not zero again."""
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
