"""Admission: who waits for a row, and who is let in."""

import time

import numpy as np

from quire.data.plan import Admission, FirstRun
from quire.data.request import Request
from quire.sched.constraints import Constraints
from quire.sched.in_flight import Notes
from quire.sched.kv_manager import Hit, KVManager
from quire.sched.limits import Limits
from quire.sched.queues import LINES, WaitingLine
from quire.sched.running import Running
from quire.sched.trial import Trial


class Admitter:
    """The requests without a row, and the choice of those that get one."""

    def __init__(
        self,
        *,
        kv: KVManager,
        running: Running,
        limits: Limits,
        trial: Trial,
        constraints: Constraints,
        policy: str,
        chunked_prefill: bool,
        reserve_full_prompt: bool,
        watermark: float,
    ) -> None:
        self.kv = kv
        self.running = running
        self.limits = limits
        self.trial = trial
        self.constraints = constraints
        self.chunked_prefill = chunked_prefill
        self.reserve_full_prompt = reserve_full_prompt
        self.num_watermark_blocks = int(watermark * kv.pool.num_usable)
        self.waiting: WaitingLine = LINES[policy]()

    def admit(self, budget: int, notes: Notes) -> list[tuple[Admission, int]]:
        """Waiting requests, in order, while there are tokens, rows and blocks; each with its first chunk. Who
        waits for something else is passed by, and keeps its place."""
        if self.trial:
            return self._admit_suspect(notes)
        admitted: list[tuple[Admission, int]] = []
        passed: list[Request] = []
        while budget > 0 and len(self.waiting) and len(self.running) < self.limits.max_rows:
            request = self.waiting.peek()
            if self.constraints.holds(request):
                passed.append(self.waiting.pop())
                continue
            hit = self.kv.lookup(request)
            pending = len(request.tokens) - hit.num_tokens
            chunk = min(pending, self.limits.max_chunk, budget)
            if chunk < pending and not self._may_split(pending):
                break
            reach = len(request.tokens) if self.reserve_full_prompt else hit.num_tokens + chunk
            if not self.kv.fits(hit, reach, self.running, spare=self.num_watermark_blocks):
                break
            self.waiting.pop()
            admitted.append((self._admit(request, hit, chunk, notes), chunk))
            budget -= chunk
        for request in reversed(passed):
            self.waiting.push_front(request)
        return admitted

    def _may_split(self, num_tokens: int) -> bool:
        """Without chunked prefill a request waits for a step with room for all of it. If none can have that
        it comes in pieces: a preempted one brings its output along."""
        return self.chunked_prefill or num_tokens > self.limits.max_chunk

    def _admit_suspect(self, notes: Notes) -> list[tuple[Admission, int]]:
        """One at a time, and alone, until it has a token of its own."""
        if len(self.running):
            return []
        request = self.trial.first
        self.waiting.remove(request)
        hit = self.kv.lookup(request)
        chunk = min(len(request.tokens) - hit.num_tokens, self.limits.max_chunk)
        return [(self._admit(request, hit, chunk, notes), chunk)]

    def _admit(self, request: Request, hit: Hit, chunk: int, notes: Notes) -> Admission:
        num_computed = hit.num_tokens
        if not request.has_run:
            request.has_run, request.num_cached = True, num_computed
            notes.admitted[request.id] = FirstRun(num_computed, request.queued_at, time.monotonic())
            notes.stats.prefix_queries += request.prompt_len if self.kv.may_share(request) else 0
            notes.stats.prefix_hits += num_computed
        elif request.preempted_at:
            notes.resumed[request.id] = time.monotonic() - request.preempted_at
            request.preempted_at = 0.0
        row = self.running.admit(request, num_computed)
        block_ids = self.kv.admit(row, hit, num_computed + chunk)
        self.kv.index(self.running, np.array([row]), np.array([num_computed + chunk]))
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
            embeds=request.embeds,
            pooling=request.pooling,
        )
