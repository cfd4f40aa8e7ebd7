"""The scheduler: plans the tokens to compute next and applies the results.

There are no phases. A request has tokens, of which some are computed; each step computes some of the others.
Decodes, prompts, chunked prefill, prefix cache hits and resumed requests are all handled by this one
subtraction.

Token values arrive late. The tokens of a plan count as computed once it is made, and the next plan may be
made before the result arrives: then a running request gets a token that is not known yet. What depends on
values (stops, outputs, the prefix index) happens in `update`, or uses known tokens only."""

import time
from collections import deque
from collections.abc import Iterable

import numpy as np

from quire.data.request import Request
from quire.data.step_plan import Admission, FinishReason, Ints, StepOutput, StepPlan, StepResult
from quire.sched.admission import Admitter
from quire.sched.admission_checks import AdmissionChecks
from quire.sched.encoder_cache import EncoderCache
from quire.sched.fault_isolation import FaultIsolation
from quire.sched.grammar import Constraints, GrammarCompiler
from quire.sched.in_flight import Notes, StepInFlight
from quire.sched.kv_manager import Growth, KVManager
from quire.sched.limits import StepLimits
from quire.sched.lora import LoRAScheduler
from quire.sched.preemption import PreemptionWarning, choose_victim
from quire.sched.routed_experts import RoutedExperts
from quire.sched.running import Running
from quire.sched.spec import Drafting, Drafts
from quire.sched.targets import Targets


class Scheduler:
    """Plans steps and applies their results to the requests."""

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
        num_stages: int = 1,
        grammars: GrammarCompiler | None = None,
        fair: bool = False,
        drafting: Drafting | None = None,
        adapters: LoRAScheduler | None = None,
        media: EncoderCache | None = None,
        routed: RoutedExperts | None = None,
        targets: Targets | None = None,
    ) -> None:
        """Build the scheduler. With several pipeline stages, a row is planned once its last token is known,
        and the plan contains this token. With `fair`, tokens are divided between tenants (API keys)."""
        self.kv, self.routed = kv, routed
        self.limits = StepLimits(
            max_rows=max_num_seqs,
            max_tokens=max_num_batched_tokens,
            longest_chunk=long_prefill_token_threshold,
        )
        self.fault_isolation = FaultIsolation(self.limits)
        self.running = Running(max_num_seqs, max_model_len, num_stages)
        self.constraints = Constraints(grammars)
        self.adapters = adapters or LoRAScheduler()
        self.checks = AdmissionChecks(self.constraints, self.adapters, *kv.checks)
        self.admitter = Admitter(
            kv=kv,
            running=self.running,
            limits=self.limits,
            fault_isolation=self.fault_isolation,
            checks=self.checks,
            adapters=self.adapters,
            media=media or EncoderCache(),
            policy=policy,
            chunked_prefill=chunked_prefill,
            reserve_full_prompt=reserve_full_prompt,
            watermark=watermark,
            fair=fair,
            drafting=drafting,
            targets=targets,
        )
        self.requests: dict[str, Request] = {}
        self.num_preemptions, self._warn = 0, PreemptionWarning()
        self.in_flight: deque[StepInFlight] = deque()
        """Steps without a result, oldest first."""
        self.adapters.in_flight = self.in_flight
        self._notes, self._step = Notes(), 0

    @property
    def media(self) -> EncoderCache:
        return self.admitter.media

    # ---- adding and removing requests

    @property
    def has_work(self) -> bool:
        return bool(self.requests) or self.kv.has_work

    def add(self, request: Request) -> None:
        assert request.id not in self.requests, f"request {request.id} already exists"
        request.queued_at = request.queued_at or time.monotonic()
        self.requests[request.id] = request
        self.checks.add(request)
        self.media.add(request, self.limits)
        self.admitter.waiting.push(request)

    def abort(self, request_ids: Iterable[str]) -> dict[str, FinishReason]:
        """End the requests with these ids and return their finish reasons by id; unknown ids are ignored."""
        known = [self.requests[id] for id in dict.fromkeys(request_ids) if id in self.requests]
        return {request.id: self._finish(request, "abort") for request in known}

    def settle(self) -> dict[str, FinishReason]:
        """Collect ready grammars and LoRA adapters; end and return the requests for which one failed."""
        return {id: self._finish(self.requests[id], "error", why) for id, why in self.checks.settle().items()}

    def _finish(self, request: Request, reason: str, stop_reason: int | str | None = None) -> FinishReason:
        if request.row >= 0:
            self._release_row(request.row)
        else:
            self.admitter.waiting.remove(request)
        del self.requests[request.id]
        self.checks.drop(request)
        self.media.drop(request)
        for notes in (self._notes, *(flight.notes for flight in self.in_flight)):
            notes.admitted.pop(request.id, None)
        self.fault_isolation.remove(request, reason)
        kept = None if self.kv.tiers is None else self.kv.tiers.offer(request, reason)
        return FinishReason(reason, stop_reason, request.num_preemptions, kv_transfer=kept)

    def _release_row(self, row: int) -> Request:
        self.kv.free(row, self.running)
        self.media.leave(row)
        if self.admitter.drafting is not None:
            self.admitter.drafting.release(self.running, row)
        self._notes.released.append(row)
        self.checks.leave(self.running.request(row))
        return self.running.release(row)

    # ---- before a step

    def plan(self) -> StepPlan | None:
        """Spend the token budget on running requests first, then on waiting requests unless a running request
        was preempted. Return None if nothing can run before the next result arrives."""
        if not self._preempt_for_fairness():
            return None
        num_preemptions = self.num_preemptions
        continued = self._continue_running()
        if continued is None:
            return None
        chunks, growth, drafts = continued
        self.media.take(self.running, chunks)
        block_rows, block_ids = self.kv.grow(growth)
        self.kv.index(self.running, self.running.order, growth.lengths)
        admitted: list[tuple[Admission, int]] = []
        if self.num_preemptions == num_preemptions:
            admitted = self.admitter.admit(self.limits.budget - int(chunks.sum()), self._notes)
        rows = self.running.order
        num_tokens = np.append(chunks, np.array([chunk for _, chunk in admitted], np.int32))
        drafts = drafts.padded(len(admitted))
        if not num_tokens.all():
            computing = num_tokens > 0
            rows, num_tokens, drafts = rows[computing], num_tokens[computing], drafts.of(computing)
        if not len(rows):
            return None
        self._step += 1
        notes, self._notes = self._notes, Notes()
        evicted_media, encodes = self.media.take_changes()
        starts, admissions = self.running.num_computed[rows], self.running.admission[rows]
        plan = StepPlan(
            step=self._step,
            released=notes.released,
            admitted=[admission for admission, _ in admitted],
            block_rows=block_rows,
            block_ids=block_ids,
            rows=rows.astype(np.int32),
            num_tokens=num_tokens,
            samples=self.running.launch(rows, num_tokens, drafts.counts),
            num_drafts=drafts.counts,
            drafts=drafts.token_ids,
            adapters=self.adapters.take_assignments(),
            saves=self.kv.take_saves(self.running),
            stores=self.kv.take_stores(self._step),
            evicted_media=evicted_media,
            encodes=encodes,
        )
        if self.running.num_stages > 1:
            plan.values = self.running.take_unsent(rows)
        self.in_flight.append(StepInFlight(plan, notes, rows, starts, admissions, self.kv.take_indexed()))
        self.constraints.launch(self.running, self.in_flight[-1])
        return plan

    def _continue_running(self) -> tuple[Ints, Growth, Drafts] | None:
        """Return the tokens, blocks and drafts of the running rows. Requests are preempted until the free
        blocks suffice. Return None if steps in flight must end first: a preempted request needs the values of
        all its tokens, and a suspect of a failed step runs alone."""
        running = self.running
        if self.fault_isolation and self.in_flight:
            return None
        self.kv.slide(running)
        num_preemptions = self.num_preemptions
        while True:
            rows = running.order
            admits = self.num_preemptions == num_preemptions
            chunks = self.admitter.divide(running.pending(), admits=admits)
            growth = self.kv.growth(rows, running.lengths_after(chunks))
            if not growth.shortage:
                chunks, growth, drafts = self.admitter.draft(chunks, growth)
                self.admitter.charge(chunks)
                return chunks, growth, drafts
            if self.in_flight:
                return None
            request = self._preempt(choose_victim(running, self.admitter.policy, self.admitter.candidates()))
            self._warn(request.id, self.num_preemptions, self.kv.tiers)

    def _preempt_for_fairness(self) -> bool:
        """Preempt rows for tenants below their fair share; return False if steps in flight must end first."""
        while (row := self.admitter.row_to_preempt()) is not None:
            if self.in_flight:
                return False
            self._preempt(row)
        return True

    def _preempt(self, row: int) -> Request:
        request = self._release_row(row)
        request.num_preemptions += 1
        request.preempted_at = time.monotonic()
        self.admitter.waiting.push_front(request)
        self._notes.stats.num_preempted += 1
        self.num_preemptions += 1
        return request

    # ---- after a step

    def update(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Apply the result of the oldest step in flight: append sampled tokens and finish requests."""
        running, flight = self.running, self.in_flight.popleft()
        assert flight.plan is plan, f"step {plan.step} is not the oldest in flight"
        self.kv.finish_step(plan.step)
        step_tokens = flight.step_tokens(running, result)
        sampled = step_tokens.sampled
        stats = flight.count(running, sampled, np.array([*result.pooled], np.intp))
        step_tokens.fill()
        drafting = self.admitter.drafting
        drafted = {} if drafting is None else drafting.learn(step_tokens, stats)
        ends = step_tokens.ends(self.constraints.advance(step_tokens))
        step_tokens.cut(ends)
        result = step_tokens.result
        stats.num_sampled_tokens = len(result.token_ids)
        output = StepOutput(
            request_ids=running.ids[sampled].tolist(),
            token_ids=result.token_ids.tolist(),
            counts=result.counts.tolist(),
            drafted=drafted,
            **step_tokens.by_request(),
            routed={} if self.routed is None else self.routed.take(result.routes, running, sampled),
            pooled={running.ids[row]: vector for row, vector in result.pooled.items()},
            admitted=flight.notes.admitted,
            resumed=flight.notes.resumed,
            at=time.monotonic(),
            stats=stats,
        )
        output.shares = flight.shares(running, output.at)
        self.admitter.record_time(flight)
        for row, end in ends.items():
            request = running.request(row)
            finish = output.finished[request.id] = self._finish(request, end.reason, end.stop_reason)
            finish.keeps_last = end.keeps_last
        output.finished |= {id: self._finish(self.requests[id], "stop") for id in output.pooled}
        self.limits.record_success(len(plan.rows), plan.total_tokens)
        if self.fault_isolation and len(sampled):
            self._clear_suspect(int(sampled[0]))
        stats.num_running, stats.num_waiting = len(running), len(self.admitter.waiting)
        stats.kv_usage = self.kv.pool.usage
        self.constraints.begin(running)
        return output

    def fail(self, plan: StepPlan) -> dict[str, FinishReason]:
        """Discard all steps in flight after the oldest one failed, and requeue all requests. Those of the
        failed step run one by one, and end if they fail alone."""
        flight = self.in_flight[0]
        assert flight.plan is plan, f"step {plan.step} is not the oldest in flight"
        suspects = [self.running.request(row) for row in flight.rows[flight.alive(self.running)].tolist()]
        self.discard_in_flight()
        self.requeue_running()
        if len(plan.rows) > 1:
            self.fault_isolation.isolate(suspects, len(plan.rows), plan.total_tokens)
            return {}
        is_at_fault, num_tokens = self.fault_isolation.is_at_fault, plan.total_tokens
        at_fault = [request for request in suspects if is_at_fault(request, num_tokens)]
        return {request.id: self._finish(request, "error") for request in at_fault}

    def requeue_running(self) -> None:
        """Move all running requests to the front of the queue, in order; no step may be in flight."""
        for row in self.running.order[::-1].tolist():
            self.admitter.waiting.push_front(self._release_row(row))
        self.adapters.empty_slots()

    def discard_in_flight(self) -> None:
        """Discard the steps in flight; blocks that they have not written leave the prefix index."""
        for flight in self.in_flight:
            self.kv.forget(flight.indexed)
            self._notes.admitted |= flight.notes.admitted
            self._notes.resumed |= flight.notes.resumed
        self.kv.forget_steps()
        self.media.forget_all(key for flight in self.in_flight for key in flight.plan.evicted_media)
        self.in_flight.clear()
        self.constraints.forget()
        self.adapters.empty_slots()

    def _clear_suspect(self, row: int) -> None:
        """Clear the first suspect, which got a token alone; requeue it so that the next one runs alone."""
        if (request := self.running.requests[row]) is self.fault_isolation.next_suspect:
            self.fault_isolation.remove(request, "passed")
            self.admitter.waiting.push_front(self._release_row(row))
