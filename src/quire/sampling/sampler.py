"""The sampler: one token for each row of a batch by its parameters, without a loop over requests."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.data.routed_experts import StepRoutes
from quire.data.step_plan import Masks, RowLogprobs, StepResult
from quire.errors import ConfigError
from quire.memory import rows_at_once
from quire.sampling.constrain import ConstrainedRows, open_masks
from quire.sampling.counts import Counts
from quire.sampling.logit_adjustments import REMOVING, adjust
from quire.sampling.logits_processors import ProcessorBatch
from quire.sampling.logprobs import append_listed, row_logprobs
from quire.sampling.random import SamplingTensors, floors, sample, uniform
from quire.sampling.rows import LIMITED, LISTED, LOGPROBS, PENALTIES, RANDOM, History, Ints, SamplingRows
from quire.sampling.transfer import take_rows, to_device

Resample = Callable[[Masks, Ints], Tensor | None]
"""Function that samples again under grammar masks. It gets the masks and each row's first position in the
batch, and returns the token ids, or None if it does not support the step."""
_FREE = Masks()
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


@dataclass(slots=True)
class Sampled:
    """Sampled tokens of a step, which are still on the device, and the other fields of its `StepResult`."""

    token_ids: Tensor
    """[N] int64"""
    logprobs: dict[int, list[RowLogprobs]] = field(default_factory=dict)
    """Logprobs of each sampled token, by row."""
    prompt_logprobs: dict[int, list[RowLogprobs]] = field(default_factory=dict)
    sampling_masks: dict[int, list[list[int]]] = field(default_factory=dict)
    """Token ids that could have been sampled for each token, by row; empty if requests do not return them."""
    aligned: dict[int, list[int]] = field(default_factory=dict)
    """By row, the index of the encoder output (audio frame) at which each token of a transcript begins; only
    of rows whose transcript is aligned with the audio in this step."""
    routes: tuple[Tensor, Tensor] | None = None
    """Fields of `StepRoutes` (cache slots and expert ids of the step's tokens) in host memory, complete when
    the sampled tokens are; None if requests do not return expert ids."""
    counts: Counts | None = None
    """Token counts for penalties; of rows with draft tokens they include all sampled tokens, as if
    accepted."""

    def result(self, rows: NDArray[Any], token_ids: Ints, counts: Ints) -> StepResult:
        """Return the step's result from `token_ids` in host memory. `counts` are the numbers of accepted
        tokens of `rows`; empty if each row has one."""
        if len(counts) and self.logprobs:
            count_of = dict(zip(rows.tolist(), counts.tolist(), strict=True))
            self.logprobs = {row: values[: count_of[row]] for row, values in self.logprobs.items()}
        logprobs = self.logprobs, self.prompt_logprobs
        routes = None if self.routes is None else StepRoutes(*(part.numpy() for part in self.routes))
        return StepResult(
            token_ids,
            counts,
            *logprobs,
            aligned=self.aligned,
            routes=routes,
            sampling_masks=self.sampling_masks,
        )


class Sampler:
    """Applies the parameters of rows, in vLLM's order, and samples greedily or randomly."""

    def __init__(
        self,
        vocab: int,
        device: torch.device,
        logprobs_mode: str = "raw_logprobs",
        sample: Callable[[Tensor, SamplingTensors], Tensor] | None = None,
        counts: Counts | None = None,
        processors: ProcessorBatch | None = None,
        returns_mask: bool = False,
    ) -> None:
        if logprobs_mode not in LOGPROBS_MODES:
            raise ConfigError(f"unknown logprobs_mode {logprobs_mode!r}; known: {', '.join(LOGPROBS_MODES)}")
        self.vocab = vocab
        self.device = device
        self.mode = logprobs_mode
        self.sample = sample
        """Kernel that samples token ids [N] from logits [N, V]; None to sample by torch operations."""
        self.counts = counts
        """Token counts on the device for penalties; None if the host always has the latest tokens."""
        self.processors = processors
        """Custom logits processors; None without any."""
        self.returns_mask = returns_mask
        """Whether `Sampled.sampling_masks` is returned, which needs a logprobs_mode of processed values."""
        self.constrain = open_masks(device)
        self.raw = logprobs_mode.startswith("raw")

    def __call__(
        self,
        logits: Tensor,
        rows: Ints,
        state: SamplingRows,
        tokens: Ints,
        num_tokens: Ints,
        prompt_lens: Ints,
        sampled_in_graph: Tensor | None = None,
        tensors: SamplingTensors | None = None,
        masks: Masks = _FREE,
        resample: Resample | None = None,
    ) -> Sampled:
        """Sample from `logits` [N, V] for `rows` [N]. The logits may be changed in place. V exceeds the
        vocabulary if adapters add tokens.

        `tokens` [max_rows, max_len], `num_tokens` [max_rows] and `prompt_lens` [max_rows] are by row;
        num_tokens is the position of the new token. A row with draft tokens occurs several times in
        succession, and samples at successive positions, as if its drafts were accepted. `sampled_in_graph`
        are the tokens that `self.sample` gave for the unchanged logits, for rows without special features.
        `tensors` are the parameters of N rows on the device. `masks` constrain some of the rows, and are
        applied first. `resample` may mask and sample at once for rows without special features.
        """
        assert len(logits) == len(rows) and logits.shape[1] >= self.vocab
        if not len(rows):
            return Sampled(torch.empty(0, dtype=torch.int64))
        special = state.special(rows) or self.processors is not None or self.returns_mask
        resampled = None if special or resample is None else resample(masks, state.places(rows))
        if resampled is not None:
            return Sampled(resampled)
        masks.wait_for_bits()
        if len(masks.rows):
            self.constrain(logits, masks, state.places(rows))
        elif not special and sampled_in_graph is not None:
            return Sampled(sampled_in_graph)
        if not special and self.sample is not None and tensors is not None:
            return Sampled(self.sample(logits, tensors))
        history = History(tokens, num_tokens, prompt_lens)
        step = rows_at_once(self.vocab) if self.processors is None else len(rows)
        if len(rows) <= step and not (rows[1:] == rows[:-1]).any():
            return self._sample_rows(logits, rows, state, history, tensors, masks.rows)
        return self._sample_in_parts(logits, rows, state, history, tensors, masks)

    def _sample_in_parts(
        self,
        logits: Tensor,
        rows: Ints,
        state: SamplingRows,
        history: History,
        tensors: SamplingTensors | None,
        masks: Masks,
    ) -> Sampled:
        """Sample the positions of a step in several parts. This is needed if there are more rows than
        `rows_at_once`, or if rows have several samples (draft tokens): the first sample of every row comes
        before the second of any row."""
        sampled = Sampled(torch.empty(len(rows), dtype=torch.int64, device=self.device))
        sampled.counts = self.counts
        draws, step = _draws(rows), rows_at_once(self.vocab)
        for draw in range(int(draws.max()) + 1):
            places = np.flatnonzero(draws == draw)
            constrained = masks.rows[masks.sample_index == draw] if len(masks.sample_index) else masks.rows
            for at in (places[start : start + step] for start in range(0, len(places), step)):
                index = to_device(at, self.device)
                columns = tensors and SamplingTensors(*(column.index_select(0, index) for column in tensors))
                moved = history._replace(num_tokens=history.num_tokens + draw)
                part = self._sample_rows(
                    logits.index_select(0, index), rows[at], state, moved, columns, constrained
                )
                sampled.token_ids.index_copy_(0, index, part.token_ids)
                for row, logprobs in part.logprobs.items():
                    sampled.logprobs.setdefault(row, []).extend(logprobs)
                sampled.sampling_masks |= part.sampling_masks
        return sampled

    def _sample_rows(
        self,
        logits: Tensor,
        rows: Ints,
        state: SamplingRows,
        history: History,
        tensors: SamplingTensors | None,
        constrained: Ints,
    ) -> Sampled:
        """Sample rows that may use any sampling features. The caller limits the number of rows, and so the
        memory of the copies."""
        logits = logits.float()
        constrained_rows = None
        if len(constrained):
            is_reduced = (state.flags[rows] & REMOVING) != 0
            is_reduced |= self.processors is not None  # which may remove any token
            reduced = np.flatnonzero(np.isin(rows, constrained) & is_reduced)
            constrained_rows = ConstrainedRows(logits, reduced) if len(reduced) else None
        with_logprobs = np.flatnonzero(state.flags[rows] & LOGPROBS)
        index = to_device(with_logprobs, self.device)
        raw = logits.index_select(0, index) if self.raw and len(with_logprobs) else None
        logits = adjust(logits, rows, state, history, self.counts, self._process)
        if constrained_rows is not None:
            constrained_rows.restore(logits)
        is_late = self.processors is not None and len(self.processors.invariant) > 0
        if self.sample is not None and tensors is not None and self.raw and not is_late:
            token_ids = self.sample(logits, tensors)
        else:
            token_ids = self._sample(logits, rows, state, history.num_tokens)
        if self.counts is not None and (state.flags[rows] & PENALTIES).any():
            self.counts.add(rows, state, token_ids)
        sampled = Sampled(token_ids)
        if len(with_logprobs):
            reported = logits.index_select(0, index) if raw is None else raw
            chosen = rows[with_logprobs]
            results = self._logprobs(reported, token_ids.index_select(0, index), chosen, state)
            sampled.logprobs = dict(zip(chosen.tolist(), ([result] for result in results), strict=True))
        if self.returns_mask:
            places, ids = (part.cpu().numpy() for part in (logits > -torch.inf).nonzero(as_tuple=True))
            parts = np.split(ids, np.searchsorted(places, np.arange(1, len(rows))))
            sampled.sampling_masks = {
                row: [part.tolist()] for row, part in zip(rows.tolist(), parts, strict=True)
            }
        return sampled

    @property
    def _process(self) -> Callable[[Tensor], Tensor] | None:
        """Return a function that applies the processors that may change the most likely token, or None."""
        processors = self.processors
        return None if processors is None else lambda logits: processors.apply(logits, processors.others)

    def _sample(self, logits: Tensor, rows: Ints, state: SamplingRows, num_tokens: Ints) -> Tensor:
        """Return token ids [N] int64; leave in `logits` the values that each token was sampled from."""
        random = np.flatnonzero(state.flags[rows] & RANDOM)
        if not len(random):
            return _best(logits)
        logits /= to_device(state.temperature[rows][:, None], self.device)  # 1 for greedy rows
        if self.processors is not None:
            processed = self.processors.apply(logits, self.processors.invariant)
            logits = logits if processed is logits else logits.copy_(processed)
        if len(random) == len(rows):
            return self._sample_random(logits, rows, state, num_tokens)
        token_ids = torch.empty(len(rows), dtype=torch.int64, device=self.device)
        at_random = to_device(random, self.device)
        at_best = to_device(np.flatnonzero(~state.flags[rows] & RANDOM), self.device)
        token_ids[at_best] = _best(logits.index_select(0, at_best))
        part = logits.index_select(0, at_random)
        token_ids[at_random] = self._sample_random(part, rows[random], state, num_tokens)
        if not self.raw:
            logits.index_copy_(0, at_random, part)
        return token_ids

    def _sample_random(self, logits: Tensor, rows: Ints, state: SamplingRows, num_tokens: Ints) -> Tensor:
        limited = np.flatnonzero(state.flags[rows] & LIMITED)
        if len(limited):
            self._limit(logits, limited, rows[limited], state)
        return sample(logits, to_device(uniform(state.seed[rows], num_tokens[rows]), self.device))

    def _limit(self, logits: Tensor, at: NDArray[np.intp], rows: Ints, state: SamplingRows) -> None:
        part = take_rows(logits, at)
        floor = floors(part, state.top_k[rows], state.top_p[rows], state.min_p[rows])
        part.masked_fill_(part < floor, -torch.inf)
        if part is not logits:
            logits.index_copy_(0, to_device(at, self.device), part)

    def _logprobs(
        self, logits: Tensor, token_ids: Tensor, rows: Ints, state: SamplingRows
    ) -> list[RowLogprobs]:
        ends = state.ends[rows] if logits.shape[1] > state.vocab else None
        results = row_logprobs(logits, token_ids, state.num_logprobs[rows], self.mode, ends)
        if (state.flags[rows] & LISTED).any():
            at, listed, _ = state.listed.select(state.places(rows))
            places, ids = (to_device(part.astype(np.int64), self.device) for part in (at, listed))
            append_listed(results, logits, places, ids, self.mode)
        return results


def _draws(rows: Ints) -> NDArray[np.intp]:
    """Return for each element of `rows` its index among the samples of the same row, which are adjacent."""
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    indices: NDArray[np.intp] = np.arange(len(rows)) - np.repeat(starts, np.diff(starts, append=len(rows)))
    return indices


def _best(logits: Tensor) -> Tensor:
    """Return [N], the most likely tokens. `max` is several times faster than `argmax` on a CPU."""
    return logits.max(dim=-1).indices
