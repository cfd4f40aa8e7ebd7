"""States in torch: chunks against single tokens. In C: as in torch, any lengths and either type, on tape."""

import numpy as np
import pytest
import torch
from state_cases import LENS, ROWS, Case, make_case, run_select, select_case
from torch import Tensor

from quire.kernels.cpu import native
from quire.kernels.cpu.ssm import CPUStateOps, HalfStateOps
from quire.kernels.cpu.tape import record
from quire.kernels.reference.ssm import GATES, SSMSequences, StateOps, StateReference, choose

theirs = StateReference()
compiled = pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")
SCAN, DELTA = (4, 16, 24, 2), (4, 20, 40, 2)
"""heads, then both dimensions of the state, then groups or heads of keys"""


def scan_case(lens: list[int], dtype: torch.dtype = torch.float32) -> Case:
    heads, dim, size, groups = SCAN
    return make_case(lens, heads * dim + 2 * groups * size, (heads, dim, size), dtype=dtype)


def delta_case(lens: list[int], dtype: torch.dtype = torch.float32) -> Case:
    heads, key_dim, dim, key_heads = DELTA
    return make_case(lens, 2 * key_heads * key_dim + heads * dim, (heads, key_dim, dim), dtype=dtype)


def run_scan(ops: StateOps, case: Case, state: Tensor) -> Tensor:
    return ops.scan(
        case.x, case.small[:, 1 : 1 + SCAN[0]], case.rates, case.skip, state, case.seqs, limits=(0.2, 0.9)
    )


def run_delta(ops: StateOps, case: Case, state: Tensor) -> Tensor:
    return ops.delta(case.x, *case.small.chunk(2, 1), case.rates, state, case.seqs)


KINDS = {
    "scan": (scan_case, run_scan),
    "delta": (delta_case, run_delta),
    "select": (select_case, run_select),
}


def near(a: Tensor, b: Tensor, dtype: torch.dtype) -> None:
    tolerance = 1e-4 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(a.float(), b.float(), atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_equal_one_token_after_the_other(kind: str) -> None:
    """A decay from the wrong token, a state lost between two chunks."""
    make, run = KINDS[kind]
    case = make([130])
    state, twin = case.state, case.state.clone()
    whole, pieces = run(theirs, case, state), []
    for t in range(130):
        one = SSMSequences(
            torch.tensor([0, 1]), case.seqs.rows, case.seqs.positions[t : t + 1], np.ones(1, np.int32)
        )
        token = case._replace(seqs=one, x=case.x[t : t + 1], small=case.small[t : t + 1])
        pieces.append(run(theirs, token, twin))
    near(whole, torch.cat(pieces), torch.float32)
    near(state, twin, torch.float32)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize("kind", KINDS)
def test_states_in_c(kind: str, lens: str, dtype: torch.dtype) -> None:
    make, run = KINDS[kind]
    case = make(LENS[lens], dtype)
    twin = case.state.clone()
    near(run(CPUStateOps(), case, case.state), run(theirs, case, twin), dtype)
    near(case.state, twin, dtype)


@compiled
@pytest.mark.parametrize("kind", KINDS)
def test_float16_widened(kind: str) -> None:
    """Rows that C reads by another stride."""
    make, run = KINDS[kind]
    case = make(LENS["mixed"], torch.float16)
    twin, ops = case.state.clone(), choose(torch.device("cpu"), torch.float16)
    assert isinstance(ops, HalfStateOps)
    near(run(ops, case, case.state), run(theirs, case, twin), torch.float16)
    near(case.state, twin, torch.float32)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lens", LENS)
def test_conv_in_c(lens: str, dtype: torch.dtype) -> None:
    """A window that reaches into another sequence, a state that a starting sequence should not see."""
    channels, kernel = 70, 4
    case = make_case(LENS[lens], channels, (2, 1, 1), dtype=dtype)
    weight, bias = torch.randn(channels, kernel).to(dtype), torch.randn(channels).to(dtype)
    state = torch.randn(ROWS, channels, kernel - 1).to(dtype)
    state[case.seqs.rows[::2].long()] = torch.nan
    twin = state.clone()
    for given, activated in ((bias, True), (None, False)):
        asked = weight, given
        out = CPUStateOps().conv(case.x, *asked, state, case.seqs, activated=activated)
        near(out, theirs.conv(case.x, *asked, twin, case.seqs, activated=activated), dtype)
        assert torch.equal(state.nan_to_num(), twin.nan_to_num())


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("pieces", "size"), [(1, 1100), (5, 20)])
@pytest.mark.parametrize("gate_first", [True, False])
def test_gates_in_c(pieces: int, size: int, gate_first: bool, dtype: torch.dtype) -> None:
    case = make_case([3, 1], pieces * size, (pieces * size // 2, 1, 1), dtype=dtype)
    weight, x, gate = torch.randn(size).to(dtype), case.x, 9 * case.small
    expected = theirs.gated_norm(x, gate, weight, 1e-5, gate_first=gate_first)
    near(CPUStateOps().gated_norm(x, gate, weight, 1e-5, gate_first=gate_first), expected, dtype)
    for by in GATES:
        near(CPUStateOps().gate(x, gate, by), theirs.gate(x, gate, by), dtype)


@compiled
@pytest.mark.parametrize("kind", KINDS)
def test_a_tape_reads_new_rows_and_positions(kind: str) -> None:
    """A row, or that a sequence starts, read when the tape was made instead of when it is played."""
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
    near(out, run(theirs, case, twin), torch.float32)
    near(state, twin, torch.float32)
