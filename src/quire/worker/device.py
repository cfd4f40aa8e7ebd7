"""The protocol of a device that computes steps, and what CPU and CUDA devices share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.attention.batch import Batch, LoRATokens
from quire.config.engine import EngineConfig
from quire.data.step_plan import Ints, Masks, Pending, StepPlan, StepResult
from quire.errors import EngineDead
from quire.layers.lora import AdapterSlots
from quire.parallel.all2all import ExpertDispatch
from quire.sampling.random import SamplingTensors
from quire.sampling.sampler import Sampled, Sampler
from quire.sampling.transfer import to_device
from quire.worker.input_buffers import BufferSizes, blank, bytes_of, host_arrays, slots_of, tensors
from quire.worker.memory import Needs
from quire.worker.multimodal.bidirectional import last_visible_of
from quire.worker.multimodal.embeds import take_embeds
from quire.worker.multimodal.encoder import MediaEncoder
from quire.worker.pipeline import StageLink
from quire.worker.rows import Rows
from quire.worker.spec.drafter import Drafter
from quire.worker.spec.progress import DraftProgress


class RouterOutputs(NamedTuple):
    """The experts that all MoE layers chose for the tokens of a step, as tensors on the device."""

    slots: Tensor
    """[T] int64, slot of each token in the KV cache; negative for padding"""
    experts: tuple[Tensor, ...]
    """[T, per_token] for each layer"""


class ForwardResult(NamedTuple):
    """The result of a forward pass, as tensors on the device."""

    hidden: Tensor
    """[T, hidden], the output of the layers"""
    logits: Tensor
    """[N, vocab], one row for each sampled position"""
    token_ids: Tensor | None = None
    """[N] tokens, if they were sampled within the forward pass"""
    sampling: SamplingTensors | None = None
    """Sampling parameters of the N positions."""
    rows: Tensor | None = None
    """[N] int64, the row of each position in `logits`"""
    verify_inputs: Any = None
    """Batch and speculation inputs of the step, if the device computes inputs of the step (for drafts)."""
    aux_hidden_states: tuple[Tensor, ...] = ()
    """[T, hidden] each, hidden states of intermediate layers for a draft model"""
    replay_verify: Callable[[], Tensor] | None = None
    """Function that replays the captured verification of draft tokens; None if it is not a separate graph."""
    verified: Tensor | None = None
    """Result of the verification of draft tokens, if it ran within the forward pass."""
    resample: Callable[[], Tensor] | None = None
    """Function that replays the captured sampling [N] under the grammar masks on the device."""
    routes: RouterOutputs | None = None
    """The chosen experts, if requests return them."""

    @property
    def draft_states(self) -> tuple[Tensor, ...]:
        """Return the hidden states that a draft model reads, [T, hidden] each."""
        return self.aux_hidden_states or (self.hidden,)


class UnsampledRows:
    """A computed step that is sampled when the grammar masks of its constrained rows arrive."""

    def __init__(self, plan: StepPlan, forward_result: ForwardResult) -> None:
        self.plan = plan
        self.forward_result = forward_result
        self.result: Pending | None = None

    def ready(self, timeout_s: float) -> bool:
        assert self.result is not None, "sample_tokens() has not been called for this step"
        return self.result.ready(timeout_s)

    def wait(self) -> StepResult:
        assert self.result is not None, "sample_tokens() has not been called for this step"
        return self.result.wait()


@contextmanager
def device_failures(kinds: tuple[type[Exception], ...] = (torch.AcceleratorError,)) -> Iterator[None]:
    """Raise EngineDead in place of exceptions of these types: the state of the device, and so every request,
    is lost."""
    try:
        yield
    except EngineDead:
        raise
    except kinds as error:
        raise EngineDead(f"the device failed: {error}") from error


@dataclass(slots=True)
class DeviceStep:
    """A step that can run as soon as the previous pipeline stage has sent its output."""

    run: Callable[[], Any]
    intermediate_tensors: Tensor | None = None
    """Buffer for the output of the previous pipeline stage; None in the first stage."""
    receive: Callable[[Tensor], None] | None = None

    def compute(self) -> Any:
        """Run the layers. The last pipeline stage returns a `ForwardResult`; others return
        `IntermediateTensors`, which the next step may overwrite."""
        if self.intermediate_tensors is not None and self.receive is not None:
            self.receive(self.intermediate_tensors)
        return self.run()


class Device(Protocol):
    """A CPU or a GPU that computes steps for the worker."""

    @property
    def sample(self) -> Callable[[Tensor, SamplingTensors], Tensor] | None:
        """Sampling function that runs within the forward pass; None if there is none."""

    def needs(self, config: EngineConfig, weights: int, sampler: Sampler | None, bound: int = 0) -> Needs:
        """Return the memory that the worker needs besides its cache, for the largest step with all sampling
        features. `weights` is the size of the weights in bytes. `sampler` is None in pipeline stages before
        the last. During the measurement the layers have a small cache of `bound` bytes, which is not
        counted."""

    def warm_up(self, config: EngineConfig) -> None:
        """Prepare for the first request after the cache was allocated, for example capture CUDA graphs."""

    def use_drafter(
        self, drafter: Drafter, draft_progress: DraftProgress | None, max_tokens: int, *, probabilistic: bool
    ) -> None:
        """Use `drafter` for steps with drafts; `probabilistic` samples draft tokens, otherwise they are
        greedy. `draft_progress` tracks the tokens computed by a separate draft model, which computes at most
        `max_tokens` missed tokens per step."""

    def forget(self) -> None:
        """Drop everything that contains addresses of weights or cache: the addresses will change."""

    def prepare(self, plan: StepPlan, all_rows: Rows) -> DeviceStep:
        """Prepare the inputs of a step and return it, ready to run."""

    def resample(self, output: ForwardResult, masks: Masks, places: Ints) -> Tensor | None:
        """Sample under grammar masks by the CUDA graph that was captured for this; return None if that is not
        possible. `places` [max_rows] is the index of each row's first sample."""

    def start_readback(
        self, plan: StepPlan, output: ForwardResult, sampled: Sampled, all_rows: Rows
    ) -> Pending:
        """Start the copy of the sampled tokens to the host. It must be called before `Rows.advance`, which
        counts the tokens of this step as computed."""


class StepFeatures(NamedTuple):
    """The features, besides plain text, that the rows of a step use."""

    embeds: tuple[Tensor, Tensor] | None
    """Indices [K] of tokens with embeddings in place of ids, and the embeddings [K, hidden]; or None."""
    last_visible: Tensor | None
    """[T] int32, last position that each token attends to; None if all attention is causal."""
    axes: int
    """Number of M-RoPE positions of each token: 0, 1 or 3."""
    has_adapters: bool = False
    """Whether some row has a LoRA adapter."""
    uses_extra_vocab: bool = False
    """Whether some row has an adapter with additional tokens."""

    @property
    def has_media(self) -> bool:
        return self.embeds is not None or self.axes == 3

    @property
    def is_eager(self) -> bool:
        """Whether the step must run eagerly: it can be neither recorded as a tape of kernel calls (CPU) nor
        captured as a CUDA graph."""
        return self.last_visible is not None or self.uses_extra_vocab

    def sizes(
        self, plan: StepPlan, num_groups: int, num_block_changes: int = 0, *, drafts: bool = False
    ) -> BufferSizes:
        """Return the sizes of the input arrays of a step with these features."""
        counts = plan.total_tokens, len(plan.rows), len(plan.logit_rows)
        return BufferSizes(
            *counts, num_block_changes, num_groups, self.has_adapters, drafts=drafts, axes=self.axes
        )

    def batch(
        self, inputs: dict[str, Tensor], block_tables: Tensor, query_lens: Ints, seq_lens: Ints
    ) -> Batch:
        """Build the batch of a step with these features from its input tensors."""
        lens, uses_extra_vocab = (query_lens, seq_lens), self.uses_extra_vocab
        batch = batch_of(inputs, block_tables, *lens, uses_extra_vocab=uses_extra_vocab)
        batch.embeds, batch.last_visible = self.embeds, self.last_visible
        return batch


@dataclass(slots=True)
class Model:
    """The forward pass, the LM head and the attention backend of a model, or of one pipeline stage."""

    forward: Callable[[Batch], Any]
    head: Callable[..., Tensor]
    """LM head: [N, hidden] -> [N, vocab]; with LoRA, the second argument has the adapter of each row."""
    attention: AttentionBackend
    link: StageLink | None = None
    """Connection to other pipeline stages; None without pipeline parallelism."""
    ep: ExpertDispatch | None = None
    """Expert-parallel dispatch; None if all experts are on this device."""
    adapters: AdapterSlots | None = None
    """LoRA adapter slots; None if LoRA is off."""
    encoder: MediaEncoder | None = None
    """Encoder of images, videos and audio; None for text-only models and later stages."""
    bidirectional: bool = False
    """Whether the tokens of an image, or of a whole prompt (pooling), attend to each other."""
    causal_groups: tuple[int, ...] = ()
    """Layer groups that are causal even if others are bidirectional."""
    is_capturable: bool = True
    """Whether CUDA graphs may contain the forward pass: not if offloaded weights are in pageable memory."""
    routes_group: int | None = None
    """KV cache group with the slots that identify tokens, if requests return their experts; else None."""

    @property
    def has_lm_head(self) -> bool:
        """Whether this stage has the LM head and samples."""
        return self.link is None or self.link.is_last

    @property
    def lora_variants(self) -> tuple[bool, ...]:
        """Return the values of "rows have adapters" for which each step is captured: False, and True if LoRA
        is on."""
        return (False,) if self.adapters is None else (False, True)

    def logits(self, states: Tensor, batch: Batch) -> Tensor:
        return self.head(states) if batch.logit_lora is None else self.head(states, batch.logit_lora)

    def head_of_one(self, states: Tensor) -> Tensor:
        """Return the logits of hidden states that all belong to one row; with LoRA the adapter in slot 0 is
        applied, since the call only measures memory."""
        if self.adapters is None:
            return self.head(states)
        slots = torch.zeros(len(states), dtype=torch.int32, device=states.device)
        return self.head(states, self.adapters.plan(LoRATokens(slots)))

    def receive_buffer(self, num_tokens: int) -> Tensor | None:
        """Return a buffer [2, num_tokens, hidden] for the output of the previous pipeline stage; None in the
        first stage."""
        return None if self.link is None or self.link.is_first else self.link.receive_buffer(num_tokens)

    def features(self, plan: StepPlan, all_rows: Rows, device: torch.device) -> StepFeatures:
        """Encode the media items of the plan, and return the features that its rows use."""
        last_visible = self._last_visible(plan, all_rows, device)  # `_embeds` drops finished items
        embeds, axes = self._embeds(plan, all_rows, device), all_rows.num_axes(plan)
        if self.adapters is None:
            return StepFeatures(embeds, last_visible, axes)
        slots = all_rows.adapter[plan.rows]
        has_adapters = bool((slots >= 0).any())
        uses_extra_vocab = has_adapters and bool(self.adapters.has_extra_vocab[slots].any())
        return StepFeatures(embeds, last_visible, axes, has_adapters, uses_extra_vocab)

    def _embeds(self, plan: StepPlan, all_rows: Rows, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Encode the media items of the plan and return `Batch.embeds`; None in stages after the first."""
        if self.link is not None and not self.link.is_first:
            return None
        embeds = take_embeds(plan, all_rows, device)
        if self.encoder is None:
            return embeds
        return self.encoder.concat_embeds(embeds, self.encoder.step(plan, all_rows))

    def _last_visible(self, plan: StepPlan, all_rows: Rows, device: torch.device) -> Tensor | None:
        """Return [T] int32, the last position that each token of the step attends to; None if all attention
        is causal."""
        if not self.bidirectional or not (all_rows.items or all_rows.num_bidirectional):
            return None
        last_visible = last_visible_of(plan, all_rows)
        return None if last_visible is None else to_device(last_visible, device)

    def step(self, run: Callable[[], Any], intermediate_tensors: Tensor | None) -> DeviceStep:
        return (
            DeviceStep(run) if self.link is None else DeviceStep(run, intermediate_tensors, self.link.receive)
        )

    def hidden(self, batch: Batch) -> Any:
        """Plan attention and run the layers. Return hidden states [T, hidden], `HiddenWithAux` for some
        drafters, or `IntermediateTensors` before the last pipeline stage."""
        last_visible = batch.last_visible  # the batch is the first of its groups
        routes: list[Tensor] | None = None if self.routes_group is None else []
        for number, group in enumerate(batch.groups):
            group.last_visible = None if number in self.causal_groups else last_visible
            group.routes = routes
            self.attention.plan(group)
        if batch.embeds is not None:
            batch.token_ids = batch.token_ids.clamp(min=0)
        return self.run_layers(batch)

    def routes(self, batch: Batch) -> RouterOutputs | None:
        """Return the experts that were chosen for a batch, after its layers have run."""
        if self.routes_group is None or batch.routes is None:
            return None
        return RouterOutputs(batch.groups[self.routes_group].slots, tuple(batch.routes))

    def run_layers(self, batch: Batch) -> Any:
        """Run the layers, after the attention of the batch is planned."""
        if self.adapters is not None:
            lora, logit_lora = self.adapters.plan(batch.lora), self.adapters.plan(batch.logit_lora)
            for group in batch.groups:
                group.lora, group.logit_lora = lora, logit_lora
        return self.forward(batch)


class NewTokens(NamedTuple):
    """The rows that get tokens in a step, and the number of the step."""

    step: int
    rows: NDArray[np.intp]

    @staticmethod
    def of(plan: StepPlan) -> "NewTokens":
        return NewTokens(plan.step, plan.sampling_rows.astype(np.intp))


def count_accepted(sampled: Ints, drafts: Ints, num_drafts: Ints) -> Ints:
    """Return how many sampled tokens of each row are accepted: those up to the first one that differs from
    its draft. `sampled` and `drafts` are concatenated over the rows; a row has one sampled token more than
    drafts."""
    num_samples = 1 + num_drafts
    lasts = np.cumsum(num_samples) - 1
    is_mismatch = np.ones(len(sampled), np.bool_)
    is_draft = np.ones(len(sampled), np.bool_)
    is_draft[lasts] = False
    is_mismatch[is_draft] = sampled[is_draft] != drafts
    first = np.flatnonzero(is_mismatch)  # at least one per row: its last sampled token
    counts: Ints = first[np.searchsorted(first, lasts - num_drafts)] - (lasts - num_drafts) + 1
    return counts.astype(np.int32)


def batch_of(
    inputs: dict[str, Tensor],
    block_tables: Tensor,
    query_lens: Ints,
    seq_lens: Ints,
    *,
    are_decodes: bool = False,
    are_mixed: bool = False,
    uses_extra_vocab: bool = False,
) -> Batch:
    """Build the batch of a step from its input tensors by name. `block_tables` is [layer groups, rows,
    blocks]; `uses_extra_vocab` is whether some LoRA adapter adds tokens."""
    has_adapters = "adapters" in inputs
    mrope_positions = inputs.get("mrope_positions")
    if mrope_positions is not None and len(mrope_positions) > len(inputs["positions"]):
        mrope_positions = mrope_positions.view(3, -1)
    batch = Batch(
        token_ids=inputs["token_ids"],
        positions=inputs["positions"],
        slots=inputs["slots"],
        query_starts=inputs["query_starts"],
        seq_lens=inputs["seq_lens"],
        rows=inputs["rows"],
        block_tables=block_tables[0],
        logit_tokens=inputs["logit_tokens"],
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
        mrope_positions=mrope_positions,
        lora=LoRATokens(inputs["adapters"], uses_extra_vocab) if has_adapters else None,
        logit_lora=LoRATokens(inputs["logit_adapters"], uses_extra_vocab) if has_adapters else None,
        are_decodes=are_decodes,
        are_mixed=are_mixed,
    )
    batch.others = tuple(
        replace(batch, slots=inputs[slots_of(group)], block_tables=block_tables[group])
        for group in range(1, len(block_tables))
    )
    return batch


def blank_batch(
    lens: Ints,
    block_tables: Tensor,
    device: torch.device,
    *,
    num_samples: int | None = None,
    drafts: bool = False,
    adapters: bool = False,
    axes: int = 0,
) -> tuple[Batch, dict[str, Tensor]]:
    """Build a dummy step of sequences with the lengths `lens`, which read the first cache block and write
    nothing. All sequences sample, or only the first `num_samples`. With `adapters` the step runs the LoRA
    kernels, although no token has an adapter."""
    num_groups, num_rows, _ = block_tables.shape
    num_samples = len(lens) if num_samples is None else num_samples
    sizes = BufferSizes(
        int(lens.sum()), len(lens), num_samples, 0, num_groups, adapters, drafts=drafts, axes=axes
    )
    memory = torch.zeros(bytes_of(sizes), dtype=torch.uint8)
    arrays = host_arrays(memory, sizes)
    blank(arrays, 0, num_rows - 1, 0)
    np.cumsum(lens, out=arrays["query_starts"][1:])
    arrays["logit_tokens"][:] = arrays["query_starts"][1:][: sizes.samples] - 1
    arrays["seq_lens"][:] = lens
    inputs = tensors(memory.to(device), sizes)
    return batch_of(inputs, block_tables, lens, lens), inputs


ONE_TOKEN: Ints = np.ones(1, np.int32)
"""Sequence lengths of the dummy step that an engine without requests computes."""
