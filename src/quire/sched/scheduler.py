"""The scheduler: which tokens are computed next, and what the results mean.

There are no phases. A request has tokens, and a number of them is computed; a step gives each request some
of the difference. Decoding, a prompt, a chunk of one, a prefix hit, a preempted request coming back: all
the same subtraction.
"""

import time
from collections import deque
from collections.abc import Iterable

import numpy as np

from quire.data.params import find_repetition
from quire.data.plan import Admission, Finish, FirstRun, Ints, RowLogprobs, StepOutput, StepPlan, StepResult
from quire.data.request import Request
from quire.data.stats import StepStats
from quire.logs import get_logger
from quire.sched.blocks import Block
from quire.sched.kv_manager import KVManager
from quire.sched.queues import LINES, WaitingLine
from quire.sched.running import Running

log = get_logger(__name__)

WARN_INTERVAL_S = 10.0


def choose_victim(running: Running, policy: str) -> int:
    """The row to preempt: of the latest quarter of admissions the one whose recomputation costs least.

    Never the oldest unless it is alone, so that somebody always gets through; under the priority policy
    only rows of the least urgent priority are considered.
    """
    candidates = running.order[1:] if len(running) > 1 else running.order
    if policy == "priority":
        urgency = np.array([running.request(row).priority for row in running.order.tolist()])
        candidates = running.order[urgency == urgency.max()]
    latest = candidates[-max(1, len(candidates) // 4) :]
    return int(latest[np.argmin(running.num_computed[latest])])


class Scheduler:
    def __init__(
        self,
        *,
        kv: KVManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        long_prefill_token_threshold: int = 0,
        policy: str = "fcfs",
        chunked_prefill: bool = True,
        reserve_full_prompt: bool = True,
        watermark: float = 0.0,
    ) -> None:
        self.kv = kv
        self.budget = max_num_batched_tokens
        self.longest_chunk = long_prefill_token_threshold or max_num_batched_tokens
        self.policy = policy
        self.chunked_prefill = chunked_prefill
        self.reserve_full_prompt = reserve_full_prompt
        self.num_watermark_blocks = int(watermark * kv.pool.num_usable)
        self.running = Running(max_num_seqs, max_model_len)
        self.waiting: WaitingLine = LINES[policy]()
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self._released: list[int] = []
        self._admitted: dict[str, FirstRun] = {}
        self._stats = StepStats()
        self._step = 0
        self._next_warning = 0.0
        self._suspects: deque[Request] = deque()
        """Requests of a failed step that have not yet run alone."""

    # ---- requests come and go

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add(self, request: Request) -> None:
        assert request.id not in self.requests, f"request {request.id} is already here"
        request.queued_at = time.monotonic()
        self.requests[request.id] = request
        self.waiting.push(request)

    def abort(self, request_ids: Iterable[str]) -> dict[str, Finish]:
        """End requests from outside. Unknown ids (already finished, say) are passed over."""
        known = [self.requests[id] for id in request_ids if id in self.requests]
        return {request.id: self._finish(request, "abort") for request in known}

    def _finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> Finish:
        if request.row >= 0:
            self._vacate(request.row)
        else:
            self.waiting.remove(request)
        del self.requests[request.id]
        if request in self._suspects:
            self._suspects.remove(request)
        return Finish(reason, stop_reason, request.num_preemptions)

    def _vacate(self, row: int) -> Request:
        self.kv.free(row)
        self._released.append(row)
        return self.running.release(row)

    # ---- before a step

    def plan(self) -> StepPlan:
        """Spend the token budget: on running requests first, then on waiting ones if none had to give way."""
        self._stats = StepStats()
        chunks, new_blocks = self._continue_running()
        block_rows, block_ids = self.kv.grow(self.running.order, new_blocks)
        self._index(self.running.order, chunks)
        admitted = [] if self._stats.num_preempted else self._admit_waiting(self.budget - int(chunks.sum()))
        rows = self.running.order
        num_tokens = np.concatenate([chunks, [chunk for _, chunk in admitted]]).astype(np.int32)
        if not num_tokens.all():
            rows, num_tokens = rows[num_tokens > 0], num_tokens[num_tokens > 0]
        released, self._released = self._released, []
        self._step += 1
        pending = self.running.num_tokens[rows] - self.running.num_computed[rows]
        return StepPlan(
            step=self._step,
            released=released,
            admitted=[admission for admission, _ in admitted],
            block_rows=block_rows,
            block_ids=block_ids,
            rows=rows,
            num_tokens=num_tokens,
            samples=num_tokens == pending,
        )

    def _continue_running(self) -> tuple[Ints, Ints]:
        """Tokens and new blocks for each running row; requests are preempted until the blocks suffice."""
        running, kv = self.running, self.kv
        while True:
            rows = running.order
            chunks = self._share_budget(running.num_tokens[rows] - running.num_computed[rows])
            reach = running.num_computed[rows] + chunks
            new_blocks = np.maximum(-(-reach // kv.block_size) - kv.num_blocks[rows], 0)
            if new_blocks.sum() <= kv.pool.num_free:
                return chunks, new_blocks
            self._preempt(choose_victim(running, self.policy))

    def _share_budget(self, pending: Ints) -> Ints:
        """Decodes first, then prompts in order, each cut to what is left."""
        chunks = np.minimum(pending, self.longest_chunk)
        if chunks.sum() > self.budget:
            order = np.argsort(pending > 1, kind="stable")
            wanted = chunks[order]
            spent_before = np.cumsum(wanted) - wanted
            chunks[order] = np.clip(self.budget - spent_before, 0, wanted)
        return chunks

    def _index(self, rows: Ints, chunks: Ints) -> None:
        """Make blocks findable in the very step that fills them: who shares them reads after the write."""
        if self.kv.share_prefixes:
            num_full = (self.running.num_computed[rows] + chunks) // self.kv.block_size
            self.kv.index(self.running, rows, num_full)

    def _admit_waiting(self, budget: int) -> list[tuple[Admission, int]]:
        """Waiting requests, in order, while there are tokens, rows and blocks; each with its first chunk."""
        if self._suspects:
            return self._admit_suspect(budget)
        admitted: list[tuple[Admission, int]] = []
        promised = self._promised_blocks() if len(self.waiting) else 0
        while budget > 0 and len(self.waiting) and not self.running.full:
            request = self.waiting.peek()
            hits = self.kv.lookup(request)
            num_computed = len(hits) * self.kv.block_size
            pending = len(request.tokens) - num_computed
            chunk = min(pending, self.longest_chunk, budget)
            if chunk < pending and not self.chunked_prefill:
                break
            reach = len(request.tokens) if self.reserve_full_prompt else num_computed + chunk
            needed = self.kv.blocks_for(reach) - len(hits)
            if needed + promised > self.kv.num_takable(hits):
                break
            self.waiting.pop()
            admitted.append((self._admit(request, hits, chunk), chunk))
            promised = self._promised_blocks()
            budget -= chunk
        return admitted

    def _admit_suspect(self, budget: int) -> list[tuple[Admission, int]]:
        """One at a time, and alone, until it has a token of its own."""
        if len(self.running):
            return []
        request = self._suspects[0]
        self.waiting.remove(request)
        hits = self.kv.lookup(request)
        chunk = min(len(request.tokens) - len(hits) * self.kv.block_size, budget)
        return [(self._admit(request, hits, chunk), chunk)]

    def _promised_blocks(self) -> int:
        """Free blocks that running requests will soon take: for their known tokens, and one more each."""
        rows = self.running.order
        if not len(rows):
            return 0
        known = -(-self.running.num_tokens[rows] // self.kv.block_size)
        return int((known - self.kv.num_blocks[rows]).sum()) + len(rows) + self.num_watermark_blocks

    def _admit(self, request: Request, hits: list[Block], chunk: int) -> Admission:
        num_computed = len(hits) * self.kv.block_size
        if not request.has_run:
            request.has_run, request.num_cached = True, num_computed
            self._admitted[request.id] = FirstRun(num_computed, request.queued_at, time.monotonic())
            self._stats.prefix_queries += request.prompt_len if self.kv.may_share(request) else 0
            self._stats.prefix_hits += num_computed
        row = self.running.admit(request, num_computed)
        block_ids = self.kv.admit(row, hits, num_computed + chunk)
        self._index(np.array([row]), np.array([chunk]))
        return Admission(
            row=row,
            request_id=request.id,
            token_ids=request.tokens.copy(),
            prompt_len=request.prompt_len,
            num_computed=num_computed,
            block_ids=block_ids,
            params=request.params,
            seed=request.seed,
            stop_ids=request.held_ids,
        )

    def _preempt(self, row: int) -> None:
        request = self._vacate(row)
        request.num_preemptions += 1
        self.waiting.push_front(request)
        self._stats.num_preempted += 1
        self.num_preemptions += 1
        if time.monotonic() >= self._next_warning:
            self._next_warning = time.monotonic() + WARN_INTERVAL_S
            log.warning(
                "Request %s is preempted by recomputation because there is not enough KV cache space. "
                "This can affect the end-to-end performance. Increase gpu_memory_utilization or "
                "tensor_parallel_size, or decrease max_num_seqs or max_num_batched_tokens. "
                "total_cumulative_preemption_cnt=%d",
                request.id,
                self.num_preemptions,
            )

    # ---- after a step

    def update(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Append what was sampled, end what is done."""
        running = self.running
        stats = self._count(plan)
        prompt_logprobs = self._fresh_prompt_logprobs(result)
        running.num_computed[plan.rows] += plan.num_tokens
        sampled = plan.rows[plan.samples]
        running.tokens[sampled, running.num_tokens[sampled]] = result.token_ids
        running.num_tokens[sampled] += 1
        output = StepOutput(
            request_ids=[running.ids[row] for row in sampled.tolist()],
            token_ids=result.token_ids.tolist(),
            logprobs={running.ids[row]: logprobs for row, logprobs in result.logprobs.items()},
            prompt_logprobs=prompt_logprobs,
            admitted=self._admitted,
            at=time.monotonic(),
            stats=stats,
        )
        self._admitted = {}
        self._end_finished(sampled, result.token_ids, output)
        if self._suspects and len(sampled):
            self._acquit(int(sampled[0]))
        stats.num_running, stats.num_waiting = len(running), len(self.waiting)
        stats.kv_usage = self.kv.pool.usage
        return output

    def _end_finished(self, rows: Ints, token_ids: Ints, output: StepOutput) -> None:
        """Look closely only at rows that may be done."""
        running, length = self.running, self.running.num_tokens[rows]
        suspect = (
            (length >= running.limit[rows]) | (token_ids == running.eos_id[rows]) | running.watched[rows]
        )
        for row in rows[suspect & (length >= running.min_len[rows])].tolist():
            request = running.request(row)
            if (why := self._why_stopped(request)) is not None:
                output.finished[request.id] = self._finish(request, *why)

    def fail(self, plan: StepPlan) -> dict[str, Finish]:
        """The step broke: nothing of it counts. A request that was alone in it ends as an error; several go
        back to the line, and are run one by one, so that only those end that fail by themselves."""
        suspects = [self.running.request(row) for row in plan.rows.tolist()]
        for row in self.running.order[::-1].tolist():
            self.kv.forget(row, int(self.running.num_computed[row]))
            self.waiting.push_front(self._vacate(row))
        if len(suspects) == 1:
            return {suspects[0].id: self._finish(suspects[0], "error")}
        self._suspects.extend(request for request in suspects if request not in self._suspects)
        return {}

    def _acquit(self, row: int) -> None:
        """The first suspect has computed a token alone. It makes way for the next."""
        if self.running.requests[row] is self._suspects[0]:
            self._suspects.popleft()
            self.waiting.push_front(self._vacate(row))

    def _why_stopped(self, request: Request) -> tuple[str, int | str | None] | None:
        params, length = request.params, self.running.num_tokens[request.row]
        tokens = self.running.tokens[request.row, :length]
        token_id = int(tokens[-1])
        if token_id == request.eos_id:
            return "stop", None
        if params.stop_token_ids and token_id in params.stop_token_ids:
            return "stop", token_id
        if length >= request.limit:
            return "length", None
        repetition = params.repetition_detection
        if repetition is not None and find_repetition(tokens[request.prompt_len :].tolist(), repetition):
            return "repetition", "repetition_detected"
        return None

    def _fresh_prompt_logprobs(self, result: StepResult) -> dict[str, list[RowLogprobs]]:
        """By request id, without the positions that a preempted request computes for the second time."""
        fresh = {}
        for row, positions in result.prompt_logprobs.items():
            request = self.running.request(row)
            new = positions[max(request.num_prompt_logprobs - int(self.running.num_computed[row]), 0) :]
            request.num_prompt_logprobs += len(new)
            fresh[request.id] = new
        return fresh

    def _count(self, plan: StepPlan) -> StepStats:
        stats = self._stats
        sampled = plan.rows[plan.samples]
        first = sampled[self.running.prompt_len[sampled] == self.running.num_tokens[sampled]]
        stats.num_prompt_tokens = int(self.running.prompt_len[first].sum())
        stats.num_cached_tokens = int(self.running.num_cached[first].sum())
        stats.num_computed_tokens = plan.total_tokens
        stats.num_sampled_tokens = int(plan.samples.sum())
        return stats

    def reset_prefix_cache(self) -> bool:
        return self.kv.pool.reset()
