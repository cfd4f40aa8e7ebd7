"""Dummy steps on a GPU before the first request, to compile kernels and to measure memory."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.attention.batch import Batch
from quire.config.engine import EngineConfig
from quire.data.step_plan import Ints
from quire.kernels.triton.launch import MOST_ROWS, compile_ahead, compiling
from quire.kernels.triton.masks import apply_masks
from quire.kernels.triton.sampling import ConstrainedDevice
from quire.memory import ladder, rows_at_once
from quire.models.decoder import HiddenWithAux
from quire.sampling.random import SamplingTensors
from quire.worker.cuda.draft_graphs import DraftGraphs
from quire.worker.cuda.draft_verify import Speculation
from quire.worker.cuda.graphs import verify_shapes
from quire.worker.cuda.mask_sampling import MaskedSampling, sample_tokens
from quire.worker.device import Model, blank_batch
from quire.worker.memory import measure_peak

_LONG_STEP = 4096
"""Number of prompt tokens in the longest step that is run to compile kernels."""
_HALVINGS = 6
"""Number of prompt lengths for which the LoRA kernels are compiled; each length is half of the one before."""
_MIXED = [(1, 24), (8, 6), (32, 12), (1, 79), (1, 159), (1, 191), (64, 256), (2 * MOST_ROWS + 1, 24)]
"""Steps of decodes and one prompt to compile kernels for, as (decodes, tokens of the prompt)."""


class DummyBatches:
    """Builds dummy steps: their sequences read the first block of the cache and write nothing."""

    def __init__(
        self,
        model: Model,
        block_tables: Tensor,
        max_len: int,
        axes: int,
        sample: Callable[..., Tensor],
        masked_sampling: MaskedSampling,
        speculation: Speculation | None,
    ) -> None:
        """Build the dummy batches of a `CudaDevice` from its parts. `axes` is its number of M-RoPE positions
        of each token."""
        self.model = model
        self.block_tables = block_tables
        self.device = block_tables.device
        self.max_len = max_len
        self.axes = axes
        self.sample = sample
        self.masked_sampling = masked_sampling
        self.speculation = speculation

    def make(self, lens: Ints, adapters: bool = False) -> tuple[Batch, dict[str, Tensor]]:
        """Build the batch and the input tensors of sequences with these lengths, optionally with adapters."""
        flags = {"drafts": self.speculation is not None, "adapters": adapters}
        batch, inputs = blank_batch(lens, self.block_tables, self.device, **flags, axes=self.axes)
        batch.intermediate_tensors = self.model.receive_buffer(len(batch.token_ids))
        return batch, inputs

    def split(self, num_tokens: int, num_seqs: int) -> Ints:
        """Return the lengths of `num_seqs` sequences with `num_tokens` tokens in all, or of more sequences if
        these would be too long."""
        num_seqs = min(max(num_seqs, -(-num_tokens // self.max_len)), num_tokens)
        lens = np.full(num_seqs, num_tokens // num_seqs, np.int32)
        lens[: num_tokens % num_seqs] += 1
        return lens

    @torch.inference_mode()
    def peak(
        self,
        compute: Callable[[Batch, dict[str, Tensor]], Any],
        num_tokens: int,
        num_seqs: int,
        then: Callable[[Any], None] = lambda done: None,
    ) -> int:
        """Return the peak bytes that are allocated while `compute` runs a step of this size, and `then`
        processes its result."""
        dummy_step = self.make(self.split(num_tokens, num_seqs), self.model.lora_variants[-1])
        return measure_peak(lambda: then(compute(*dummy_step)))

    def compile(
        self,
        config: EngineConfig,
        query_lens: Sequence[int],
        mixed_shapes: Sequence[tuple[int, int]],
        draft_graphs: DraftGraphs | None,
    ) -> None:
        """Compile the kernels of all steps that can occur, by running dummy steps; powers of two suffice as
        batch sizes. `query_lens` and `mixed_shapes` are those of `Graphs`."""
        limits = config.scheduler
        *others, last = ladder(limits.max_num_seqs)
        sizes = [last, *(size for size in others if size & (size - 1) == 0)]
        longest = min(limits.max_num_batched_tokens, _LONG_STEP)
        mixed_steps = [_decodes(min(count, last), min(prompt, self.max_len)) for count, prompt in _MIXED]
        with compiling():
            if self.model.has_lm_head:
                launch_sampling(config, self.sample)
                self._mask(config.checkpoint.facts.vocab, getattr(torch, config.model.dtype))
            halved = range(1 if self.model.adapters is None else _HALVINGS)
            prompts = [self.split(max(longest >> times, 1), 1) for times in halved]
            for lens in (*mixed_steps, *map(_decodes, sizes), *prompts):
                self._forward(lens)
            for size, query_len in verify_shapes(last, query_lens):
                self._forward(np.full(size, query_len, np.int32), are_decodes=True)
            for size, tokens in mixed_shapes:
                self._forward(self.split(tokens, size), are_mixed=True)
            if draft_graphs is not None:
                self._compile_drafts(draft_graphs, query_lens, last, longest)
        torch.cuda.synchronize()

    @torch.inference_mode()
    def _forward(self, lens: Ints, *, are_decodes: bool = False, are_mixed: bool = False) -> None:
        """Run a dummy step of sequences with these lengths: without adapters, and again with adapters if LoRA
        is on. `are_decodes` and `are_mixed` are the flags of `Batch`."""
        for adapters in self.model.lora_variants:
            batch, inputs = self.make(lens, adapters)
            for group in batch.groups:
                group.are_decodes = are_decodes
                if are_mixed:
                    group.are_mixed, group.query_lens_host = True, np.full_like(lens, lens.sum())
            self._compute(batch, inputs)

    def _compute(self, batch: Batch, inputs: dict[str, Tensor]) -> None:
        verify_inputs = None
        if self.speculation is not None:
            verify_inputs = self.speculation.derive(batch, inputs, self.block_tables)
        out = self.model.hidden(batch)
        hidden, aux = out if isinstance(out, HiddenWithAux) else (out, ())
        if self.model.has_lm_head:
            self.model.logits(hidden[batch.logit_tokens], batch)
        if self.speculation is not None and verify_inputs is not None:
            for later in (None, self.masked_sampling.later):
                states, positions = aux or (hidden,), inputs["positions"]
                self.speculation.verify(verify_inputs, states, positions, inputs["seeds"], later)

    @torch.inference_mode()
    def _compile_drafts(
        self, draft_graphs: DraftGraphs, query_lens: Sequence[int], most_rows: int, longest: int
    ) -> None:
        for size, query_len in verify_shapes(most_rows, query_lens):
            draft_graphs.compile(size, query_len - 1)
        if not draft_graphs.drafter.observes:
            for lens in (self.split(longest, 1), *(_decodes(0, 2 * size) for size in (8, 128))):
                draft_graphs.drafter.catch_up(self.make(lens)[0])

    @torch.inference_mode()
    def _mask(self, vocab: int, dtype: torch.dtype) -> None:
        logits = torch.zeros((1, vocab), dtype=dtype, device=self.device)
        apply_masks(logits, torch.zeros((1, 1 + -(-vocab // 32)), dtype=torch.int32, device=self.device))


def compile_sampling_ahead(config: EngineConfig) -> None:
    """Compile the sampling kernels, which take longest to compile, while the weights are loaded."""
    compile_ahead(lambda: launch_sampling(config, sample_tokens))


def launch_sampling(config: EngineConfig, sample: Callable[..., Tensor]) -> None:
    """Launch all sampling kernels to compile them, with tensors of the meta device, which have no memory."""
    vocab, most = config.checkpoint.facts.vocab, config.scheduler.max_num_seqs
    shapes = [(getattr(torch, config.model.dtype), size) for size in {1, ladder(most)[-1]}]
    shapes += [(torch.float32, size) for size in {1, min(most, rows_at_once(vocab))}]
    for dtype, size in shapes:
        floats, ints, longs = (
            torch.empty(size, dtype=kind, device="meta") for kind in (torch.float32, torch.int32, torch.int64)
        )
        params = SamplingTensors(floats, ints, floats, floats, longs, longs)
        for constrained in (None, ConstrainedDevice(ints, ints, ints)):
            sample(torch.empty((size, vocab), dtype=dtype, device="meta"), params, constrained)


def _decodes(count: int, *prompts: int) -> Ints:
    return np.array([*prompts, *[1] * count], np.int32)
