"""Tests of Rows and prepare against a reference that goes token by token."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from symbolic import LAYOUTS, Engine, Row, SymbolicWorker

from quire.attention.batch import Batch
from quire.data.params import SamplingParams
from quire.data.step_plan import Admission, StepPlan, StepResult
from quire.sampling.rows import SamplingRows
from quire.worker.device import NewTokens, StepFeatures
from quire.worker.input_buffers import StepBuffers, bytes_of, tensors
from quire.worker.rows import Rows

CPU = torch.device("cpu")
MAX_LEN = 96


def make_rows(block_size: int, num_groups: int = 1) -> Rows:
    sampling = SamplingRows(8, 97, CPU)
    sizes = {"max_rows": 8, "max_len": MAX_LEN, "block_size": block_size, "num_groups": num_groups}
    return Rows(**sizes, sampling=sampling)


def prepare(plan: StepPlan, all_rows: Rows) -> Batch:
    features = StepFeatures(None, None, 0)
    sizes = features.sizes(plan, len(all_rows.block_tables))
    memory = torch.zeros(bytes_of(sizes), dtype=torch.uint8)
    buffers = StepBuffers(memory, sizes)
    buffers.write(plan, all_rows)
    tables = torch.from_numpy(all_rows.block_tables)
    return features.batch(tensors(memory, sizes), tables, plan.num_tokens, buffers.arrays["seq_lens"])


class ComparingWorker(SymbolicWorker):
    """A symbolic worker that compares the real rows and batch with its own in every step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.all_rows = make_rows(self.block_size, num_groups=len(self.layout.groups))
        self.most_blocks_at_once = 0

    def run(self, plan: StepPlan) -> StepResult:
        self.all_rows.apply(plan)
        batch = prepare(plan, self.all_rows)
        before = {row: state.num_computed for row, state in self.rows.items()}
        before |= {new.row: new.num_computed for new in plan.admitted}
        result = super().run(plan)
        self.check_batch(plan, batch, before)
        self.all_rows.append_sampled(*NewTokens.of(plan), result.token_ids)
        self.all_rows.advance(plan)
        for row, state in self.rows.items():
            self.check_row(row, state)
        counts = np.bincount(plan.block_rows) if len(plan.block_rows) else [0]
        self.most_blocks_at_once = max(self.most_blocks_at_once, max(counts))
        return result

    def check_row(self, row: int, state: Row) -> None:
        all_rows = self.all_rows
        assert all_rows.num_computed[row] == state.num_computed
        assert all_rows.tokens[row, : all_rows.num_tokens[row]].tolist() == state.tokens
        assert all_rows.block_tables[:, row, : all_rows.num_blocks[row]].tolist() == state.blocks

    def check_batch(self, plan: StepPlan, batch: Batch, before: dict[int, int]) -> None:
        token_ids, positions, starts, logit_tokens = [], [], [0], []
        places: list[list[int]] = [[] for _ in batch.groups]
        for at, row in enumerate(plan.rows.tolist()):
            state, first, count = self.rows[row], before[row], int(plan.num_tokens[at])
            for position in range(first, first + count):
                token_ids.append(state.tokens[position])
                positions.append(position)
                for slots, blocks in zip(places, state.blocks, strict=True):
                    block = blocks[position // self.block_size]
                    slots.append(block * self.block_size + position % self.block_size)
            starts.append(len(token_ids))
            if plan.samples[at]:
                logit_tokens.append(len(token_ids) - 1)
            needed = -(-(first + count) // self.block_size)
            for group, blocks in zip(batch.groups, state.blocks, strict=True):
                assert group.block_tables[row, :needed].tolist() == blocks[:needed]
            assert batch.seq_lens[at] == batch.seq_lens_host[at] == first + count
            assert batch.query_lens_host[at] == count
        assert batch.token_ids.tolist() == token_ids and batch.positions.tolist() == positions
        assert [group.slots.tolist() for group in batch.groups] == places
        assert batch.query_starts.tolist() == starts
        assert batch.logit_tokens.tolist() == logit_tokens
        assert batch.rows.tolist() == plan.rows.tolist()


def side_by_side(block_size: int, **settings: Any) -> tuple[Engine, ComparingWorker]:
    engine = Engine(block_size=block_size, max_model_len=MAX_LEN, **settings)
    return engine, engine.use(ComparingWorker)


requests = st.tuples(st.integers(1, 60), st.integers(1, 20), st.integers(0, 5))
"""Prompt length, output length, and the step of the arrival."""


@settings(max_examples=40)
@given(
    st.lists(requests, min_size=1, max_size=10),
    st.sampled_from([1, 2, 4, 16]),
    st.sampled_from([8, 13, 32]),
    st.data(),
)
def test_rows_and_batches_match_the_reference(
    wanted: list[tuple[int, int, int]], block_size: int, budget: int, data: Any
) -> None:
    """Check chunks, prefix hits, preemptions and reused rows in every step."""
    layout = data.draw(st.sampled_from([*LAYOUTS]))
    least = LAYOUTS[layout].blocks_of(80, block_size=block_size, max_chunk=budget) + 1
    num_blocks = data.draw(st.integers(least, least + 120))
    limits = {"num_blocks": num_blocks, "max_num_batched_tokens": budget, "layout": layout}
    engine, _ = side_by_side(block_size, **limits)
    number = 0
    for tick in range(6):
        for length, count, arrival in wanted:
            if arrival == tick:
                prompt = [(i // 5 + length % 3) % 97 for i in range(length)]
                engine.add(str(number), prompt, count)
                number += 1
        if engine.scheduler.has_work:
            engine.step()
    engine.run()


def test_chunk_may_add_several_blocks() -> None:
    engine, worker = side_by_side(2, num_blocks=200, max_num_batched_tokens=16)
    for id, length in (("a", 50), ("b", 40)):
        engine.add(id, list(range(length)), 5)
    engine.run()
    assert worker.most_blocks_at_once > 1


def test_blocks_are_appended_in_order_to_each_row() -> None:
    all_rows = make_rows(4)
    all_rows.num_blocks[[2, 5]] = 1, 3
    all_rows._append_blocks(
        np.array([5, 5, 2, 2, 2, 7], np.int32), np.array([[10, 11, 20, 21, 22, 30]], np.int32)
    )
    assert all_rows.num_blocks[[2, 5, 7]].tolist() == [4, 5, 1]
    assert all_rows.block_tables[0, 5, 3:5].tolist() == [10, 11]
    assert all_rows.block_tables[0, 2, 1:4].tolist() == [20, 21, 22] and all_rows.block_tables[0, 7, 0] == 30


def test_row_zero_can_grow_first() -> None:
    """Check that the marker of the first group is not taken for row 0."""
    all_rows = make_rows(4)
    all_rows._append_blocks(np.array([0, 0, 1], np.int32), np.array([[7, 8, 9]], np.int32))
    assert all_rows.block_tables[0, 0, :2].tolist() == [7, 8] and all_rows.block_tables[0, 1, 0] == 9


def admission(row: int, token_ids: list[int], block_ids: list[int], **fields: Any) -> Admission:
    rest: dict[str, Any] = {"prompt_len": len(token_ids), "num_computed": 0, "params": SamplingParams()}
    named = {"row": row, "request_id": str(row), "token_ids": token_ids, "block_ids": [block_ids], "seed": 0}
    return Admission(**(rest | named | fields))


def plan_of(admitted: list[Admission], released: tuple[int, ...] = ()) -> StepPlan:
    none = np.empty(0, np.int32)
    rows = np.array([new.row for new in admitted], np.int32)
    counts = np.array([len(new.token_ids) - new.num_computed for new in admitted], np.int32)
    return StepPlan(1, list(released), admitted, none, none, rows, counts, np.ones(len(rows), np.bool_))


def test_reused_row_shows_nothing_of_a_longer_request() -> None:
    all_rows = make_rows(4)
    all_rows.apply(plan_of([admission(3, list(range(30)), list(range(1, 9)))]))
    plan = plan_of([admission(3, [50, 51], [40])], released=(3,))
    all_rows.apply(plan)
    batch = prepare(plan, all_rows)
    assert batch.token_ids.tolist() == [50, 51] and batch.block_tables[3, 0] == 40
    assert all_rows.num_tokens[3] == 2 and all_rows.num_blocks[3] == 1


def test_cached_prefix_is_not_computed_again() -> None:
    all_rows = make_rows(4)
    plan = plan_of([admission(1, list(range(60, 70)), [5, 6, 7], num_computed=8)])
    all_rows.apply(plan)
    batch = prepare(plan, all_rows)
    assert batch.token_ids.tolist() == [68, 69] and batch.positions.tolist() == [8, 9]
    assert batch.slots.tolist() == [28, 29] and batch.seq_lens.tolist() == [10]


@pytest.mark.parametrize("name", ["token_ids", "positions", "slots", "logit_tokens"])
def test_indices_are_int64(name: str) -> None:
    """Check that slots of a large cache do not overflow 32 bits once multiplied."""
    all_rows = make_rows(16)
    plan = plan_of([admission(0, [1, 2], [2**31 - 1])])
    all_rows.apply(plan)
    batch = prepare(plan, all_rows)
    assert getattr(batch, name).dtype == torch.int64
    assert batch.slots.tolist() == [(2**31 - 1) * 16, (2**31 - 1) * 16 + 1]
