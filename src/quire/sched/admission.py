"""Admission: the queue of waiting requests, and the choice of those that get a row."""

import time
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from quire.data.request import Request
from quire.data.stats import Backlog
from quire.data.step_plan import Admission, FirstRun, Ints
from quire.sched.admission_checks import AdmissionChecks, ReadyQueue
from quire.sched.encoder_cache import EncoderCache, strip_arrays
from quire.sched.fairness import Capacity, FairShare
from quire.sched.fault_isolation import FaultIsolation
from quire.sched.forced import ForcedDrafts
from quire.sched.in_flight import Notes, StepInFlight
from quire.sched.kv_manager import Growth, Hit, KVManager
from quire.sched.limits import LONGEST_S, Claim, StepLimits
from quire.sched.lora import LoRAScheduler
from quire.sched.prefill_limit import prefill_limit
from quire.sched.queues import open_queue
from quire.sched.running import RowIds, Running
from quire.sched.spec import NO_DRAFTS, Drafting, Drafts
from quire.sched.step_cost import Decodes, StepCost
from quire.sched.targets import Targets


class Admitter:
    """Holds the queue of waiting requests, and chooses those that get a row, which means that they run."""

    def __init__(
        self,
        *,
        kv: KVManager,
        running: Running,
        limits: StepLimits,
        fault_isolation: FaultIsolation,
        checks: AdmissionChecks,
        adapters: LoRAScheduler,
        media: EncoderCache,
        policy: str,
        chunked_prefill: bool,
        reserve_full_prompt: bool,
        watermark: float,
        fair: bool = False,
        drafting: Drafting | None = None,
        targets: Targets | None = None,
    ) -> None:
        """Build the admitter. With `fair`, the tokens of a step are divided between tenants. With `targets`,
        the prompt tokens of a step are limited and ordered by the latency targets of requests."""
        self.drafting, self.targets = drafting, targets
        self.forced: ForcedDrafts | None = None
        """Draft tokens that grammars force; None: such tokens are computed one by one."""
        self.kv = kv
        if kv.tiers is not None:
            kv.tiers.running = running
        self.running = running
        self.limits = limits
        self.fault_isolation = fault_isolation
        self.checks = checks
        self.adapters = adapters
        self.media = media
        self.chunked_prefill = chunked_prefill
        self.reserve_full_prompt = reserve_full_prompt
        self.num_watermark_blocks = int(watermark * kv.pool.num_usable)
        self.shares = FairShare() if fair else None
        self.cost = StepCost() if targets is None else targets.cost
        self.policy = policy
        self.waiting = ReadyQueue(open_queue(policy, self.shares, targets), checks)

    def backlog(self, requests: Iterable[Request]) -> Backlog | None:
        """Return the prompt tokens that are still to be computed; None without latency targets."""
        return None if self.targets is None else self.targets.backlog(requests, self.running)

    def record_time(self, flight: StepInFlight) -> None:
        """Update the estimated costs of drafts and prompt tokens with the duration of a step."""
        if self.drafting is not None:
            self.drafting.record_time(flight)
        learns = self.shares is not None or self.targets is not None
        if learns or flight.seconds > LONGEST_S or self.limits.timed_tokens is not None:
            plan = flight.plan
            chunks = plan.num_tokens - plan.num_drafts if len(plan.num_drafts) else plan.num_tokens
            self.limits.record_time(int(chunks[chunks > 1].sum()), flight.seconds)
            if learns:
                self.cost.learn(chunks, flight.starts, flight.seconds)
            if self.targets is not None:
                self.targets.record_step(chunks, flight.seconds)
                self.targets.warn_of_steps(self.running)

    def _limit_prompts(self, pending: Ints) -> None:
        """Limit the prompt tokens of the next step, since they delay the decodes in it: if several tenants
        have requests, if decodes have a target for inter-token latency, and if a step took very long."""
        limits, running = self.limits, self.running
        limits.paced_tokens = None
        if self.shares is None and self.targets is None and limits.timed_tokens is None:
            return
        if not self.chunked_prefill or self.fault_isolation:
            return
        num_decodes, most = int((pending <= 1).sum()), []
        if limits.timed_tokens is not None:
            most.append(limits.timed_tokens)
        if self.shares is not None and num_decodes:
            tenants, request = running.tenant[running.order], self.waiting.next()
            if (tenants != tenants[0]).any() or (request is not None and request.tenant != tenants[0]):
                most.append(prefill_limit(self.cost, Decodes.of(running, pending)))
        targets = self.targets if len(running) else None
        if targets is not None and (limit := targets.prompt_limit(running, pending)) is not None:
            most.append(limit)
        if most:
            limits.paced_tokens = num_decodes + min(most)

    def divide(self, pending: Ints, *, admits: bool) -> Ints:
        """Return how many of its `pending` tokens each row of `running.order` computes in the next step. With
        `admits`, tokens may be left for the next waiting request."""
        self._limit_prompts(pending)
        if self.kv.states is not None:
            pending = self.kv.states.limit(self.running, pending)
        pending = self.media.allow(self.running, pending, self.limits)
        if self.shares is None and self.targets is None:
            chunks = self.limits.divide(pending)
        else:
            request = self._claimant(int(pending.sum())) if admits else None
            levels, level = self._levels(pending, request)
            claim = None if request is None else Claim(level, min(len(request.tokens), self.limits.max_chunk))
            chunks = self.limits.divide(pending, levels, claim)
        return self.media.undivided(self.running, chunks, self.limits)

    def _levels(self, pending: Ints, request: Request | None) -> tuple[NDArray[np.float64], float]:
        """Return a number for each row of `running.order` and one for a waiting request: the lowest gets
        tokens first. They are ordered by the levels of the tenants (computed tokens divided by weight), and
        within a tenant by the time at which a prompt must start to meet its target."""
        tenants = self.running.tenant[self.running.order]
        levels = np.zeros(len(tenants)) if self.shares is None else self.shares.levels[tenants]
        level = 0.0 if self.shares is None or request is None else self.shares.levels.item(request.tenant)
        if self.targets is None:
            return levels, level
        now = time.monotonic()
        due = self.targets.due_times(self.running, pending, now)
        due = np.append(due, np.inf if request is None else self.targets.due(request, now))
        ranks = np.lexsort((due, np.append(levels, level))).argsort().astype(np.float64)
        return ranks[:-1], ranks.item(-1)

    def _claimant(self, num_pending: int) -> Request | None:
        """Return the next waiting request if running rows must leave tokens of the step to it. Return None if
        it cannot be admitted, or if the step has room for it anyway."""
        if self.fault_isolation or len(self.running) >= self.limits.max_rows:
            return None
        if (request := self.waiting.next()) is None:
            return None
        num_tokens = min(len(request.tokens), self.limits.max_chunk)
        if num_pending + num_tokens <= self.limits.budget or not self._fits(request):
            return None
        if not self.media.cut(request, self.kv.lookup(request).num_tokens, num_tokens, self.limits):
            return None  # running rows hold the encoder cache space that the request needs
        return request

    def draft(self, chunks: Ints, growth: Growth) -> tuple[Ints, Growth, Drafts]:
        """Choose drafts for the running rows, within the token limit of the step and the free blocks. Return
        `chunks` (tokens of each row) and `growth` (needed blocks), both with the drafts, and the drafts."""
        running, rows = self.running, self.running.order
        has_forced = self.forced is not None and running.constrained[rows].any()
        if self.fault_isolation or (self.drafting is None and not has_forced):
            return chunks, growth, NO_DRAFTS
        budget, drafts = self._draft_budget(int(chunks.sum())), NO_DRAFTS
        if self.forced is not None and has_forced:
            drafts = self.forced.draft(running, chunks, budget)
        if self.drafting is not None:
            with_forced = chunks + drafts.counts if len(drafts.counts) else chunks
            others = self.drafting.draft(running, with_forced, budget - len(drafts.token_ids))
            drafts = drafts.merged(others)
        if len(drafts.counts):
            with_drafts = self.kv.growth(rows, growth.lengths + drafts.counts)
            if with_drafts.shortage:
                drafts = NO_DRAFTS
            else:
                chunks, growth = chunks + drafts.counts, with_drafts
        return chunks, growth, drafts

    def _draft_budget(self, num_tokens: int) -> int:
        """Return the token budget left for drafts, after reserving the first chunk of the next request."""
        left = self.limits.budget - num_tokens
        if len(self.waiting) and len(self.running) < self.limits.max_rows:
            request = self.waiting.next()
            if request is not None and self._fits(request):
                left -= min(len(request.tokens), self.limits.max_chunk)
        return left

    def charge(self, chunks: Ints) -> None:
        """Count `chunks`, the new tokens of the rows in `running.order`, for the tenants of these rows."""
        if self.shares is not None:
            self.shares.charge(self.running.tenant[self.running.order], chunks)

    def row_to_preempt(self) -> int | None:
        """Return the row to preempt for the next waiting request, if the tenant of this request is below its
        fair share."""
        kv, order = self.kv, self.running.order
        if (
            self.shares is None
            or self.fault_isolation
            or not len(order)
            or (request := self.waiting.next()) is None
        ):
            return None
        if len(order) < self.limits.max_rows and self._fits(request):
            return None
        needed_blocks = -(-len(request.tokens) // kv.block_size)
        capacity = Capacity(
            self.limits.max_rows, kv.pool.num_usable, needed_blocks, kv.block_size, kv.share_prefixes
        )
        return self.shares.row_to_preempt(request, self.running, kv.num_held(order), capacity)

    def candidates(self) -> RowIds | None:
        """Return the rows that may be preempted when blocks run out; None stands for all rows."""
        if self.shares is None:
            return None
        order = self.running.order
        tenants = self.running.tenant[order]
        rows: RowIds = order[tenants == self.shares.largest_holder(tenants, self.kv.num_held(order))]
        return rows

    def _fits(self, request: Request) -> bool:
        hit = self.kv.lookup(request)
        num_tokens = len(request.tokens)
        if not self.reserve_full_prompt:
            num_tokens = hit.num_tokens + min(num_tokens - hit.num_tokens, self.limits.max_chunk)
        return self.kv.fits(hit, num_tokens, self.running, spare=self.num_watermark_blocks)

    def admit(self, budget: int, notes: Notes) -> list[tuple[Admission, int]]:
        """Admit waiting requests, in order, while `budget` tokens, rows and blocks last; return each with the
        number of tokens in its first chunk. Requests that an admission check holds back keep their place."""
        if self.fault_isolation:
            return self._admit_suspect(notes)
        admitted: list[tuple[Admission, int]] = []
        while budget > 0 and len(self.running) < self.limits.max_rows:
            if (request := self.waiting.next()) is None:
                break
            hit = self.kv.lookup(request)
            if self.kv.is_checkpoint_planned(request, hit):  # the next step restores a longer prefix
                break
            pending = len(request.tokens) - hit.num_tokens
            chunk = self._first_chunk(request, hit, budget)
            is_cut = chunk < pending and not self._may_split(pending)
            if not chunk or (is_cut and len(self.running)):  # a request that runs alone may be split
                break
            num_tokens = len(request.tokens) if self.reserve_full_prompt else hit.num_tokens + chunk
            if not self.kv.fits(hit, num_tokens, self.running, spare=self.num_watermark_blocks):
                if self.kv.tiers is not None and self.kv.tiers.release_waiting(request):
                    continue
                break
            self.waiting.pop()
            admitted.append((self._admit(request, hit, chunk, notes), chunk))
            budget -= chunk
            if self.shares is not None:
                self.shares.charge(np.array([request.tenant]), np.array([chunk]))
        return admitted

    def _first_chunk(self, request: Request, hit: Hit, budget: int) -> int:
        """Return how many tokens, at most `budget`, a request with this hit computes in its first step."""
        chunk = min(len(request.tokens) - hit.num_tokens, self.limits.max_chunk, budget)
        return self.media.cut(request, hit.num_tokens, self.kv.cut(request, hit, chunk), self.limits)

    def _may_split(self, num_tokens: int) -> bool:
        """Whether a prompt may be split. Without chunked prefill only a request with more tokens than the
        limit of a step is split, such as a preempted request that computes its output again."""
        return self.chunked_prefill or num_tokens > self.limits.max_chunk

    def _admit_suspect(self, notes: Notes) -> list[tuple[Admission, int]]:
        """Admit the next suspect of a failed step (a request that may have caused the failure). It runs alone
        until it has a new token."""
        request = self.fault_isolation.next_suspect
        if len(self.running) or self.checks.hold_back(request, alone=True):
            return []
        self.waiting.remove(request)
        hit = self.kv.lookup(request)
        chunk = self._first_chunk(request, hit, self.limits.max_chunk)
        return [(self._admit(request, hit, chunk, notes), chunk)]

    def _admit(self, request: Request, hit: Hit, chunk: int, notes: Notes) -> Admission:
        num_computed = hit.num_tokens
        if not request.has_run:
            request.has_run, request.num_cached = True, num_computed
            if self.targets is not None:
                self.targets.warn_of_prompt(request)
            miss = self.kv.explain(request, hit)
            notes.admitted[request.id] = FirstRun(
                num_cached=num_computed,
                queued_at=request.queued_at,
                scheduled_at=time.monotonic(),
                num_created=self.kv.num_created(request, hit),
                miss=miss,
                num_from_host=min(request.num_from_host, num_computed),
                num_from_disk=min(request.num_from_disk, num_computed),
                num_from_remote=min(request.num_from_remote, num_computed),
            )
            if miss is not None:
                notes.stats.misses.append(miss.reason)
            notes.stats.prefix_queries += request.prompt_len if self.kv.may_share(request) else 0
            notes.stats.prefix_hits += num_computed
        elif request.preempted_at:
            notes.resumed[request.id] = time.monotonic() - request.preempted_at
            request.preempted_at = 0.0
        self.checks.enter(request)
        row = self.running.admit(request, num_computed)
        block_ids = self.kv.admit(row, hit, num_computed + chunk)
        state = self.kv.start(row, request, hit)
        self.kv.index(self.running, np.array([row]), np.array([num_computed + chunk]))
        self.media.enter(row, request, num_computed, num_computed + chunk)
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
            media=strip_arrays(request.media),
            pooling=request.pooling,
            adapter=self.adapters.slot_of(request),
            state=state,
        )
