"""Tests of SSM states: chunks against single tokens in torch, and C against torch, also on tape."""

import numpy as np
import pytest
import torch
from state_cases import (
    DRAFTED,
    LENS,
    ROWS,
    STATES_PER_ROW,
    Case,
    make_case,
    run_channel_delta,
    run_select,
    select_case,
    with_channel_decays,
)
from torch import Tensor

from quire.kernels.cpu import native
from quire.kernels.cpu.ssm import CPUStateOps, HalfStateOps
from quire.kernels.cpu.tape import record
from quire.kernels.reference.ssm import (
    GATES,
    ConvWeights,
    DeltaForm,
    DeltaInputs,
    ScanInputs,
    SSMSequences,
    StateOps,
    StateReference,
    choose,
)

reference = StateReference()
compiled = pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")
SCAN, DELTA = (4, 16, 24, 2), (4, 20, 40, 2)
"""heads, both dimensions of the state, groups or key heads"""


def scan_case(lens: list[int], dtype: torch.dtype = torch.float32, states_per_row: int = 1) -> Case:
    heads, dim, size, groups = SCAN
    width, state = heads * dim + 2 * groups * size, (heads, dim, size)
    return make_case(lens, width, state, dtype=dtype, states_per_row=states_per_row)


def delta_case(lens: list[int], dtype: torch.dtype = torch.float32, states_per_row: int = 1) -> Case:
    heads, key_dim, dim, key_heads = DELTA
    width, state = 2 * key_heads * key_dim + heads * dim, (heads, key_dim, dim)
    return make_case(lens, width, state, dtype=dtype, states_per_row=states_per_row)


def channel_case(lens: list[int], dtype: torch.dtype = torch.float32, states_per_row: int = 1) -> Case:
    return with_channel_decays(delta_case(lens, dtype, states_per_row))


def run_scan(ops: StateOps, case: Case, state: Tensor) -> Tensor:
    inputs = ScanInputs(case.small[:, 1 : 1 + SCAN[0]], case.rates, case.skip, (0.2, 0.9))
    return ops.scan(case.x, inputs, state, case.seqs)


def run_delta(ops: StateOps, case: Case, state: Tensor) -> Tensor:
    return ops.delta(case.x, DeltaInputs(*case.small.chunk(2, 1), case.rates), state, case.seqs)


def run_doubled_delta(ops: StateOps, case: Case, state: Tensor) -> Tensor:
    form = DeltaForm(beta_scale=2.0)
    return ops.delta(case.x, DeltaInputs(*case.small.chunk(2, 1), case.rates, form), state, case.seqs)


def run_bounded_delta(ops: StateOps, case: Case, state: Tensor) -> Tensor:
    return run_channel_delta(ops, case, state, log_bound=-5.0)


KINDS = {
    "scan": (scan_case, run_scan),
    "delta": (delta_case, run_delta),
    "delta, doubled": (delta_case, run_doubled_delta),
    "delta by channel": (channel_case, run_channel_delta),
    "delta by channel, bounded": (channel_case, run_bounded_delta),
    "select": (select_case, run_select),
}


def near(a: Tensor, b: Tensor, dtype: torch.dtype) -> None:
    tolerance = 1e-4 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(a.float(), b.float(), atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_chunked_scan_matches_single_tokens(kind: str) -> None:
    """Check for decays of the wrong token and states lost between chunks."""
    make, run = KINDS[kind]
    case = make([130])
    state, twin = case.state, case.state.clone()
    full, pieces = run(reference, case, state), []
    for t in range(130):
        one = SSMSequences(
            torch.tensor([0, 1]), case.seqs.rows, case.seqs.positions[t : t + 1], np.ones(1, np.int32)
        )
        token = case._replace(seqs=one, x=case.x[t : t + 1], small=case.small[t : t + 1])
        pieces.append(run(reference, token, twin))
    near(full, torch.cat(pieces), torch.float32)
    near(state, twin, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_state_after_each_draft(kind: str) -> None:
    """Check that a step with drafts keeps the states that steps of single tokens pass through, and that a
    step can start from any of them: from those of 2 accepted tokens here."""
    make, run = KINDS[kind]
    case = make([STATES_PER_ROW], states_per_row=STATES_PER_ROW)
    state, row = case.state, int(case.seqs.rows[0])
    first = int(case.seqs.positions[0]) + 5
    case.seqs.positions.copy_(torch.arange(first, first + STATES_PER_ROW))
    state.normal_()
    alone = torch.zeros(ROWS, *state.shape[1:])
    alone[row] = state[row * STATES_PER_ROW + first % STATES_PER_ROW]

    def step(start: int, count: int, states: Tensor, states_per_row: int) -> Tensor:
        tokens = slice(start, start + count)
        seqs = SSMSequences(
            torch.tensor([0, count]),
            case.seqs.rows,
            case.seqs.positions[tokens],
            np.array([count], np.int32),
            states_per_row,
        )
        return run(reference, case._replace(seqs=seqs, x=case.x[tokens], small=case.small[tokens]), states)

    drafted = step(0, STATES_PER_ROW, state, STATES_PER_ROW)
    for at in range(STATES_PER_ROW):
        near(drafted[at : at + 1], step(at, 1, alone, 1), torch.float32)
        near(state[row * STATES_PER_ROW + (first + at + 1) % STATES_PER_ROW], alone[row], torch.float32)
    near(step(2, 2, state, STATES_PER_ROW), drafted[2:], torch.float32)


@compiled
@pytest.mark.parametrize("lens", DRAFTED)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_in_c(kind: str, lens: str) -> None:
    make, run = KINDS[kind]
    case = make(DRAFTED[lens], torch.float32, states_per_row=STATES_PER_ROW)
    twin = case.state.clone()
    near(run(CPUStateOps(), case, case.state), run(reference, case, twin), torch.float32)
    near(case.state, twin, torch.float32)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize("kind", KINDS)
def test_states_in_c(kind: str, lens: str, dtype: torch.dtype) -> None:
    make, run = KINDS[kind]
    case = make(LENS[lens], dtype)
    twin = case.state.clone()
    near(run(CPUStateOps(), case, case.state), run(reference, case, twin), dtype)
    near(case.state, twin, dtype)


@compiled
@pytest.mark.parametrize("kind", KINDS)
def test_float16_widened(kind: str) -> None:
    """Check rows that C reads with another stride."""
    make, run = KINDS[kind]
    case = make(LENS["mixed"], torch.float16)
    twin, ops = case.state.clone(), choose(torch.device("cpu"), torch.float16)
    assert isinstance(ops, HalfStateOps)
    near(run(ops, case, case.state), run(reference, case, twin), torch.float16)
    near(case.state, twin, torch.float32)


@pytest.mark.parametrize("lens", DRAFTED)
def test_conv_keeps_the_inputs_before_each_draft(lens: str) -> None:
    """Check each state against the inputs before it."""
    channels, kernel = 6, 4
    case = make_case(DRAFTED[lens], channels, (2, 1, 1), states_per_row=STATES_PER_ROW)
    state = torch.randn(ROWS * STATES_PER_ROW, channels, kernel - 1)
    before = state.clone()
    reference.conv(case.x, ConvWeights(torch.randn(channels, kernel), None), state, case.seqs)
    for index, start, end in case.seqs.spans():
        row, first = int(case.seqs.rows[index]), int(case.seqs.positions[start])
        kept = before[row * STATES_PER_ROW + first % STATES_PER_ROW].T * (first > 0)
        inputs, count = torch.cat((kept, case.x[start:end])), end - start
        for num in range(1 if count <= STATES_PER_ROW else count, count + 1):
            after = state[row * STATES_PER_ROW + (first + num) % STATES_PER_ROW]
            assert torch.equal(after, inputs[num : num + kernel - 1].T)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lens", LENS | DRAFTED)
def test_conv_in_c(lens: str, dtype: torch.dtype) -> None:
    """Check for windows that reach into another sequence, and for stale states of new sequences."""
    channels, kernel, num_states = 70, 4, STATES_PER_ROW if lens in DRAFTED else 1
    case = make_case((LENS | DRAFTED)[lens], channels, (2, 1, 1), dtype=dtype, states_per_row=num_states)
    weight, bias = torch.randn(channels, kernel).to(dtype), torch.randn(channels).to(dtype)
    state = torch.randn(ROWS, num_states, channels, kernel - 1).to(dtype)
    state[case.seqs.rows[::2].long()] = torch.nan
    state = state.flatten(0, 1)
    twin = state.clone()
    for conv_bias, activated in ((bias, True), (None, False)):
        weights = weight, conv_bias
        out = CPUStateOps().conv(case.x, ConvWeights(*weights, activated), state, case.seqs)
        near(out, reference.conv(case.x, ConvWeights(*weights, activated), twin, case.seqs), dtype)
        assert torch.equal(state.nan_to_num(), twin.nan_to_num())


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("pieces", "size"), [(1, 1100), (5, 20)])
@pytest.mark.parametrize("gate_first", [True, False])
def test_gates_in_c(pieces: int, size: int, gate_first: bool, dtype: torch.dtype) -> None:
    case = make_case([3, 1], pieces * size, (pieces * size // 2, 1, 1), dtype=dtype)
    weight, x, gate = torch.randn(size).to(dtype), case.x, 9 * case.small
    expected = reference.gated_norm(x, gate, weight, 1e-5, gate_first=gate_first)
    near(CPUStateOps().gated_norm(x, gate, weight, 1e-5, gate_first=gate_first), expected, dtype)
    for by in GATES:
        near(CPUStateOps().gate(x, gate, by), reference.gate(x, gate, by), dtype)


@compiled
@pytest.mark.parametrize("kind", KINDS)
def test_tape_reads_new_rows_and_positions(kind: str) -> None:
    """Check that rows and starts of sequences are read at replay instead of recording."""
    make, run = KINDS[kind]
    case = make([1, 1, 1])
    ops, state = CPUStateOps(), case.state
    with record() as tape:
        out = run(ops, case, state)
    assert tape.complete
    case.seqs.rows.copy_(case.seqs.rows.flip(0).clone())
    case.seqs.positions.copy_(torch.tensor([3, 0, 1]))
    twin = state.clone()
    tape.replay()
    near(out, run(reference, case, twin), torch.float32)
    near(state, twin, torch.float32)
