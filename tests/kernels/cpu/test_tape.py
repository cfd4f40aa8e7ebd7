"""Tests of tapes: results match eager execution, and recording is refused where torch computes."""

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import BLOCK_SIZE as BLOCK
from oracle import make_batch
from preloaded import Preloaded
from torch import Tensor

from quire.attention.backend import AttentionSpec
from quire.attention.batch import Batch
from quire.attention.cpu_attn import CPUAttention
from quire.checkpoint.facts import RopeFacts
from quire.kernels.cpu import native
from quire.kernels.cpu.ops import CPUOps
from quire.kernels.cpu.tape import Pool, Tapes, record
from quire.kernels.ops import HeadEntry
from quire.layers.attention import PagedAttention
from quire.layers.rope import Rope
from quire.layers.scope import Scope

pytestmark = pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")
OPS = CPUOps()
WEIGHT = torch.randn(24, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def chain(x: Tensor, between: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """Run kernels whose results are freed when the next one but one runs."""
    for _ in range(4):
        x = OPS.norm(x, WEIGHT, 1e-5)
        x = between(OPS.gated(x.view(-1, 48), "silu")).view(-1, 24)
    return x


def test_replay_with_new_inputs() -> None:
    """Check that addresses are recorded instead of values, and that calls are complete and in order."""
    x = torch.randn(32, 24)
    with record() as tape:
        out = chain(x)
    assert tape.complete and len(tape) == 8
    for _ in range(3):
        x.copy_(torch.randn(32, 24))
        tape.replay()
        assert torch.equal(out, chain(x))


def test_tape_memory_is_reused_only_within_the_tape() -> None:
    """Check that later recordings do not overwrite the result, nor other code the scratch."""
    pool, x = Pool(), torch.randn(32, 24)
    with record(pool) as tape:
        out = chain(x)
    num_blocks = len(pool.blocks)
    assert num_blocks <= 4
    expected = out.clone()
    x.neg_()
    with record(pool) as other:
        second = chain(x)
    assert len(pool.blocks) <= num_blocks + 1 and torch.equal(out, expected)
    noise = [torch.full((32, n), torch.nan) for n in range(1, 60)]
    x.neg_()
    tape.replay()
    assert torch.equal(out, expected) and not torch.equal(second, out)
    x.neg_()
    other.replay()
    assert torch.equal(second, chain(x)) and all(tensor.isnan().all() for tensor in noise)


def test_inputs_of_a_recorded_kernel_stay_alive() -> None:
    x, weight = torch.randn(32, 24), torch.randn(24)
    expected = OPS.norm(x, weight, 1e-5)
    with record() as tape:
        out = OPS.norm(x, weight, 1e-5)
    del weight
    gc.collect()
    noise = [torch.full((24,), torch.nan) for _ in range(50)]
    tape.replay()
    assert torch.equal(out, expected) and noise


@pytest.mark.parametrize(
    ("between", "name"),
    [
        (lambda x: x + 1, "aten.add.Tensor"),
        (lambda x: x[torch.arange(len(x))], "aten.arange.default"),
        (lambda x: x if x.sum().item() > 1e9 else x.contiguous(), "aten.sum.default"),
        (lambda x: x.t().contiguous().t().contiguous(), "aten.contiguous.default"),
        (lambda x: x.bfloat16().float(), "aten.to.dtype"),
    ],
)
def test_recording_with_a_torch_operation_is_refused_and_correct(
    between: Callable[[Tensor], Tensor], name: str
) -> None:
    """Check operations that a tape would omit."""
    x, tapes = torch.randn(32, 24), Tapes()
    with record() as tape:
        chain(x, between)
    assert not tape.complete and tape.refused == name
    for _ in range(4):
        x.copy_(torch.randn(32, 24))
        assert torch.equal(tapes.run("key", lambda: chain(x, between)), chain(x, between))


def test_failure_ends_the_recording() -> None:
    with pytest.raises(ValueError, match="broken"), record():
        raise ValueError("broken")
    assert native.recording() is None


def test_recording_imports_no_modules(preloaded: Preloaded, tmp_path: Path) -> None:
    """Check that the dispatch mode does not import torch's compiler."""
    code = (
        "import sys, torch; from quire.kernels.cpu.ops import CPUOps\n"
        "from quire.kernels.cpu.tape import record\n"
        "x, before = torch.randn(2, 8), set(sys.modules)\n"
        "assert 'torch._dynamo' not in before\n"
        "with torch.inference_mode(), record() as tape: CPUOps().gated(x, 'silu')\n"
        "assert tape.complete; print(*sorted(set(sys.modules) - before))"
    )
    log = tmp_path / "log"
    assert preloaded.run_code(["-c", code], environment=os.environ, log=log).wait(300) == 0, log.read_text()
    assert log.read_text().split() == []


class Decoder:
    """Two attention layers, each with a table in place of a projection."""

    def __init__(self, num_seqs: int, max_len: int) -> None:
        torch.manual_seed(0)
        spec = AttentionSpec(4, 2, 16, torch.float32)
        scope = Scope(torch.float32, torch.device("cpu"), CPUAttention(), max_len, ops=OPS)
        rope = Rope(RopeFacts(dim=16), scope)
        self.tables = torch.randn(2, 50, 8 * 16)
        self.weight = torch.randn(4 * 16)
        self.layers = [PagedAttention(spec, rope, scope) for _ in range(2)]
        width = -(-max_len // BLOCK)
        for layer in self.layers:
            layer.bind(*torch.zeros(2, num_seqs * width, BLOCK, 2, 16))
        blocks = np.random.default_rng(0).permutation(num_seqs * width)
        self.batch = make_batch(
            [([0], max_len - 1)] * num_seqs, blocks.reshape(num_seqs, width).tolist(), BLOCK
        )
        self.batch.rows.copy_(torch.randperm(num_seqs))

    def fill(self, ids: list[int], position: int) -> None:
        """Write the next step's inputs: everything changes except the addresses."""
        batch = self.batch
        batch.token_ids.copy_(torch.tensor(ids))
        batch.positions.fill_(position)
        batch.seq_lens.fill_(position + 1)
        batch.seq_lens_host[:] = position + 1
        tables = batch.block_tables[batch.rows.long()]
        batch.slots.copy_(tables[:, position // BLOCK].long() * BLOCK + position % BLOCK)

    def forward(self) -> Tensor:
        def rotate_and_write(qkv: Tensor, entry: HeadEntry, batch: Batch) -> Tensor:
            return OPS.rotate_and_write(qkv, entry)

        one, two = (
            layer(OPS.embed(self.batch.token_ids, table), rotate_and_write, self.batch)
            for layer, table in zip(self.layers, self.tables, strict=True)
        )
        return OPS.add_norm(one, two, self.weight, 1e-5)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("num_seqs", [1, 5])
def test_replayed_decodes_from_the_first_token_on(num_seqs: int, threads: int) -> None:
    """Check that lengths, tables and scratch sizes are not those of the recorded step.

    The sequences grow over several ranges of keys, first by one token and then by more, whose keys stay
    zeros. The number of threads grows too.
    """
    before, max_len = torch.get_num_threads(), 600
    eager, taped, tapes = Decoder(num_seqs, max_len), Decoder(num_seqs, max_len), Tapes()
    rng = np.random.default_rng(0)
    try:
        for position in (*range(20), *range(20, max_len, 19), max_len - 1):
            torch.set_num_threads(threads if position < 5 else 4)
            ids = rng.integers(50, size=num_seqs).tolist()
            eager.fill(ids, position)
            taped.fill(ids, position)
            assert torch.equal(tapes.run("decode", taped.forward), eager.forward()), position
    finally:
        torch.set_num_threads(before)
