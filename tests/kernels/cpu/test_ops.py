"""Tests of the small C operations against torch with any size, dtype and number of threads."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_threads import torch_threads

from quire.kernels import ops
from quire.kernels.cpu import native
from quire.kernels.cpu.ops import CPUOps
from quire.kernels.ops import HeadNorms
from quire.kernels.reference.activations import ACTIVATIONS, NUMBERS
from quire.kernels.reference.ops import Reference

pytestmark = pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")
CPU_OPS, EXPECTED = CPUOps(), Reference()
ROWS = st.integers(1, 40)
SIZES = st.sampled_from([1, 3, 8, 21, 64, 576, 1543])
TYPES = st.sampled_from([torch.float32, torch.bfloat16])
THREADS = st.sampled_from([1, 2, 3])
SEEDS = st.integers(0, 99)


def near(actual: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if expected.dtype == torch.float32 else 2**-6
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance, equal_nan=True)


class Rows:
    """Random rows, optionally strided, and the inputs of norms and activations."""

    def __init__(
        self, rows: int, size: int, dtype: torch.dtype, wide_weight: bool, gap: int, seed: int
    ) -> None:
        torch.manual_seed(seed)
        self.x = (torch.randn(rows, size + gap) * 3 + 1).to(dtype)[:, :size]
        self.weight, self.bias = torch.randn(2, size).to(torch.float32 if wide_weight else dtype)
        self.residual = torch.randn(rows, size).to(dtype)


@st.composite
def some_rows(draw: st.DrawFn) -> Rows:
    gap = st.integers(0, 3)
    return Rows(draw(ROWS), draw(SIZES), draw(TYPES), draw(st.booleans()), draw(gap), draw(SEEDS))


@given(case=some_rows(), threads=THREADS)
@settings(max_examples=60)
def test_norms(case: Rows, threads: int) -> None:
    """Check vector tails, the residual and its rounding, and float32 weights."""
    x, weight, bias = case.x, case.weight, case.bias
    residual, twin = case.residual.clone(), case.residual.clone()
    with torch_threads(threads):
        near(CPU_OPS.norm(x, weight, 1e-5), EXPECTED.norm(x, weight, 1e-5))
        near(CPU_OPS.add_norm(x, residual, weight, 1e-5), EXPECTED.add_norm(x, twin, weight, 1e-5))
        if x.shape[1] > 3:  # a few numbers may all be nearly equal
            for of in (None, bias):
                near(CPU_OPS.layer_norm(x, weight, of, 1e-5), EXPECTED.layer_norm(x, weight, of, 1e-5))
                actual = CPU_OPS.add_layer_norm(x, residual, weight, of, 1e-5)
                near(actual, EXPECTED.add_layer_norm(x, twin, weight, of, 1e-5))
    assert torch.equal(residual, twin)


@given(case=some_rows(), threads=THREADS, extra=st.integers(0, 5))
@settings(max_examples=30)
def test_parts_of_rows_are_normed_in_place(case: Rows, threads: int, extra: int) -> None:
    """Check that other parts and the rest of the row are unchanged, and that each part uses its
    own weight.
    """
    x = torch.cat((case.x, case.x * 0.1, case.x[:, :extra]), 1)
    twin, weights = x.clone(), (case.weight, case.bias)
    with torch_threads(threads):
        actual = CPU_OPS.norm_parts(x, weights, 1e-5)
    near(actual, EXPECTED.norm_parts(twin, weights, 1e-5))
    assert actual.data_ptr() == x.data_ptr()


def near_exact(actual: Tensor, expected: Tensor, sizes: Tensor) -> None:
    """Compare with float64, since torch's activations are no more exact than ours in their tails.

    Both are exact to 1e-6 of the input. `sizes` are those of the inputs, times the factor of the result.
    """
    relative = 1e-5 if actual.dtype == torch.float32 else 2**-6
    errors = (actual.double() - expected).abs()
    assert (errors <= relative * expected.abs() + 1e-6 * sizes).all(), errors.max()


@given(case=some_rows(), threads=THREADS, activation=st.sampled_from([*NUMBERS, "silu<1.5"]))
@settings(max_examples=80)
def test_activations(case: Rows, threads: int, activation: str) -> None:
    """Check for swapped gate and up, ignored strides, and wrong activation codes."""
    gate_up = torch.cat((case.x * 3, case.residual * 5, case.x), 1)[:, : 2 * case.x.shape[1]]
    gate, up = gate_up.double().abs().chunk(2, 1)
    with torch_threads(threads):
        expected = EXPECTED.gated(gate_up.double(), activation)
        near_exact(CPU_OPS.gated(gate_up, activation), expected, gate * (up + 1))
        if activation in ACTIVATIONS:
            expected = EXPECTED.activate(case.x.double(), activation)
            near_exact(CPU_OPS.activate(case.x, activation), expected, case.x.double().abs())


@given(case=some_rows(), threads=THREADS)
@settings(max_examples=40)
def test_elementwise_operations_are_in_place(case: Rows, threads: int) -> None:
    """Check that memory between rows is unchanged, and that each row uses its own gate."""
    y = case.residual
    changes: list[Callable[[ops.Ops, Tensor], Tensor]] = [
        lambda by, x: by.scale(x, 11.3),
        lambda by, x: by.scale_rows(x, y[:, :1].float()),
        lambda by, x: by.scale_columns(x, y[0]),
        lambda by, x: by.softcap(x, 2.0),
        lambda by, x: by.add(x, y),
        lambda by, x: by.weigh(x, y),
        lambda by, x: by.weigh(x, y[:, :1]),
    ]
    for change in changes:
        around, twin = (torch.cat((case.x, y), 1) for _ in range(2))
        with torch_threads(threads):
            change(CPU_OPS, around[:, : y.shape[1]])
        change(EXPECTED, twin[:, : y.shape[1]])
        near(around, twin)


ENDS = (-1e30, -200.0, -88.5, -0.0, 0.0, 88.5, 200.0, 1e30, math.nan, math.inf)
"""Values where an exponential overflows or vanishes. At minus infinity no kernel has to return the limit,
since torch returns NaN.
"""


def sigmoid(x: float) -> float:
    """Compute the logistic function without overflow."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def exact(activation: str, x: float) -> float:
    """Compute `activation` of a gate x with up = 1, and its limit at infinity, in double precision.

    Torch is no reference there: some of its kernels give NaN for infinity on some CPUs.
    """
    if math.isnan(x):
        return x
    name, _, bound = activation.partition("<")
    clamped = min(x, 7.0)
    values: dict[str, Callable[[], float]] = {
        "silu": lambda: x * sigmoid(x),
        "gelu": lambda: x * math.erfc(-x / math.sqrt(2)) / 2,
        "gelu_tanh": lambda: x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)),
        "relu": lambda: max(x, 0.0),
        "relu2": lambda: max(x, 0.0) * max(x, 0.0),
        "clamped_swiglu": lambda: clamped * sigmoid(1.702 * clamped) * 2,
    }
    return min(values[name](), float(bound or math.inf))


def test_soft_caps_and_gates_at_extreme_values() -> None:
    """Check that no exponential overflows and NaN stays NaN."""
    ends = torch.tensor([ENDS])
    capped = [30 * math.tanh(x / 30) for x in ENDS]
    near(CPU_OPS.softcap(ends.clone(), 30.0), torch.tensor([capped]))
    near(CPU_OPS.weigh(torch.ones_like(ends), ends), torch.tensor([[sigmoid(x) for x in ENDS]]))


@pytest.mark.parametrize("activation", [*NUMBERS, "silu<7"])
def test_activations_at_extreme_values(activation: str) -> None:
    """Check that no exponential overflows and limits are not NaN."""
    gate = torch.tensor([ENDS])
    gate_up = torch.cat((gate, torch.ones_like(gate)), 1)
    near(CPU_OPS.gated(gate_up, activation), torch.tensor([[exact(activation, x) for x in ENDS]]))


@pytest.mark.parametrize("activation", [*NUMBERS, "silu<7"])
def test_torch_activations_at_finite_extreme_values(activation: str) -> None:
    """Check finite values only: torch returns infinity or NaN for infinity."""
    ends = [x for x in ENDS if not math.isinf(x)]
    gate = torch.tensor([ends])
    gate_up = torch.cat((gate, torch.ones_like(gate)), 1)
    near(EXPECTED.gated(gate_up, activation), torch.tensor([[exact(activation, x) for x in ends]]))


@given(rows=ROWS, size=SIZES, dtype=TYPES, threads=THREADS)
@settings(max_examples=20)
def test_embed(rows: int, size: int, dtype: torch.dtype, threads: int) -> None:
    table, ids = torch.randn(50, size).to(dtype), torch.randint(50, (rows,))
    with torch_threads(threads):
        assert torch.equal(CPU_OPS.embed(ids, table), EXPECTED.embed(ids, table))


class Heads:
    """A fused QKV projection and its caches, which can be computed in any batch."""

    def __init__(
        self,
        tokens: int,
        heads: tuple[int, int],
        dims: tuple[int, int],
        dtypes: tuple[torch.dtype, torch.dtype],
        norm_dtype: torch.dtype | None,
        seed: int,
    ) -> None:
        torch.manual_seed(seed)
        (self.heads, kv_heads), (dim, rotary), (dtype, cache_dtype) = heads, dims, dtypes
        self.qkv = torch.randn(tokens, (self.heads + 2 * kv_heads) * dim + 5).to(dtype)[:, :-5]
        angles = torch.randn(100, rotary // 2)
        self.table = torch.cat((angles.cos(), angles.sin()), 1).to(dtype)
        self.positions = torch.randint(100, (tokens,))
        self.slots = torch.randperm(4 * tokens)[:tokens]
        self.slots[torch.rand(tokens) < 0.2] = -1
        self.norms = None
        if norm_dtype is not None:
            self.norms = HeadNorms(*torch.randn(2, dim).to(norm_dtype), 1e-6)
        self.shape, self.cache_dtype = (tokens, 4, kv_heads, dim), cache_dtype

    def run(self, by: ops.Ops, tokens: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries and both caches, which hold -7 where nothing was written."""
        k_cache, v_cache = (torch.full(self.shape, -7.0).to(self.cache_dtype) for _ in range(2))
        places = self.positions[tokens], self.slots[tokens]
        entry = ops.HeadEntry(self.heads, self.table, *places, k_cache, v_cache, self.norms)
        return by.rotate_and_write(self.qkv[tokens], entry), k_cache, v_cache


@st.composite
def some_heads(draw: st.DrawFn) -> Heads:
    dtype = draw(TYPES)
    return Heads(
        draw(st.integers(1, 20)),
        draw(st.sampled_from([(1, 1), (3, 1), (6, 2)])),
        draw(st.sampled_from([(8, 8), (64, 64), (80, 32), (12, 6), (20, 20)])),
        (dtype, draw(st.sampled_from([dtype, torch.bfloat16]))),
        draw(st.sampled_from([None, dtype, torch.float32])),
        draw(SEEDS),
    )


@given(case=some_heads(), threads=THREADS)
@settings(max_examples=50)
def test_rotate_and_write(case: Heads, threads: int) -> None:
    """Check for wrong slots, written padding, wrong RoPE halves, lost dimensions and wrongly normed heads."""
    with torch_threads(threads):
        actual = case.run(CPU_OPS, slice(None))
    for result, expected in zip(actual, case.run(EXPECTED, slice(None)), strict=True):
        torch.testing.assert_close(
            result, expected, atol=(loose := 1e-5 if result.dtype == torch.float32 else 0.05), rtol=loose
        )


@given(case=some_heads(), threads=THREADS, size=SIZES, dtype=TYPES)
@settings(max_examples=30)
def test_row_has_the_same_bits_in_any_batch(case: Heads, threads: int, size: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(9, 2 * size).to(dtype), torch.randn(2 * size).to(dtype)
    operations: list[Callable[[Tensor], Tensor]] = [
        lambda x: CPU_OPS.norm(x, weight, 1e-5),
        lambda x: CPU_OPS.add_norm(x, x.clone(), weight, 1e-5),
        lambda x: CPU_OPS.layer_norm(x, weight, weight, 1e-5),
        lambda x: CPU_OPS.gated(x, "silu"),
        lambda x: CPU_OPS.activate(x, "gelu"),
    ]
    together = [operation(x) for operation in operations]
    queries = case.run(CPU_OPS, slice(None))[0]
    with torch_threads(threads):
        for operation, expected in zip(operations, together, strict=True):
            assert torch.equal(operation(x[7:8])[0], expected[7])
        assert torch.equal(case.run(CPU_OPS, slice(0, 1))[0][0], queries[0])


def test_8_bit_cache_uses_torch() -> None:
    case = Heads(5, (4, 2), (16, 16), (torch.float32, torch.float8_e4m3fn), None, 0)
    for actual, expected in zip(case.run(CPU_OPS, slice(None)), case.run(EXPECTED, slice(None)), strict=True):
        assert torch.equal(actual.float(), expected.float())


def test_dispatch_between_c_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that no unsupported dtype reaches the kernels."""
    cpu = torch.device("cpu")
    choose = ops.choose.__wrapped__
    assert isinstance(choose(cpu, torch.float32), CPUOps) and isinstance(choose(cpu, torch.bfloat16), CPUOps)
    assert isinstance(choose(cpu, torch.float16), Reference)
    monkeypatch.setattr(native, "library", lambda: None)
    assert isinstance(choose(cpu, torch.float32), Reference)


class Adapters:
    """Random adapters in strided slots, and rows that use some of them."""

    def __init__(self, rows: int, size: int, rank: int, parts: tuple[int, ...], dtype: torch.dtype) -> None:
        self.parts, slots = parts, 3
        self.x = torch.randn(rows, size + 3).to(dtype)[:, :size]
        self.out = torch.randn(rows, sum(parts)).to(dtype)
        self.tokens = torch.randint(-1, slots, (rows,), dtype=torch.int32)
        self.a, self.b = (
            (torch.randn(slots, height * width + 7) / width**0.5)
            .to(dtype)[:, :-7]
            .unflatten(1, (height, width))
            for height, width in ((len(parts) * rank, size), (sum(parts), rank))
        )

    def add(self, by: ops.Ops, rows: slice = slice(None)) -> Tensor:
        out, x, tokens = self.out[rows].clone(), self.x[rows], self.tokens[rows]
        return by.lora(out, x, self.a, self.b, self.parts, tokens)

    def add_by_halves(self, by: ops.Ops) -> Tensor:
        ranks = by.lora_shrink(self.x, self.a, self.tokens)
        return by.lora_expand(self.out.clone(), ranks, self.b, self.parts, self.tokens)


@settings(max_examples=25)
@given(
    rows=ROWS,
    size=SIZES,
    rank=st.sampled_from([1, 8, 16, 32]),
    parts=st.sampled_from([(5,), (300, 40, 41), (64, 64)]),
    dtype=TYPES,
    threads=THREADS,
)
def test_lora(
    rows: int, size: int, rank: int, parts: tuple[int, ...], dtype: torch.dtype, threads: int
) -> None:
    """Check for another slot or part, and for rows that depend on the batch."""
    case = Adapters(rows, size, rank, parts, dtype)
    with torch_threads(threads):
        actual = case.add(CPU_OPS)
        alone = torch.cat([case.add(CPU_OPS, slice(row, row + 1)) for row in range(rows)])
    near(actual, case.add(EXPECTED))
    assert torch.equal(actual, alone) and torch.equal(actual, case.add_by_halves(CPU_OPS))
    ids, table = torch.randint(0, 9, (rows,)), torch.randn(3, 9, rank).to(dtype)
    arguments = ids, table, case.b, case.tokens
    near(CPU_OPS.lora_rows(case.out.clone(), *arguments), EXPECTED.lora_rows(case.out.clone(), *arguments))
