"""Tests of the CPU device over thousands of steps: decodes use tapes, and memory does not grow."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import make_tiny

from quire.configure import configure
from quire.data.params import SamplingParams
from quire.data.step_plan import Admission, StepPlan
from quire.kernels.cpu import native
from quire.kernels.cpu.tape import Tape
from quire.worker import cpu as module
from quire.worker.cpu import CpuDevice
from quire.worker.worker import Worker

pytestmark = pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")

ROWS, TAPED, BLOCK, LONGEST = 20, 12, 4, 256
WIDTH = LONGEST // BLOCK
NONE = np.empty(0, np.int32)


class Traffic:
    """Random prompts in chunks of all sizes and decodes with all numbers of rows."""

    def __init__(self, worker: Worker, seed: int) -> None:
        self.worker = worker
        self.rng = np.random.default_rng(seed)
        self.lens = np.zeros(ROWS, np.int32)
        """Tokens by row; all but the last are computed."""
        self.num_steps = 0

    def run(
        self, counts: dict[int, int], samples: bool = True, admitted: list[Admission] | None = None
    ) -> None:
        self.num_steps += 1
        plan = StepPlan(
            step=self.num_steps,
            released=[new.row for new in admitted or []],
            admitted=admitted or [],
            block_rows=NONE,
            block_ids=NONE,
            rows=np.array(list(counts), np.int32),
            num_tokens=np.array(list(counts.values()), np.int32),
            samples=np.full(len(counts), samples),
        )
        assert len(self.worker.submit(plan).wait().token_ids) == samples * len(counts)

    def prompt(self, rows: list[int]) -> None:
        """Admit new requests to these rows in two chunks, of which the second may be a single token."""
        lens = {row: int(self.rng.integers(2, 60)) for row in rows}
        first = {row: int(self.rng.integers(1, length)) for row, length in lens.items()}
        new = [
            Admission(
                row=row,
                request_id=str(row),
                token_ids=self.rng.integers(3, 90, length).tolist(),
                prompt_len=length,
                num_computed=0,
                block_ids=[list(range(1 + row * WIDTH, 1 + (row + 1) * WIDTH))],
                params=SamplingParams(temperature=float(row % 2), top_k=row % 3),
                seed=row,
            )
            for row, length in lens.items()
        ]
        self.run(first, samples=False, admitted=new)
        self.run({row: lens[row] - first[row] for row in rows})
        self.lens[rows] = [lens[row] + 1 for row in rows]

    def decode(self, num_rows: int) -> None:
        rows = self.rng.permutation(ROWS)[:num_rows].tolist()
        ending = [row for row in rows if not 0 < self.lens[row] < LONGEST - 1]
        if ending:
            self.prompt(ending)
        self.run(dict.fromkeys(rows, 1))
        self.lens[rows] += 1

    def mixed(self, num_steps: int) -> None:
        end = self.num_steps + num_steps
        while self.num_steps < end:
            if self.rng.random() < 0.3:
                self.prompt(self.rng.permutation(ROWS)[: self.rng.integers(1, ROWS)].tolist())
            self.decode(int(self.rng.integers(1, ROWS + 1)))


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setattr(module, "MAX_TAPED", TAPED)
    path, _ = make_tiny("llama", tmp_path)
    settings: dict[str, Any] = {
        "model": str(path),
        "dtype": "float32",
        "block_size": BLOCK,
        "max_num_seqs": ROWS,
    }
    settings |= {"num_gpu_blocks_override": ROWS * WIDTH + 1, "use_tqdm_on_load": False}
    made = Worker(configure(settings | {"max_model_len": LONGEST}))
    made.start()
    return made


def test_thousand_steps_keep_tapes_and_memory_constant(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check for evicted decode tapes, tapes that are never reused, and outputs of unused tapes."""
    played: list[Tape] = []
    replay = Tape.replay
    monkeypatch.setattr(Tape, "replay", lambda tape: (played.append(tape), replay(tape)))
    assert worker._runner is not None and isinstance(host := worker._runner.device, CpuDevice)
    traffic = Traffic(worker, seed=1)

    def memory() -> tuple[int, ...]:
        sheets = host._taped_buffers.cache_info().currsize, host._eager_buffers.cache_info().currsize
        return (*sheets, len(host._tapes), host._tapes.pool.num_bytes)

    for num_rows in range(1, TAPED + 1):
        for _ in range(2):
            traffic.decode(num_rows)
    traffic.mixed(200)
    before = memory()
    traffic.mixed(1000)
    assert memory() == before and before[:3] == (TAPED, module._MAX_BUFFERS, TAPED)
    for num_rows in range(1, ROWS + 1):
        played.clear()
        traffic.decode(num_rows)
        assert len(played) == (num_rows <= TAPED), num_rows


def test_tapes_share_the_memory_of_their_outputs(worker: Worker) -> None:
    """Check 64 batch sizes, whose logits would take more memory than the weights."""
    assert worker._runner is not None and isinstance(host := worker._runner.device, CpuDevice)
    traffic = Traffic(worker, seed=2)
    for _ in range(2):
        traffic.decode(TAPED)
    largest = host._tapes.pool.num_bytes
    for num_rows in range(TAPED - 1, 0, -1):
        for _ in range(2):
            traffic.decode(num_rows)
    assert host._tapes.pool.num_bytes < 1.5 * largest
