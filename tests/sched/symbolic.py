"""A worker without a model: its cache holds, for every token, a fingerprint of the whole prefix up to it.

Computing a token reads the fingerprint before it through the block table, so a wrong block, a stale prefix
or a forgotten token shows at once; the next token is a function of the fingerprint, so outputs depend on
nothing else.
"""

from dataclasses import dataclass, field

import numpy as np

from quire.data.params import SamplingParams
from quire.data.plan import StepOutput, StepPlan, StepResult
from quire.data.request import Request
from quire.sched.kv_manager import KVManager
from quire.sched.scheduler import Scheduler

VOCAB = 97
START = 0x9E3779B97F4A7C15


def extend(fingerprint: int, token_id: int) -> int:
    return ((fingerprint ^ (token_id + 1)) * 0x100000001B3 + 0x51ED270B) % 2**64


def fingerprint_of(token_ids: list[int]) -> int:
    fingerprint = START
    for token_id in token_ids:
        fingerprint = extend(fingerprint, token_id)
    return fingerprint


def continuation(prompt: list[int], count: int) -> list[int]:
    """What the symbolic model says after a prompt, computed without any cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(fingerprint_of(tokens) % VOCAB)
    return tokens[len(prompt) :]


@dataclass
class Row:
    tokens: list[int]
    num_computed: int
    blocks: list[int]


@dataclass
class SymbolicWorker:
    num_blocks: int
    block_size: int
    rows: dict[int, Row] = field(default_factory=dict)
    num_computed: int = 0

    def __post_init__(self) -> None:
        self.cache: list[int | None] = [None] * (self.num_blocks * self.block_size)

    def run(self, plan: StepPlan) -> StepResult:
        for row in plan.released:
            del self.rows[row]
        for new in plan.admitted:
            assert new.row not in self.rows, f"row {new.row} given to two requests"
            self.rows[new.row] = Row(list(new.token_ids), new.num_computed, list(new.block_ids))
        for row, block in zip(plan.block_rows.tolist(), plan.block_ids.tolist(), strict=True):
            self.rows[row].blocks.append(block)
        assert len(set(plan.rows.tolist())) == len(plan.rows), "a row twice in one plan"
        sampled = []
        for row, count, samples in zip(plan.rows.tolist(), plan.num_tokens, plan.samples, strict=True):
            fingerprint = self._compute(self.rows[row], int(count))
            assert samples == (self.rows[row].num_computed == len(self.rows[row].tokens))
            if samples:
                sampled.append(fingerprint % VOCAB)
                self.rows[row].tokens.append(sampled[-1])
        return StepResult(token_ids=np.array(sampled, np.int32))

    def _slot(self, row: Row, position: int) -> int:
        block = row.blocks[position // self.block_size]
        assert block != 0, "block 0 was handed out"
        return block * self.block_size + position % self.block_size

    def _compute(self, row: Row, count: int) -> int:
        before = START
        if row.num_computed:
            cached = self.cache[self._slot(row, row.num_computed - 1)]
            expected = fingerprint_of(row.tokens[: row.num_computed])
            assert cached == expected, f"the cache does not hold the prefix of {row}"
            before = expected
        for position in range(row.num_computed, row.num_computed + count):
            before = extend(before, row.tokens[position])
            self.cache[self._slot(row, position)] = before
        row.num_computed += count
        self.num_computed += count
        return before


class Engine:
    """Scheduler and symbolic worker, stepped by hand, with the invariants checked after every step."""

    def __init__(
        self, *, num_blocks: int = 64, block_size: int = 4, share: bool = True, **limits: object
    ) -> None:
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 4096} | limits
        self.kv = KVManager(
            num_blocks=num_blocks,
            block_size=block_size,
            max_rows=limits["max_num_seqs"],
            share_prefixes=share,
        )
        self.scheduler = Scheduler(kv=self.kv, **limits)
        self.worker = SymbolicWorker(num_blocks, block_size)
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.plans: list[StepPlan] = []
        self.steps: list[StepOutput] = []

    def add(self, id: str, prompt: list[int], count: int = 4, **fields: object) -> Request:
        params = fields.pop("params", None) or SamplingParams(max_tokens=count)
        request = Request(
            id=id,
            tokens=list(prompt),
            params=params,
            prompt_len=len(prompt),
            limit=len(prompt) + count,
            seed=0,
            **fields,
        )
        self.scheduler.add(request)
        self.outputs[id] = []
        return request

    def step(self) -> StepOutput:
        plan = self.scheduler.plan()
        self.check(plan)
        output = self.scheduler.update(plan, self.worker.run(plan))
        for id, token_id in zip(output.request_ids, output.token_ids, strict=True):
            self.outputs[id].append(token_id)
        self.reasons |= {id: finish.reason for id, finish in output.finished.items()}
        self.plans.append(plan)
        self.steps.append(output)
        return output

    def run(self, max_steps: int = 5000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"requests still unfinished after {max_steps} steps")

    def check(self, plan: StepPlan) -> None:
        """What must hold in every step."""
        scheduler, kv = self.scheduler, self.kv
        assert plan.total_tokens <= scheduler.budget
        assert len(scheduler.running) <= len(scheduler.running.requests)
        users: dict[int, int] = {}
        for row in scheduler.running.order.tolist():
            for block in kv.tables[row]:
                users[block.id] = users.get(block.id, 0) + 1
            reach = int(scheduler.running.num_computed[row])
            held = len(kv.tables[row]) * kv.block_size
            planned = dict(zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True)).get(row, 0)
            assert held >= reach + planned, "tokens without a block"
            assert held - (reach + planned) < kv.block_size, "more than one partly filled block"
        for block in kv.pool.blocks[1:]:
            assert block.num_users == users.get(block.id, 0), f"{block} has {users.get(block.id, 0)} users"
        assert kv.pool.num_free == kv.pool.num_usable - len(users)
