"""Tests of the batch-invariant mode: results of its kernels, and the independence of plans from the batch."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from by_hand import Chunks, attend, check, make_case
from interpreter import more
from state_cases import Case, run_channel_delta, run_select, with_channel_decays
from state_cases import make_case as make_state_case
from torch import Tensor
from torch.nn import functional as F

from quire.attention.backend import AttentionSpec
from quire.attention.triton_attn import TritonAttention
from quire.checkpoint.facts import Routing
from quire.kernels import batch_invariant, library_matmul
from quire.kernels.reference.fp8 import E4M3, Scaled
from quire.kernels.reference.moe import ExpertWeights
from quire.kernels.reference.ssm import ConvWeights, DecayRates, DeltaInputs, ScanInputs, SSMSequences
from quire.kernels.triton import attention_launch as launch
from quire.kernels.triton import fp8, matmul, moe
from quire.kernels.triton.fixed_gemm import fixed_bmm, fixed_linear
from quire.kernels.triton.ssm import TritonStateOps
from quire.layers.norm import sum_of_squares

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def invariant() -> Iterator[None]:
    batch_invariant.switch(True)
    yield
    batch_invariant.switch(False)


@pytest.mark.parametrize(("num_sms", "window"), [(1, None), (3, 90), (40, None), *more((40, 90), (3, None))])
def test_attention_of_uneven_sequences(
    monkeypatch: pytest.MonkeyPatch, num_sms: int, window: int | None
) -> None:
    """Check splits of one and of several programs, sequences without keys, and windows inside a split."""
    monkeypatch.setattr(launch, "FIXED_SPLIT", 32)
    monkeypatch.setattr(launch, "most_splits", lambda layer: 4)
    monkeypatch.setattr(launch, "sms", lambda device: (num_sms, 1 << 18))
    chunks: Chunks = [(1, 5), (1, 140), (3, 31), (1, -1), (2, 127), (1, 63), (1, 260)]
    spec = AttentionSpec(4, 2, 16, torch.float32, window)
    check(TritonAttention(), chunks, spec, sinks=True, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_products_of_matrices_with_any_strides(dtype: torch.dtype) -> None:
    """Check views, expanded matrices, more than one tile, sums that end within a tile, and empty matrices."""
    a = random(3, 70, 42, dtype=dtype)[:, 1:].transpose(0, 1)
    weight, bias = random(42, 66, seed=1, dtype=dtype).t(), random(66, seed=2, dtype=dtype)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}
    expected = F.linear(a.double(), weight.double(), bias.double()).to(dtype)
    torch.testing.assert_close(fixed_linear(a, weight, bias), expected, **tolerance)
    right, out = weight.t().expand(3, 42, 66), torch.full((69, 3, 66), torch.nan, dtype=dtype, device=DEVICE)
    fixed_bmm(a.transpose(0, 1), right, out.transpose(0, 1))
    torch.testing.assert_close(out, F.linear(a.double(), weight.double()).to(dtype), **tolerance)
    assert fixed_linear(a[:0], weight, bias).shape == (0, 3, 66)
    assert torch.equal(fixed_linear(a[..., :0], weight[:, :0], bias), bias.expand(69, 3, 66))
    with pytest.raises(ValueError, match="no product"):
        fixed_bmm(a, right, out)


def test_products_outside_of_the_engine_are_those_of_torch() -> None:
    """Check that the mode replaces no function of torch, and leaves dtypes that no model computes in."""
    x, weight = random(5, 24, dtype=torch.float64), random(16, 24, seed=1, dtype=torch.float64)
    batch_invariant.switch(False)
    expected = x @ weight.t(), torch.bmm(x[None], weight.t()[None])
    batch_invariant.switch(True)
    assert torch.equal(x @ weight.t(), expected[0])
    assert torch.equal(library_matmul.linear(x, weight), expected[0])
    assert torch.equal(library_matmul.bmm(x[None], weight.t()[None]), expected[1])
    assert matmul.linear(x[:0].bfloat16(), weight.bfloat16()).shape == (0, 16)


ROWS = (1, 2, 7, 16, 17, 32, 33, 64, 65, 100, 128, 200, 256, 257, 1200)
"""Numbers of rows, for each of which the plans have another tile, or tiles of which some rows are missing."""
LARGEST = max(ROWS)
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="bits depend on the instructions of a GPU")
Product = Callable[[Tensor], Tensor]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=DEVICE) / shape[-1] ** 0.25).to(dtype)


def check_bits(product: Product, x: Tensor) -> None:
    """Check that the last rows of x have the same bits as the first and as the last rows of any number."""
    expected = product(x)
    for num in ROWS:
        assert torch.equal(product(x[:num]), expected[:num]), f"the first {num} rows"
        assert torch.equal(product(x[-num:].contiguous()), expected[-num:]), f"the last {num} rows"


@needs_gpu
@pytest.mark.parametrize(
    ("size_out", "size_in"),
    [(1024, 2048), (1024, 3072), (4096, 4096), (6144, 4096), (12800, 4096), (200, 72)],
)
@pytest.mark.parametrize("kind", ["linear", "gated", "library"])
def test_gemms_have_the_same_bits_for_any_number_of_rows(kind: str, size_out: int, size_in: int) -> None:
    weight = random(size_out, size_in, seed=1)
    bias = random(size_out, seed=2)
    kinds: dict[str, Product] = {
        "linear": lambda x: matmul.linear(x, weight, bias),
        "gated": lambda x: matmul.gated(x, weight),
        "library": lambda x: library_matmul.linear(x, weight, bias),
    }
    check_bits(kinds[kind], random(LARGEST, size_in))


@needs_gpu
@pytest.mark.parametrize("size_out", [1024, 4096, 6144])
@pytest.mark.parametrize("blocked", [False, True], ids=["rows", "blocks"])
def test_fp8_gemms_have_the_same_bits_for_any_number_of_rows(blocked: bool, size_out: int) -> None:
    size_in = 4096
    data = random(size_out, size_in, seed=1).to(E4M3)
    scale = random(size_out // 128, size_in // 128, dtype=torch.float32) if blocked else random(size_out)
    weight = Scaled(data, scale.float().abs())
    x = random(LARGEST, size_in)
    check_bits(lambda x: fp8.linear(x, weight), x)
    check_bits(lambda x: fp8.gated(x, weight), x)


@needs_gpu
def test_experts_have_the_same_bits_for_any_number_of_rows() -> None:
    num_experts, hidden, inner, top = 16, 512, 256, 4
    routing = Routing(top, "softmax", True, 1.0)
    router = random(num_experts, hidden, seed=3)
    experts = ExpertWeights(
        random(num_experts, 2 * inner, hidden, seed=1), random(num_experts, hidden, inner, seed=2)
    )

    def mixed(x: Tensor) -> Tensor:
        ids, weights = moe.choose(x, router, routing)
        return moe.mix(x, ids, weights, experts, "silu")

    check_bits(mixed, random(LARGEST, hidden))


@needs_gpu
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 128), (4, 4, 64), (4, 1, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_decodes_have_the_bits_of_prompts(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, window: int | None
) -> None:
    """Compare each query of one prompt with that query alone, in a chunk, and beside other sequences."""
    spec = AttentionSpec(heads, kv_heads, head_dim, dtype, window)
    length, backend = 2200, TritonAttention()
    case = make_case([(length, 0)], spec, block=16, sinks=True, device=DEVICE)
    whole = attend(backend, case)

    def part(queries: list[tuple[int, int]], *, are_decodes: bool) -> Tensor:
        """Attend to some runs of queries (first, end) of the prompt, each a sequence."""
        batch, lens = case.batch, [end - first for first, end in queries]
        ends = np.array([end for _, end in queries], np.int32)
        starts = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
        chosen = replace(
            batch,
            query_starts=torch.from_numpy(starts).to(DEVICE),
            seq_lens=torch.from_numpy(ends).to(DEVICE),
            rows=batch.rows.expand(len(queries)).contiguous(),
            query_lens_host=np.array(lens, np.int32),
            seq_lens_host=ends,
            are_decodes=are_decodes,
            attention=None,
        )
        q = torch.cat([case.q[first:end] for first, end in queries])
        return attend(backend, replace(case, batch=chosen, q=q))

    places = [0, 63, 64, 255, 256, 600, 1023, 1024, 2047, 2048, 2199]
    for place in places:
        assert torch.equal(part([(place, place + 1)], are_decodes=True)[0], whole[place]), place
    together = part([(place, place + 1) for place in places], are_decodes=True)
    assert torch.equal(together, whole[places])
    runs = [(first, min(first + 5, length)) for first in range(3, length, 190)]
    expected = torch.cat([whole[first:end] for first, end in runs])
    assert torch.equal(part(runs, are_decodes=True), expected)
    assert torch.equal(
        part([(10, 150), (2046, 2051), (1000, 1700)], are_decodes=False)[-700:], whole[1000:1700]
    )


STATE_OPS = TritonStateOps()
Run = Callable[[Case, Tensor], Tensor]
CUTS: dict[str, list[int]] = {
    "chunks": [0, 33, 65, 66, 70],
    "decodes": [0, 66, 67, 68, 69, 70],
    "drafts": [0, 60, 63, 67, 70],
}
"""Bounds of the steps in which the 70 tokens of a sequence are processed."""


def convolved(case: Case, state: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(70, 4, generator=generator), torch.randn(70, generator=generator)
    return STATE_OPS.conv(case.x, ConvWeights(weight.to(case.x), bias.to(case.x)), state, case.seqs)


def scanned(case: Case, state: Tensor) -> Tensor:
    inputs = ScanInputs(case.small[:, :3], case.rates, case.skip, (0.2, 0.9))
    return STATE_OPS.scan(case.x, inputs, state, case.seqs)


def selected(case: Case, state: Tensor) -> Tensor:
    return run_select(STATE_OPS, case, state)


def delta(case: Case, state: Tensor) -> Tensor:
    inputs = DeltaInputs(case.small[:, :3], case.small[:, 3:], case.rates)
    return STATE_OPS.delta(case.x, inputs, state, case.seqs)


def delta_by_channel(case: Case, state: Tensor) -> Tensor:
    return run_channel_delta(STATE_OPS, case, state)


LAYERS: dict[str, tuple[Run, int, tuple[int, ...]]] = {
    # the operation, columns of its input, shape of a state
    "convolution": (convolved, 70, (70, 3)),
    "Mamba-2": (scanned, 3 * 20 + 2 * 24, (3, 20, 24)),
    "Mamba": (selected, 3 * 19 + 2 * 16, (19, 16)),
    "delta rule": (delta, 2 * 20 + 3 * 40, (3, 20, 40)),
    "KDA": (delta_by_channel, 2 * 3 * 16 + 3 * 8, (3, 16, 8)),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("layer", LAYERS)
def test_states_have_the_same_bits_after_any_steps(layer: str, cut: str) -> None:
    """Check prompts in chunks, decodes after a prompt, and steps that keep the state after each token."""
    run, width, shape = LAYERS[layer]
    num_states = 4 if cut == "drafts" else 1
    case = make_state_case([70], width, shape, device=DEVICE, states_per_row=num_states)
    if layer == "Mamba":
        case = case._replace(rates=DecayRates(-torch.rand(shape).to(DEVICE) * 4, case.rates.bias))
    if layer == "KDA":
        case = with_channel_decays(case)
    whole, in_steps = case.state.clone(), case.state.clone()
    expected, actual = run(case, whole), []
    for first, end in itertools.pairwise(CUTS[cut]):
        starts = torch.tensor([0, end - first], dtype=torch.int32, device=DEVICE)
        positions, lens = case.seqs.positions[first:end], np.array([end - first], np.int32)
        seqs = SSMSequences(starts, case.seqs.rows, positions, lens, num_states)
        step = case._replace(seqs=seqs, x=case.x[first:end], small=case.small[first:end])
        actual.append(run(step, in_steps))
    assert torch.equal(torch.cat(actual), expected) and expected.isfinite().all()
    last = case.seqs.rows.long() * num_states + 70 % num_states
    assert torch.equal(in_steps[last], whole[last])


def test_sums_of_sharded_norms() -> None:
    """Check an odd number of columns, and rows that have the same bits alone."""
    x = random(70, 77)
    torch.testing.assert_close(sum_of_squares(x), x.square().sum(1, keepdim=True))
    assert torch.equal(sum_of_squares(x)[5:6], sum_of_squares(x[5:6]))
