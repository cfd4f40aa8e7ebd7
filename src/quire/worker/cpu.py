"""CpuDevice: runs steps on the CPU."""

from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.attention.batch import Batch
from quire.config.engine import EngineConfig
from quire.data.step_plan import Ints, Masks, Pending, StepPlan, StepResult, spread
from quire.kernels.cpu.sampling import FREE, ConstrainedHost, sample
from quire.kernels.cpu.tape import Tapes
from quire.memory import (
    MAX_MIXED_DRAFTS,
    MAX_MIXED_ROWS,
    MAX_TAPED,
    activation_bytes,
    max_forced,
    tape_bytes,
)
from quire.models.decoder import HiddenWithAux
from quire.parallel.all2all import EPTokens
from quire.sampling.random import SamplingTensors
from quire.sampling.sampler import Sampled, Sampler
from quire.worker.device import (
    ONE_TOKEN,
    DeviceStep,
    ForwardResult,
    Model,
    NewTokens,
    blank_batch,
    count_accepted,
)
from quire.worker.input_buffers import (
    BufferSizes,
    StepBuffers,
    bytes_of,
    row_sampling_tensors,
    sampling_tensors,
    tensors,
)
from quire.worker.memory import Needs
from quire.worker.pipeline import IntermediateTensors
from quire.worker.rows import Rows
from quire.worker.spec.drafter import Drafter, SampleDrafts, SequenceEnds, TargetStates
from quire.worker.spec.progress import DraftProgress, batch_of_spans, is_decode

_MAX_BUFFERS = 32
"""Maximum number of cached input buffers for steps that are not recorded as tapes; the least recently used
buffer is dropped."""
Sample = Callable[..., Tensor]
"""Function that samples token ids from logits, sampling parameters and, optionally, grammar constraints."""


def sample_tokens(
    logits: Tensor, params: SamplingTensors, constrained: ConstrainedHost | None = None
) -> Tensor:
    return sample(logits, *params, constrained)


class CpuDevice:
    """Runs steps on the CPU, synchronously: all values are known before the next step. Small decode steps
    are recorded as tapes of kernel calls and replayed, like CUDA graphs."""

    def __init__(self, model: Model, all_rows: Rows, sample: Sample | None = None) -> None:
        self.model = model
        self.sample = sample
        self.block_tables = torch.from_numpy(all_rows.block_tables)
        self._taped_buffers = cache(_new_buffers)
        """Input buffers of steps that are recorded as tapes of kernel calls. The recorded calls contain the
        addresses of these buffers, so each step of the same shape reuses the same buffer."""
        self._receive_buffers = cache(model.receive_buffer)
        """Buffers of taped steps for the output of the previous pipeline stage."""
        self._eager_buffers = lru_cache(_MAX_BUFFERS)(_new_buffers)
        self._tapes = Tapes()
        self._max_taped, self._tapes_mixed = MAX_TAPED, False
        """Most tokens of a taped step, and whether its rows may have different numbers of drafts."""
        self.drafter: Drafter | None = None
        self.drafts_are_sampled = False
        """Whether draft tokens are sampled like the target's, with the same random numbers; else they are
        greedy."""
        self.draft_progress: DraftProgress | None = None
        """Tokens that a separate draft model has computed; None without a separate model."""
        self._max_tokens = 0
        """Maximum number of tokens that a draft model computes in one step to catch up with the target."""
        self._batch: Batch | None = None
        """Batch of the last step."""

    def needs(self, config: EngineConfig, weights: int, sampler: Sampler | None, bound: int = 0) -> Needs:
        """Return the estimated memory of the largest step. It is estimated and not measured, since a measured
        step would have to allocate the memory. `weights` is the size of the weights in bytes."""
        facts, dtype, limits = config.rank_facts, config.model.dtype, config.scheduler
        most = 0 if config.speculation is None else config.speculation.num_speculative_tokens
        num_samples = limits.max_num_seqs * (1 + most) + max_forced(config)
        num_samples = max(min(num_samples, limits.max_num_batched_tokens), 1)
        activations = activation_bytes(
            facts, dtype, num_tokens=limits.max_num_batched_tokens, num_seqs=num_samples
        )
        tapes = tape_bytes(config, self._max_taped)
        link = self.model.link
        passed = 0 if link is None else link.num_bytes(limits.max_num_batched_tokens)
        ep, row_bytes = self.model.ep, facts.hidden * getattr(torch, dtype).itemsize
        gathered = 0 if ep is None else ep.num_bytes(limits.max_num_batched_tokens, row_bytes)
        return Needs(weights, activations + passed + gathered, tapes)

    def warm_up(self, config: EngineConfig) -> None:
        if config.model.enforce_eager:
            self._max_taped = 0
        self._tapes_mixed = max_forced(config) > 0

    def use_drafter(
        self, drafter: Drafter, draft_progress: DraftProgress | None, max_tokens: int, *, probabilistic: bool
    ) -> None:
        self.drafter, self.draft_progress, self.drafts_are_sampled = drafter, draft_progress, probabilistic
        self._max_tokens = max_tokens

    def forget(self) -> None:
        self._tapes = Tapes()
        if self.drafter is not None:
            self.drafter.forget()
        if self.draft_progress is not None:
            self.draft_progress.forget()

    def prepare(self, plan: StepPlan, all_rows: Rows) -> DeviceStep:
        if not len(plan.rows):
            return self._idle(plan)
        if self.drafter is not None:
            self._propose(self.drafter, plan, all_rows)
        features = self.model.features(plan, all_rows, self.block_tables.device)
        sizes = features.sizes(plan, len(all_rows.block_tables))
        is_uniform = plan.query_len > 0
        taped = plan.total_tokens <= self._max_taped and (is_uniform or self._is_mixed_taped(plan))
        taped = taped and not features.has_media and not features.is_eager
        buffers, inputs = self._taped_buffers(sizes) if taped else self._eager_buffers(sizes)
        buffers.write(plan, all_rows)
        batch = features.batch(inputs, self.block_tables, plan.num_tokens, buffers.arrays["seq_lens"])
        receive_buffer = self._receive_buffers if taped else self.model.receive_buffer
        batch.intermediate_tensors = receive_buffer(plan.total_tokens)
        self._set_ep_tokens(batch, plan)
        self._batch = batch

        sampled_in_graph = not len(plan.constrained)  # the masks of constrained rows come later

        def run() -> ForwardResult | IntermediateTensors:
            return self._compute(batch, inputs, sampled_in_graph)

        if not taped:
            return self.model.step(run, batch.intermediate_tensors)
        key = len(plan.rows), plan.total_tokens, is_uniform, sampled_in_graph, features.has_adapters
        return self.model.step(lambda: self._tapes.run(key, run), batch.intermediate_tensors)

    def _is_mixed_taped(self, plan: StepPlan) -> bool:
        """Whether a step is taped in which rows have different numbers of draft tokens."""
        num_drafts = plan.total_tokens - len(plan.rows)
        return (
            self._tapes_mixed
            and len(plan.logit_rows) == plan.total_tokens
            and len(plan.rows) <= MAX_MIXED_ROWS
            and num_drafts <= MAX_MIXED_DRAFTS
            and num_drafts & (num_drafts - 1) == 0
        )

    def _idle(self, plan: StepPlan) -> DeviceStep:
        """Return a plan of one dummy token, for an engine that has no requests while others have some: with
        expert parallelism, every engine must take part in each step."""
        batch, inputs = blank_batch(ONE_TOKEN, self.block_tables, self.block_tables.device, num_samples=0)
        batch.intermediate_tensors = self.model.receive_buffer(1)
        self._set_ep_tokens(batch, plan)
        return self.model.step(lambda: self._compute(batch, inputs), batch.intermediate_tensors)

    def _set_ep_tokens(self, batch: Batch, plan: StepPlan) -> None:
        if plan.counts:
            batch.ep = EPTokens(plan.total_tokens, max(plan.counts))

    def _compute(
        self, batch: Batch, inputs: dict[str, Tensor], sampled_in_graph: bool = False
    ) -> ForwardResult | IntermediateTensors:
        model = self.model
        out = model.hidden(batch)
        if not model.has_lm_head:
            passed: IntermediateTensors = out
            return passed
        hidden, aux = out if isinstance(out, HiddenWithAux) else (out, ())
        routes = model.routes(batch)
        states = hidden if len(batch.logit_tokens) == len(hidden) else hidden[batch.logit_tokens]
        logits, sampling = model.logits(states, batch), sampling_tensors(inputs)
        sampled_in_graph = sampled_in_graph and self.sample is not None and len(logits) > 0
        token_ids = self.sample(logits, sampling) if sampled_in_graph and self.sample is not None else None
        return ForwardResult(hidden, logits, token_ids, sampling, aux_hidden_states=aux, routes=routes)

    def resample(self, output: ForwardResult, masks: Masks, places: Ints) -> Tensor | None:
        if self.sample is None or output.sampling is None:
            return None
        return self.sample(
            output.logits, output.sampling, _build_constraints(masks, places, len(output.logits))
        )

    def start_readback(
        self, plan: StepPlan, output: ForwardResult, sampled: Sampled, all_rows: Rows
    ) -> Pending:
        token_ids, counts = sampled.token_ids.to(torch.int32).numpy(), plan.num_drafts
        first = all_rows.num_computed[plan.rows]
        if len(plan.num_drafts):
            num_drafts = plan.num_drafts[plan.samples]
            counts = count_accepted(token_ids, all_rows.drafts_of(plan), num_drafts)
            token_ids = token_ids[spread(np.cumsum(1 + num_drafts) - 1 - num_drafts, counts)]
        all_rows.append_sampled(*NewTokens.of(plan), token_ids, counts)
        if self.drafter is not None and self.drafter.observes:
            self._update_drafter(self.drafter, plan, all_rows, first, counts, output)
        return Done(sampled.result(plan.sampling_rows, token_ids, counts))

    def _update_drafter(
        self,
        drafter: Drafter,
        plan: StepPlan,
        all_rows: Rows,
        first: Ints,
        counts: Ints,
        output: ForwardResult,
    ) -> None:
        """Let the drafter read the results of a step of the target model. `first` is the position of the
        first token that each row has computed in the step, and `counts` is the number of its new tokens
        (empty: one per row)."""
        rows, num_kept = plan.rows.astype(np.intp), plan.num_tokens
        if len(counts):
            num_kept = num_kept - plan.num_drafts
            num_kept[plan.samples] += counts - 1
        next_ids = np.maximum(all_rows.tokens[rows, first + num_kept], 0)
        assert self._batch is not None
        target = TargetStates(
            next_ids=torch.from_numpy(next_ids.astype(np.int64)),
            num_kept=torch.from_numpy(num_kept.astype(np.int64)),
            states=output.draft_states,
        )
        drafter.observe(self._batch, target)

    def _propose(self, drafter: Drafter, plan: StepPlan, all_rows: Rows) -> None:
        """Propose the draft tokens of a plan, and write them into `all_rows`. A separate draft model first
        computes the tokens that it has missed."""
        progress, has_drafts, late = self.draft_progress, is_decode(plan), np.zeros(len(plan.rows), np.bool_)
        if progress is not None:
            progress.begin(plan)
        if progress is None or progress.lags:
            has_drafts &= (plan.num_drafts > 0) if len(plan.num_drafts) else False
        if progress is not None:
            missed, late = progress.missed(plan, self._max_tokens)
            if missed:
                history = torch.from_numpy(all_rows.tokens)
                drafter.catch_up(
                    batch_of_spans(missed, all_rows, progress.groups, history, self.block_tables)
                )
            has_drafts &= ~late
        if has_drafts.any():
            rows, most = plan.rows[has_drafts].astype(np.intp), int(plan.num_drafts.max(initial=1))
            all_rows.drafts[rows, :most] = drafter.propose(self._ends(rows, all_rows), most).numpy()
        if progress is not None and (has_drafts.any() or not progress.lags):
            progress.note(plan, has_drafts, late)
        elif progress is not None:
            progress.skip(plan)
        if len(plan.num_drafts):
            all_rows.write_drafts(plan)

    def _ends(self, rows: NDArray[np.intp], all_rows: Rows) -> SequenceEnds:
        last = all_rows.num_tokens[rows].astype(np.int64) - 1
        last_two = np.maximum(last[:, None] + (-1, 0), 0)
        return SequenceEnds(
            rows=torch.from_numpy(rows.astype(np.int32)),
            ids=torch.from_numpy(all_rows.tokens[rows[:, None], last_two].astype(np.int64)),
            last=torch.from_numpy(last),
            num_slots=torch.from_numpy(all_rows.num_slots(rows).astype(np.int64)),
            tables=self.block_tables,
            sample=self._draft_sampling(rows, all_rows) if self.drafts_are_sampled else None,
        )

    def _draft_sampling(self, rows: NDArray[np.intp], all_rows: Rows) -> SampleDrafts | None:
        """Return the function that samples draft tokens of these rows; None without native kernels."""
        if (sample := self.sample) is None:
            return None
        columns = row_sampling_tensors(all_rows.sampling, rows)
        return lambda logits, positions: sample(logits, columns._replace(positions=positions))


class Done:
    """The result of a step that is already complete."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def ready(self, timeout_s: float) -> bool:
        return True

    def wait(self) -> StepResult:
        return self._result


def _build_constraints(masks: Masks, places: Ints, count: int) -> ConstrainedHost | None:
    """Build the grammar constraints of `count` sampled positions; None if no row is constrained. `places`
    [max_rows] is the index of each row's first sampled position."""
    if not len(masks.rows):
        return None
    mask_of = np.full(count, FREE, np.int32)
    at = places[masks.rows] + masks.sample_index if len(masks.sample_index) else places[masks.rows]
    mask_of[at] = np.arange(len(at))
    bits = masks.bits if masks.bits.flags.writeable else masks.bits.copy()  # torch needs writable arrays
    return ConstrainedHost(torch.from_numpy(mask_of), torch.from_numpy(bits.view(np.int32)))


def _new_buffers(sizes: BufferSizes) -> tuple[StepBuffers, dict[str, Tensor]]:
    memory = torch.zeros(bytes_of(sizes), dtype=torch.uint8)
    return StepBuffers(memory, sizes), tensors(memory, sizes)
