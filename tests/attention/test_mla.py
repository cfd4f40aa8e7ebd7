"""Tests of MLA against attention over explicit keys and values in float64."""

from dataclasses import replace

import pytest
import torch
import triton.language as tl
from by_hand import CHUNKS, TOLERANCE, Case, Chunks, by_hand, make_case
from interpreter import more
from torch import Tensor

from quire.attention import cpu_mla, triton_mla
from quire.attention.backend import AttentionSpec
from quire.attention.cpu_mla import CPUMLA
from quire.attention.mla import MLABackend, MLAEntry, MLALoRA, MLASpec, TorchMLA, choose
from quire.attention.triton_mla import TritonMLA
from quire.kernels import batch_invariant
from quire.kernels.cpu import native
from quire.kernels.cpu.ops import CPUOps
from quire.kernels.ops import Ops
from quire.kernels.reference.ops import Reference
from quire.kernels.triton import mla_launch as launch
from quire.kernels.triton import split_kv_shares
from quire.kernels.triton.ops import TritonOps
from quire.layers.lora import AdapterSlots
from quire.layers.lora_layers import LoRAFactors, LoRAMlaLayer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter has no bfloat16
SPEC = MLASpec(heads=3, rank=32, nope_dim=16, rope_dim=8, v_dim=24, scale=0.2)
MANY: Chunks = [(1, 40), (19, 0), (1, -1), (2, 70), (40, 33), (1, 0), (9, 5), (8, 12)]
IMPLEMENTATIONS = {"torch": TorchMLA, "cpu": CPUMLA, "triton": TritonMLA}
needs_native = pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")
ON_CPU = pytest.param("cpu", marks=needs_native)
NAMES = ["torch", ON_CPU, "triton"]


def case_of(
    chunks: Chunks, spec: MLASpec, dtype: torch.dtype, device: str, cache_dtype: torch.dtype | None
) -> tuple[Case, Tensor, Tensor]:
    """Return latents in a cache, queries and the weight."""
    one = AttentionSpec(spec.heads, 1, spec.width, dtype, scale=spec.scale, k_scale=spec.k_scale)
    case = make_case(chunks, one, device=device, cache_dtype=cache_dtype)
    q = torch.randn(len(case.q), spec.heads, spec.query_dim, device=device).to(dtype)
    weight = torch.randn(spec.heads, spec.nope_dim + spec.v_dim, spec.rank, device=device) / spec.rank**0.5
    return case, q, weight.to(dtype)


def expected(case: Case, q: Tensor, weight: Tensor, spec: MLASpec) -> Tensor:
    pieces = []
    for queries, latents in zip(q.split(case.batch.query_lens_host.tolist()), case.keys, strict=True):
        latent, turned = latents.double()[:, 0].split([spec.rank, spec.rope_dim], -1)
        kv = torch.einsum("lr,hdr->lhd", latent, weight.double())
        keys, values = kv.split([spec.nope_dim, spec.v_dim], -1)
        keys = torch.cat((keys, turned[:, None].expand(-1, spec.heads, -1)), -1)
        full = AttentionSpec(spec.heads, spec.heads, spec.query_dim, q.dtype, scale=spec.scale)
        nothing = queries.new_zeros(len(queries), spec.heads, spec.v_dim)
        pieces.append(by_hand(queries, keys, values, full) if len(latents) else nothing)
    return torch.cat(pieces)


def check(
    latent: MLABackend,
    chunks: Chunks,
    spec: MLASpec,
    dtype: torch.dtype,
    device: str,
    cache_dtype: torch.dtype | None = None,
) -> None:
    case, q, weight = case_of(chunks, spec, dtype, device, cache_dtype)
    cache = case.k_cache[:, :, 0]
    actual = latent.attend(q, weight, cache, case.batch, spec)
    tolerance = 3 * TOLERANCE[dtype]
    torch.testing.assert_close(actual, expected(case, q, weight, spec), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunks", [*CHUNKS.values(), MANY], ids=[*CHUNKS, "many"])
def test_latent_attention_matches_explicit_keys_and_values(name: str, chunks: Chunks) -> None:
    """Check both halves of the weight, masks, and the merging of splits."""
    check(IMPLEMENTATIONS[name](), chunks, SPEC, torch.float32, DEVICE if name == "triton" else "cpu")


ADAPTED: dict[str, type[Ops]] = {"torch": Reference, "cpu": CPUOps, "triton": TritonOps}


@pytest.mark.parametrize("heads_at_once", [1, 3])
def test_adapters_in_the_batch_invariant_mode(monkeypatch: pytest.MonkeyPatch, heads_at_once: int) -> None:
    """Check latents of some heads at a time, each with its part of the adapters."""
    monkeypatch.setattr(batch_invariant, "_switch", {"on": True})
    num_bytes = 2 * sum(size for size, _ in MANY) * SPEC.rank * 4 * heads_at_once
    monkeypatch.setattr(triton_mla, "EXPANDED_BYTES", num_bytes)
    check_adapters("triton")


@pytest.mark.parametrize("name", NAMES)
def test_each_sequence_uses_its_own_adapter(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(cpu_mla, "FEW_QUERIES", 8)
    monkeypatch.setattr(cpu_mla, "EXPANDED_BYTES", 1)
    check_adapters(name)


def check_adapters(name: str) -> None:
    """Check that adapters apply to both halves and only to their own latents.

    An infinity in an unused adapter must not spread.
    """
    device = DEVICE if name == "triton" else "cpu"
    case, q, weight = case_of(MANY, SPEC, torch.float32, device, None)
    owner = AdapterSlots(max_slots=3, max_rank=4, dtype=torch.float32, device=torch.device(device))
    sizes = SPEC.heads, SPEC.nope_dim, SPEC.v_dim
    implementation = IMPLEMENTATIONS[name]()
    transposed = implementation.needs_transposed_lora
    lora_layer = LoRAMlaLayer("kv_b", owner, SPEC.rank, sizes, ADAPTED[name](), keeps_transposed=transposed)
    owner.allocate()
    of_seqs = [0, 2, -1, 0, 2, 2, 0, -1]
    weights = dict.fromkeys(of_seqs, weight)
    for slot in (0, 2):
        a = torch.randn(1, 4, SPEC.rank, device=device)
        b = torch.randn(weight[..., 0].numel(), 4, device=device)
        owner.put(slot, {"kv_b": LoRAFactors(a / 4, b / 4)})
        weights[slot] = weight + (b @ a[0] / 16).view_as(weight)
    owner.put(1, {"kv_b": LoRAFactors(a / 0, b / 0)})
    tokens = [slot for slot, (size, _) in zip(of_seqs, MANY, strict=True) for _ in range(size)]
    adapted = MLALoRA(
        lora_layer.a,
        lora_layer.b,
        lora_layer.transposed,
        torch.tensor(tokens, dtype=torch.int32, device=device),
        lora_layer.ops,
    )
    actual = implementation.attend(q, weight, case.k_cache[:, :, 0], case.batch, SPEC, adapted)
    reference = {slot: expected(case, q, slot_weights, SPEC) for slot, slot_weights in weights.items()}
    right = torch.stack([reference[slot][at] for at, slot in enumerate(tokens)])
    torch.testing.assert_close(actual, right, atol=3e-4, rtol=3e-4)


@pytest.mark.parametrize("name", [ON_CPU, "triton"])
def test_half_precision(name: str) -> None:
    dtype, device = (HALF, DEVICE) if name == "triton" else (torch.bfloat16, "cpu")
    check(IMPLEMENTATIONS[name](), MANY, SPEC, dtype, device)


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_8_bit_caches(monkeypatch: pytest.MonkeyPatch, name: str, cache_dtype: torch.dtype) -> None:
    """Check that the scale is applied to scores, sums and decompressed keys."""
    monkeypatch.setattr(cpu_mla, "FEW_QUERIES", 8)
    spec, device = replace(SPEC, k_scale=0.5), DEVICE if name == "triton" else "cpu"
    check(
        IMPLEMENTATIONS[name](), MANY, spec, HALF if name == "triton" else torch.float32, device, cache_dtype
    )


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("name", [ON_CPU, "triton"])
def test_tokens_are_written_to_an_8_bit_cache(name: str, cache_dtype: torch.dtype) -> None:
    """Check that large values saturate and never become NaN."""
    spec, device = MLASpec(3, 24, 16, 8, 24, 0.2, k_scale=0.25), DEVICE if name == "triton" else "cpu"
    torch.manual_seed(1)
    q, kv = torch.randn(5, 3, spec.query_dim, device=device), torch.randn(5, spec.width, device=device)
    kv[1, spec.rank :] *= 1e6
    entry = MLAEntry(
        torch.ones(spec.rank, device=device),
        1e-6,
        torch.randn(50, spec.rope_dim, device=device),
        torch.tensor([3, 0, 49, 7, 1], device=device),
        torch.tensor([9, 2, -1, 0, 23], device=device),
        torch.zeros(6, 4, spec.width, device=device, dtype=torch.uint8).view(cache_dtype),
    )
    caches = []
    for latent in (TorchMLA(), IMPLEMENTATIONS[name]()):
        copied_entry = entry._replace(cache=entry.cache.view(torch.uint8).clone().view(cache_dtype))
        latent.enter(q.clone(), kv, copied_entry, spec)
        caches.append(copied_entry.cache.float())
    assert caches[1].isfinite().all()
    # The last bit of a float may differ; the interpreter loses the carry into the exponent.
    assert (caches[0] == caches[1]).float().mean() > 0.98
    assert torch.isclose(*caches, rtol=0.3, atol=1e-2).float().mean() > 0.98


def test_more_heads_than_tile_rows() -> None:
    spec = MLASpec(heads=70, rank=16, nope_dim=16, rope_dim=16, v_dim=16, scale=0.25)
    check(TritonMLA(), [(1, 90), (2, 20), (1, 5)], spec, torch.float32, DEVICE)


@pytest.mark.parametrize("num_sms", [3, 40, *more(1)])
def test_uneven_sequences(monkeypatch: pytest.MonkeyPatch, num_sms: int) -> None:
    """Check splits that end within a sequence, span several, or are empty."""
    monkeypatch.setattr(launch, "sms", lambda device: (num_sms, 1 << 18))
    chunks: Chunks = [(1, 5), (1, 140), (3, 31), (1, -1), (2, 100), (1, 63), (1, 200)]
    check(TritonMLA(), chunks, SPEC, torch.float32, DEVICE)


def test_more_sequences_than_are_counted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 262
    if DEVICE == "cpu":  # in the interpreter, where constants are not compiled in
        count = 10
        monkeypatch.setattr(split_kv_shares, "_SEQS_AT_ONCE", tl.constexpr(4))
    chunks: Chunks = [(1, 3 + 7 * index % 50) for index in range(count)]
    check(TritonMLA(), chunks, SPEC, torch.float32, DEVICE)


@pytest.mark.parametrize("num_bytes", [1, 40 * 4 * 80 * 3])
def test_prompts_in_several_rounds(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Check little memory: one sequence at a time, and one head at a time for a long one."""
    monkeypatch.setattr(triton_mla, "EXPANDED_BYTES", num_bytes)
    monkeypatch.setattr(triton_mla, "_split", triton_mla._split.__wrapped__)
    check(TritonMLA(), MANY, SPEC, torch.float32, DEVICE)


@needs_native
@pytest.mark.parametrize("num_bytes", [1, 1 << 20])
def test_long_chunks_on_a_cpu(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Check keys decompressed for one head or all; other sequences of the batch use absorbed weights."""
    monkeypatch.setattr(cpu_mla, "FEW_QUERIES", 8)
    monkeypatch.setattr(cpu_mla, "EXPANDED_BYTES", num_bytes)
    check(CPUMLA(), MANY, SPEC, torch.float32, "cpu")


@needs_native
@pytest.mark.parametrize(("rank", "nope_dim"), [(30, 16), (32, 10), (32, 8)])
def test_sizes_that_the_native_kernel_does_not_support(
    monkeypatch: pytest.MonkeyPatch, rank: int, nope_dim: int
) -> None:
    """Check widths that are no multiple of its step, and unusual head sizes."""
    monkeypatch.setattr(cpu_mla, "FEW_QUERIES", 8)
    spec = MLASpec(heads=3, rank=rank, nope_dim=nope_dim, rope_dim=8, v_dim=20, scale=0.2)
    check(CPUMLA(), MANY, spec, torch.float32, "cpu")


@pytest.mark.parametrize("neighbours", [True, False])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("triton", torch.float32),
        ("triton", HALF),
        pytest.param("cpu", torch.float32, marks=needs_native),
        pytest.param("cpu", torch.bfloat16, marks=needs_native),
    ],
    ids=str,
)
def test_tokens_are_written_to_the_cache(name: str, dtype: torch.dtype, neighbours: bool) -> None:
    """Check the norm's width, interleaved RoPE, and that padding is not written."""
    spec = MLASpec(3, 24, 16, 8, 24, 0.2, neighbours)
    device = DEVICE if name == "triton" else "cpu"
    torch.manual_seed(1)
    fused = torch.randn(5, 3 * spec.query_dim + spec.width, device=device).to(dtype)
    entry = MLAEntry(
        torch.randn(spec.rank, device=device).to(dtype),
        1e-6,
        torch.randn(50, spec.rope_dim, device=device).to(dtype),
        torch.tensor([3, 0, 49, 7, 1], device=device),
        torch.tensor([9, 2, -1, 0, 23], device=device),
        torch.zeros(6, 4, spec.width, device=device, dtype=dtype),
    )
    entries = entry, entry._replace(cache=entry.cache.clone())
    queries = []
    for latent, item in zip((TorchMLA(), IMPLEMENTATIONS[name]()), entries, strict=True):
        q, kv = fused.clone().split([3 * spec.query_dim, spec.width], -1)
        queries.append(q.view(5, 3, spec.query_dim))
        latent.enter(queries[-1], kv, item, spec)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(queries[1], queries[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(entries[1].cache, entries[0].cache, atol=tolerance, rtol=tolerance)
    assert not entries[1].cache.view(24, -1)[[1, 3, 22]].any()
    assert entries[1].cache.view(24, -1)[[9, 2, 0, 23]].all()


def test_native_kernel_is_used_on_a_cpu() -> None:
    expected = TorchMLA if native.library() is None else CPUMLA
    assert type(choose(torch.device("cpu"), torch.float32)) is expected
    assert type(choose(torch.device("cpu"), torch.float64)) is TorchMLA
