"""Tests of the Triton SSM kernels against torch; in the interpreter without a GPU."""

import itertools
from typing import Any

import pytest
import torch
from interpreter import more
from state_cases import (
    DRAFTED,
    LENS,
    ROWS,
    STATES_PER_ROW,
    make_case,
    run_channel_delta,
    run_select,
    select_case,
    with_channel_decays,
)
from torch import Tensor

from quire.kernels.reference.ssm import GATES, ConvWeights, DeltaForm, DeltaInputs, ScanInputs, StateReference
from quire.kernels.triton import ssm as state_kernels
from quire.kernels.triton.ssm import TritonStateOps

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.float32, *([torch.bfloat16] if CUDA else [])]
NEAR = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
LIMITS = (0.2, 0.9)
LENS_AND_SIZES = [
    *(("one decode", "even"), ("decodes", "odd"), ("mixed", "odd"), ("short", "even")),
    *more(("one decode", "odd"), ("decodes", "even"), ("mixed", "even"), ("short", "odd")),
    *more(("long", "even"), ("long", "odd")),
]
DRAFTED_AND_SIZES = [("drafts", "odd"), ("drafts and prompts", "even"), *more(("drafts", "even"))]
actual, reference = TritonStateOps(), StateReference()


def options_of(lens: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return the device, the dtype, and the number of states of a row in such a batch."""
    return {"device": DEVICE, "dtype": dtype, "states_per_row": STATES_PER_ROW if lens in DRAFTED else 1}


def same(a: Tensor, b: Tensor, dtype: torch.dtype) -> None:
    """Compare up to rounding: of a sum in bfloat16, the error is relative to the terms, not to the sum."""
    assert a.dtype == b.dtype and a.shape == b.shape
    size = 1.0 if dtype == torch.float32 else max(float(b.float().nan_to_num().square().mean().sqrt()), 1.0)
    near = NEAR[dtype]
    torch.testing.assert_close(a.float(), b.float(), rtol=near, atol=near * size, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lens", ["decodes", "mixed", "short", *DRAFTED, *more("one decode", "long")])
@pytest.mark.parametrize("kernel", [4, *more(2, 3)])
def test_conv(lens: str, kernel: int, dtype: torch.dtype) -> None:
    """Check for windows that reach into another sequence, and for stale states of new sequences."""
    channels, options = 70, options_of(lens, dtype)
    case = make_case((LENS | DRAFTED)[lens], channels, (2, 1, 1), **options)
    weight, bias = (
        torch.randn(*shape, device=DEVICE).to(dtype) for shape in ((channels, kernel), (channels,))
    )
    state = torch.randn(ROWS, options["states_per_row"], channels, kernel - 1, device=DEVICE).to(dtype)
    state[case.seqs.rows[::2].long()] = torch.nan
    state = state.flatten(0, 1)
    twin = state.clone()
    for conv_bias, activated in ((bias, True), (None, False)):
        weights = ConvWeights(weight, conv_bias, activated)
        out = actual.conv(case.x, weights, state, case.seqs)
        same(out, reference.conv(case.x, weights, twin, case.seqs), dtype)
        same(state, twin, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("lens", "sizes"), LENS_AND_SIZES + DRAFTED_AND_SIZES)
def test_scan(lens: str, sizes: str, dtype: torch.dtype) -> None:
    heads, head_dim, size, groups = (4, 16, 16, 2) if sizes == "even" else (3, 20, 24, 1)
    width = heads * head_dim + 2 * groups * size
    case = make_case((LENS | DRAFTED)[lens], width, (heads, head_dim, size), **options_of(lens, dtype))
    twin, dt = case.state.clone(), case.small[:, 1 : 1 + heads]
    inputs = ScanInputs(dt, case.rates, case.skip, LIMITS)
    expected = reference.scan(case.x, inputs, twin, case.seqs)
    same(actual.scan(case.x, inputs, case.state, case.seqs), expected, dtype)
    same(case.state, twin, dtype)


EVEN, ODD = (16, 16), (11, 5)
SELECTED = [
    ("decodes", EVEN, torch.bfloat16),
    ("decodes", ODD, torch.float32),
    ("mixed", ODD, torch.float32),
    ("short", EVEN, torch.bfloat16),
]
OTHERS = [
    case
    for case in itertools.product(("decodes", "mixed", "short"), (EVEN, ODD), (torch.float32, torch.bfloat16))
    if case not in SELECTED
]


@pytest.mark.parametrize(("lens", "shape", "dtype"), [*SELECTED, *more(*OTHERS)])
def test_select(lens: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    compare_select(LENS[lens], shape, dtype)


@pytest.mark.parametrize("lens", DRAFTED)
def test_select_of_drafts(lens: str) -> None:
    compare_select(DRAFTED[lens], ODD, torch.float32, STATES_PER_ROW)


def compare_select(
    lens: list[int], shape: tuple[int, int], dtype: torch.dtype, states_per_row: int = 1
) -> None:
    case = select_case(lens, dtype, DEVICE, shape, states_per_row)
    twin = case.state.clone()
    expected = run_select(reference, case, twin)
    same(run_select(actual, case, case.state), expected, dtype)
    same(case.state, twin, dtype)


@pytest.mark.parametrize("block", [8, 16, 32])
def test_select_with_four_two_and_one_threads_per_channel(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check prompts shorter than or no multiple of the prefetch, and channels that are no multiple of a
    warp.
    """
    monkeypatch.setattr(state_kernels, "_channels_per_warp", lambda num_channels: block)
    compare_select([2, 65, 4, 1, 3], (19, 16), torch.float32)


def test_select_of_a_long_prompt() -> None:
    """Check for an error that grows with each token."""
    compare_select([150], (8, 16), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("lens", "sizes"), LENS_AND_SIZES + DRAFTED_AND_SIZES)
def test_delta(lens: str, sizes: str, dtype: torch.dtype) -> None:
    heads, key_dim, value_dim, key_heads = (4, 16, 16, 2) if sizes == "even" else (3, 20, 40, 1)
    width = 2 * key_heads * key_dim + heads * value_dim
    case = make_case((LENS | DRAFTED)[lens], width, (heads, key_dim, value_dim), **options_of(lens, dtype))
    twin, (a, b) = case.state.clone(), case.small.chunk(2, 1)
    expected = reference.delta(case.x, DeltaInputs(a, b, case.rates), twin, case.seqs)
    same(actual.delta(case.x, DeltaInputs(a, b, case.rates), case.state, case.seqs), expected, dtype)
    same(case.state, twin, dtype)


@pytest.mark.parametrize(
    ("lens", "log_bound"), [("decodes", 0.0), ("mixed", -5.0), *more(("decodes", -5.0), ("mixed", 0.0))]
)
def test_delta_by_channel(lens: str, log_bound: float) -> None:
    heads, key_dim, value_dim, key_heads = 3, 20, 40, 3
    width = 2 * key_heads * key_dim + heads * value_dim
    case = with_channel_decays(make_case(LENS[lens], width, (heads, key_dim, value_dim), device=DEVICE))
    twin = case.state.clone()
    expected = run_channel_delta(reference, case, twin, log_bound)
    same(run_channel_delta(actual, case, case.state, log_bound), expected, torch.float32)
    same(case.state, twin, torch.float32)


def test_doubled_delta() -> None:
    """Check beta above 1, of single tokens and of chunks."""
    case = make_case(LENS["mixed"], 4 * 16 + 4 * 16, (4, 16, 16), device=DEVICE)
    twin, (a, b), form = case.state.clone(), case.small.chunk(2, 1), DeltaForm(beta_scale=2.0)
    expected = reference.delta(case.x, DeltaInputs(a, b, case.rates, form), twin, case.seqs)
    same(
        actual.delta(case.x, DeltaInputs(a, b, case.rates, form), case.state, case.seqs),
        expected,
        torch.float32,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_keys_without_decay(dtype: torch.dtype) -> None:
    """Check an inverse by powers of the system, whose terms would exceed float32 before they cancel."""
    heads, key_dim, value_dim = 2, 16, 16
    width = 2 * heads * key_dim + heads * value_dim
    case = make_case([130], width, (heads, key_dim, value_dim), dtype=dtype, device=DEVICE)
    qkv, a, b = torch.ones_like(case.x), torch.full_like(case.small, -30.0), torch.full_like(case.small, 9.0)
    qkv[:, 2 * heads * key_dim :] = case.x[:, 2 * heads * key_dim :]
    twin = case.state.clone()
    inputs = DeltaInputs(a[:, :heads], b[:, :heads], case.rates)
    expected = reference.delta(qkv, inputs, twin, case.seqs)
    out = actual.delta(qkv, inputs, case.state, case.seqs)
    same(out, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("pieces", "size"), [(1, 100), (5, 16)])
@pytest.mark.parametrize("gate_first", [True, False])
def test_gates(pieces: int, size: int, gate_first: bool, dtype: torch.dtype) -> None:
    case = make_case([3, 1], pieces * size, (pieces * size // 2, 1, 1), dtype=dtype, device=DEVICE)
    weight = torch.randn(size, device=DEVICE).to(dtype)
    x, gate = case.x, case.small
    expected = reference.gated_norm(x, gate, weight, 1e-5, gate_first=gate_first)
    same(actual.gated_norm(x, gate, weight, 1e-5, gate_first=gate_first), expected, dtype)
    for by in GATES:
        same(actual.gate(x, gate, by), reference.gate(x, gate, by), dtype)
