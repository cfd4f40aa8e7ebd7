"""The CUDA device: row state on the GPU, asynchronous steps, and decode steps as CUDA graphs."""

from collections.abc import Callable
from itertools import cycle

import torch
from torch import Tensor

from quire.attention.batch import Batch
from quire.checkpoint.layout import cache_specs
from quire.config.engine import EngineConfig
from quire.config.speculation import SpecFacts
from quire.data.step_plan import Ints, Masks, Pending, StepPlan
from quire.kernels.host_to_device import copy_to_device
from quire.memory import GRAPH_BYTES, MAX_SAMPLES, ladder, max_mixed_tokens, mixed_bytes, mixed_shapes
from quire.models.decoder import HiddenWithAux
from quire.parallel.all2all import EPTokens
from quire.sampling.memory_probe import probe_memory
from quire.sampling.sampler import Sampled, Sampler
from quire.worker.cuda.draft_graphs import DraftGraphs
from quire.worker.cuda.draft_verify import DrafterUpdate, Speculation, read, take_back
from quire.worker.cuda.dummy_batches import DummyBatches
from quire.worker.cuda.graphs import IN_FLIGHT, Graph, Graphs, pinned, verify_shapes
from quire.worker.cuda.mask_sampling import MaskedSampling
from quire.worker.cuda.readback import PendingTokens, Read, Readback
from quire.worker.device import ONE_TOKEN, DeviceStep, ForwardResult, Model, NewTokens, StepFeatures
from quire.worker.input_buffers import StepBuffers, bytes_of, sampling_tensors, tensors
from quire.worker.memory import Needs
from quire.worker.pipeline import IntermediateTensors
from quire.worker.rows import ONE_EACH, Int64s, Rows
from quire.worker.spec.drafter import Drafter
from quire.worker.spec.progress import DraftProgress

_CAPTURE_S = 30.0
"""Maximum seconds of CUDA graph capture at start; graphs that are not captured by then are left out."""


class CudaDevice:
    """Runs steps on a GPU. Each running request has a row. Block tables (by layer group) and the last token
    of each row are in GPU memory; the last row is padding."""

    def __init__(
        self,
        model: Model,
        all_rows: Rows,
        sample: Callable[..., Tensor],
        device: torch.device,
        drafts: SpecFacts | None = None,
    ) -> None:
        max_rows = len(all_rows.num_tokens)
        self.num_stages = 1 if model.link is None else model.link.num_stages
        in_flight = max(IN_FLIGHT, self.num_stages + 1)
        self.model = model
        self.sample = sample
        """Function that samples token ids from logits, sampling parameters and grammar constraints."""
        self.device = device
        self.block_tables = torch.zeros(all_rows.block_tables.shape, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self.speculation = None if drafts is None else Speculation(drafts, all_rows, device)
        query_lens = [] if self.speculation is None else self.speculation.query_lens
        self.axes = int(all_rows.mrope is not None)
        """1 if the model uses M-RoPE positions, which differ from positions in the sequence, otherwise 0."""
        vectors = None if model.encoder is None else model.encoder.embeds_buffer
        self.graphs = Graphs(
            self.block_tables, model.receive_buffer, in_flight, query_lens, self.axes, vectors
        )
        self._pinned_buffers = cycle([_Pinned() for _ in range(in_flight)])
        size, dtype = max_rows, torch.int64
        if self.speculation is not None:
            size, dtype = 2 * max_rows * self._max_samples_per_row + 1, torch.int32
        self._readbacks = cycle([self._new_readback(size, dtype) for _ in range(in_flight)])
        self._readback = next(self._readbacks)
        self._masked_sampling = MaskedSampling(max_rows, size, all_rows.sampling.vocab, device)
        sampling = sample, self._masked_sampling, self.speculation
        self.dummy_batches = DummyBatches(
            model, self.block_tables, all_rows.tokens.shape[1], self.axes, *sampling
        )
        self._sampled_in_graph: Tensor | None = None
        self._all_rows = all_rows
        self._draft_graphs: DraftGraphs | None = None
        """CUDA graphs by which a draft model proposes tokens; None if no model proposes drafts."""

    def needs(self, config: EngineConfig, weights: int, sampler: Sampler | None, bound: int = 0) -> Needs:
        """Measure and return the memory that the worker needs besides its cache: run the largest step with
        all sampling features, and the largest captured step. `weights` is the size of the weights, and
        `bound` that of the small cache that the layers have meanwhile, both in bytes."""
        limits, link = config.scheduler, self.model.link

        def probe_sampler(output: ForwardResult) -> None:
            if sampler is None:
                return
            outputs = output.hidden, output.logits, output.sampling
            probe_memory(sampler, self.model.head_of_one, *outputs, num_logprobs=config.model.max_logprobs)

        self.dummy_batches.compile(
            config, self.graphs.query_lens, self._mixed_shapes(config), self._draft_graphs
        )
        max_tokens, max_rows = limits.max_num_batched_tokens, limits.max_num_seqs
        activations = self.dummy_batches.peak(self.compute, max_tokens, max_rows, probe_sampler)
        activations += 0 if link is None else link.num_bytes(max_tokens)
        more_samples = min(max_rows * self._max_samples_per_row, MAX_SAMPLES) - max_rows
        item = getattr(torch, config.model.dtype).itemsize
        activations += max(more_samples, 0) * config.checkpoint.facts.vocab * item
        graphs = self._graph_bytes(config, item)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        counts = 0 if sampler is None or sampler.counts is None else sampler.counts.num_bytes
        return Needs(weights, activations, graphs, counts, other=total - free - weights - counts - bound)

    def _graph_bytes(self, config: EngineConfig, item: int) -> int:
        """Estimate the bytes of all CUDA graphs. `item` is the number of bytes of a value in the model's
        dtype. Each graph has memory for its results, and shares its temporary memory with the larger
        graphs."""
        facts, largest, mixed = config.checkpoint.facts, self._max_decodes(config), self._mixed_shapes(config)
        verify_sizes = [size * n for size, n in verify_shapes(largest, self.graphs.query_lens)]
        sizes = sorted([*ladder(largest), *verify_sizes]) if self._captures(config) else []
        largest_shapes = [(n, n) for n in sizes[-1:]] + [(n, seqs) for seqs, n in mixed[-1:]]
        num_bytes = max(
            (self.dummy_batches.peak(self.compute, *shape) for shape in largest_shapes), default=0
        )
        num_variants, row_elements = len(self.model.lora_variants), 2 * facts.hidden
        if self.model.has_lm_head:
            row_elements = facts.vocab + facts.hidden
        num_bytes += num_variants * len(sizes) * GRAPH_BYTES
        num_bytes += (num_variants * sum(sizes) - max(sizes, default=0)) * row_elements * item
        num_bytes += num_variants * sum(mixed_bytes(config, *shape) for shape in mixed)
        if self._draft_graphs is not None and sizes:
            num_bytes += len(verify_sizes) * GRAPH_BYTES + max(verify_sizes, default=0) * facts.vocab * 4
        return num_bytes

    def _max_decodes(self, config: EngineConfig) -> int:
        """Return the maximum number of decodes in one step. With pipeline parallelism, the running requests
        are spread over as many steps as there are stages."""
        return -(-config.scheduler.max_num_seqs // self.num_stages)

    def _captures(self, config: EngineConfig) -> bool:
        is_capturable = self.model.is_capturable and self.model.attention.capturable
        return is_capturable and not config.model.enforce_eager

    @property
    def _max_samples_per_row(self) -> int:
        """Return the maximum number of positions of a row that are sampled in one step."""
        return 1 if self.speculation is None else 1 + self.speculation.most

    def _mixed_shapes(self, config: EngineConfig) -> list[tuple[int, int]]:
        """Return the shapes (sequences, tokens) of steps with prompts to capture; empty if none can be
        captured."""
        supported = self.model.attention.captures_prompts and self.model.link is None
        facts = config.checkpoint.facts
        kinds = {part.kind for spec in cache_specs(facts) if spec is not None for part in spec.parts}
        supported &= self._captures(config) and self.model.ep is None and kinds <= {"full", "window"}
        if not supported or (facts.media is not None and facts.media.num_cross_states):
            return []
        return mixed_shapes(self._max_decodes(config) * self._max_samples_per_row, max_mixed_tokens(config))

    @torch.inference_mode()
    def warm_up(self, config: EngineConfig) -> None:
        if self._captures(config):
            # Devices of one expert-parallel group must have the same graphs.
            seconds = _CAPTURE_S if self.model.ep is None else float("inf")
            largest = self._max_decodes(config)
            self._masked_sampling.open()
            self.graphs.capture(
                self.compute,
                largest,
                self.model.lora_variants,
                seconds=seconds,
                mixed_shapes=self._mixed_shapes(config),
                verify=self._verify_to_capture,
                resample=self._sample_masked,
            )
            spec = config.speculation
            if self._draft_graphs is not None and not (spec is not None and spec.enforce_eager):
                self._capture_draft_graphs(self._draft_graphs, largest)

    @property
    def _verify_to_capture(self) -> Callable[[ForwardResult], Tensor] | None:
        """Return the function that verifies draft tokens, which is captured as a graph that runs after the
        step. None without drafts, or if the graph of the step contains the verification."""
        return None if self.speculation is None or self.speculation.after_step is None else self._verify

    def _capture_draft_graphs(self, draft_graphs: DraftGraphs, max_rows: int) -> None:
        shapes = [(size, n - 1) for size, n in verify_shapes(max_rows, self.graphs.query_lens)]
        draft_graphs.capture(shapes, self.graphs.pool, seconds=_CAPTURE_S, in_flight=self.graphs.in_flight)

    def use_drafter(
        self, drafter: Drafter, draft_progress: DraftProgress | None, max_tokens: int, *, probabilistic: bool
    ) -> None:
        assert self.speculation is not None
        state = self.speculation.spec_tokens, self.block_tables, self._all_rows, self.sample
        self._draft_graphs = DraftGraphs(
            drafter, *state, draft_progress, max_tokens, probabilistic=probabilistic
        )
        if drafter.observes:
            self.speculation.after_step = DrafterUpdate(drafter)

    def forget(self) -> None:
        self.graphs.forget()
        if self._draft_graphs is not None:
            self._draft_graphs.forget()
        self._sampled_in_graph = None

    def _new_readback(self, size: int, dtype: torch.dtype) -> Readback:
        is_cuda = self.device.type == "cuda"
        events = [torch.cuda.Event(enable_timing=True) if is_cuda else None for _ in range(2)]
        return Readback(pinned(size, dtype=dtype), *events)

    def prepare(self, plan: StepPlan, all_rows: Rows) -> DeviceStep:
        if len(plan.rows):
            self._readback = next(self._readbacks)
            if self._readback.started is not None:
                self._readback.started.record()
        places, ids = all_rows.all_block_changes()
        self._masked_sampling.set_later(len(plan.constrained) > 0 or self._verifies_later(plan, all_rows))
        features = self.model.features(plan, all_rows, self.device)
        if self.speculation is not None:
            self.speculation.begin(plan, all_rows)
        if self._draft_graphs is not None and self._propose_drafts(self._draft_graphs, plan, places, ids):
            places, ids = places[:0], ids[:0]
        graph = None if features.is_eager else self.graphs.find(plan, adapters=features.has_adapters)
        if graph is not None and (graph.takes_embeds or not features.has_media):
            return self._replay(graph, plan, all_rows, places, ids, features.embeds)
        return self._eager(plan, all_rows, places, ids, features) if len(plan.rows) else self._idle(plan)

    def _verifies_later(self, plan: StepPlan, all_rows: Rows) -> bool:
        """Whether drafts are verified after the sampler and not within the forward pass, since some rows need
        features that sampling within the forward pass lacks."""
        return self.speculation is not None and all_rows.sampling.special(plan.logit_rows) != 0

    def _propose_drafts(self, draft_graphs: DraftGraphs, plan: StepPlan, places: Int64s, ids: Ints) -> bool:
        """Propose draft tokens if the step needs any. `places` and `ids` are the changed entries of the block
        tables. Return whether the changes were also written to the device's tables."""
        draft_graphs.begin(plan)
        if not draft_graphs.has_work(plan):
            draft_graphs.skip(plan)
            return False
        if len(ids):
            self._set_blocks(copy_to_device(places, self.device), copy_to_device(ids, self.device))
        draft_graphs(plan)
        return True

    def _replay(
        self,
        graph: Graph,
        plan: StepPlan,
        all_rows: Rows,
        places: Int64s,
        ids: Ints,
        embeds: tuple[Tensor, Tensor] | None,
    ) -> DeviceStep:
        if len(ids) > graph.sizes.blocks:
            self._set_blocks(*(torch.from_numpy(part).to(self.device) for part in (places, ids)))
            places, ids = places[:0], ids[:0]
        graph.load(plan, all_rows, places, ids, embeds)
        count = len(plan.logit_rows)

        def run() -> ForwardResult | IntermediateTensors:
            output = graph.replay(count)
            if isinstance(output, ForwardResult):
                self._sampled_in_graph = output.token_ids
            return output

        return self.model.step(
            run, None if graph.intermediate_tensors is None else graph.intermediate_tensors[:, :count]
        )

    def _eager(
        self, plan: StepPlan, all_rows: Rows, places: Int64s, ids: Ints, features: StepFeatures
    ) -> DeviceStep:
        drafts = self.speculation is not None
        sizes = features.sizes(plan, len(self.block_tables), len(ids), drafts=drafts)
        memory = next(self._pinned_buffers).take(bytes_of(sizes))
        StepBuffers(memory, sizes).write(plan, all_rows, places, ids)
        inputs = tensors(memory.to(self.device, non_blocking=True), sizes)
        seq_lens = all_rows.num_computed[plan.rows] + plan.num_tokens
        batch = features.batch(inputs, self.block_tables, plan.num_tokens, seq_lens)
        batch.intermediate_tensors = self.model.receive_buffer(plan.total_tokens)
        self._set_ep_tokens(batch, plan)
        return self.model.step(lambda: self.compute(batch, inputs), batch.intermediate_tensors)

    def _idle(self, plan: StepPlan) -> DeviceStep:
        """Return a plan of one dummy token, for an engine that has no requests while others have some: with
        expert parallelism, every engine must take part in each step."""
        batch, inputs = self.dummy_batches.make(ONE_TOKEN)
        self._set_ep_tokens(batch, plan)
        return self.model.step(lambda: self.compute(batch, inputs), batch.intermediate_tensors)

    def _set_ep_tokens(self, batch: Batch, plan: StepPlan) -> None:
        """Set the number of tokens to which every engine pads the tokens of its batch, for the exchange of
        tokens in expert parallelism. It is the size of the graph that all engines replay."""
        if plan.counts:
            batch.ep = EPTokens(plan.total_tokens, self.graphs.size_for(max(plan.counts)))

    def compute(self, batch: Batch, inputs: dict[str, Tensor]) -> ForwardResult | IntermediateTensors:
        """Compute a step on the device, inside or outside a captured graph."""
        self._set_blocks(inputs["block_places"], inputs["block_ids"])
        verify_inputs = None
        if self.speculation is not None:
            verify_inputs = self.speculation.derive(batch, inputs, self.block_tables)
            batch.token_ids = inputs["token_ids"]
        else:
            sources = inputs["sources"]
            batch.token_ids = torch.where(sources >= 0, self.last_tokens[sources], inputs["token_ids"])
        out = self.model.hidden(batch)
        if not self.model.has_lm_head:
            passed: IntermediateTensors = out
            return passed
        hidden, aux = out if isinstance(out, HiddenWithAux) else (out, ())
        routes = self.model.routes(batch)
        # Padding tokens of a captured step lie between the others; their samples come last.
        is_all = len(batch.logit_tokens) == len(hidden) and not (verify_inputs and batch.max_query_len > 1)
        states = hidden if is_all else hidden[batch.logit_tokens]
        logits, sampling = self.model.logits(states, batch), sampling_tensors(inputs)
        token_ids = self._sampled_in_graph = self.sample(
            logits, sampling, self._masked_sampling.later_constraints(len(logits))
        )
        verified = None
        if verify_inputs is None:
            self.last_tokens.index_copy_(0, inputs["logit_rows"], token_ids)
        elif self.speculation is not None and self.speculation.after_step is None:
            later = self._masked_sampling.later
            verified = self.speculation.verify(
                verify_inputs, aux or (hidden,), token_ids, sampling.seeds, later
            )
        extra = verify_inputs, aux, None, verified
        return ForwardResult(hidden, logits, token_ids, sampling, inputs["logit_rows"], *extra, routes=routes)

    def _sample_masked(self, output: ForwardResult) -> Tensor:
        count = len(output.logits)
        token_ids = self.sample(output.logits, output.sampling, self._masked_sampling.mask_constraints(count))
        if output.verify_inputs is None and output.rows is not None:
            self.last_tokens.index_copy_(0, output.rows, token_ids)
        return token_ids

    def resample(self, output: ForwardResult, masks: Masks, places: Ints) -> Tensor | None:
        if output.resample is None or not self._masked_sampling.send(masks, places):
            return None
        token_ids = self._sampled_in_graph = output.resample()[: len(output.logits)]
        self._masked_sampling.applied()
        return token_ids

    def _set_blocks(self, places: Tensor, ids: Tensor) -> None:
        self.block_tables.view(-1).index_copy_(0, places, ids)

    def start_readback(
        self, plan: StepPlan, output: ForwardResult, sampled: Sampled, all_rows: Rows
    ) -> Pending:
        new = NewTokens.of(plan)
        if self.speculation is not None and len(new.rows):
            num_seqs = len(output.verify_inputs.step.rows)
            is_in_graph = sampled.token_ids is output.token_ids
            if output.verified is not None and is_in_graph:
                verified = output.verified
            elif output.replay_verify is not None and is_in_graph:
                verified = output.replay_verify()
            else:
                verified = self._verify(output._replace(token_ids=sampled.token_ids))
            if sampled.counts is not None and len(plan.num_drafts):
                take_back(sampled.counts, plan, all_rows.sampling, sampled.token_ids, verified)
            return self._copy_to_host(verified, sampled, new, all_rows, lambda x: read(x, num_seqs, plan))
        if len(new.rows) and sampled.token_ids is not self._sampled_in_graph:
            # A row needs more than the plain sampling of the graph.
            assert output.rows is not None
            self.last_tokens.index_copy_(0, output.rows, sampled.token_ids)
        return self._copy_to_host(sampled.token_ids, sampled, new, all_rows, _one_each)

    def _verify(self, output: ForwardResult) -> Tensor:
        assert self.speculation is not None and output.token_ids is not None and output.sampling is not None
        states, seeds = output.draft_states, output.sampling.seeds
        return self.speculation.verify(output.verify_inputs, states, output.token_ids, seeds)

    def _copy_to_host(
        self, values: Tensor, sampled: Sampled, new: NewTokens, all_rows: Rows, read: Read
    ) -> "PendingTokens":
        readback = self._readback
        tokens = readback.buffer[: len(values)]
        tokens.copy_(values, non_blocking=True)
        if readback.copied is not None:
            readback.copied.record()
        return PendingTokens(readback, tokens, sampled, new, all_rows, read)


class _Pinned:
    """Pinned host memory that grows as needed."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        if len(self._memory) < size:
            self._memory = pinned(2 * size)
        return self._memory[:size]


def _one_each(token_ids: Ints) -> tuple[Ints, Ints, Ints]:
    return token_ids, ONE_EACH, ONE_EACH
