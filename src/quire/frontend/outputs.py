"""Conversion of the tokens of the engine core to text, logprobs and RequestOutputs."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from quire.data.lora import LoRARequest
from quire.data.outputs import FlatLogprobs, Logprob, RequestOutput, SampleLogprobs, fast_instance
from quire.data.params import RequestOutputKind
from quire.data.pooling_outputs import PoolingOutput, PoolingRequestOutput
from quire.data.request import Request
from quire.data.stats import FrontStats
from quire.data.step_plan import FinishReason, RowLogprobs, StepOutput
from quire.frontend.inputs import Prompt
from quire.frontend.request_state import RequestState, SequenceState
from quire.metrics.api_keys import KeyAccount
from quire.text.detokenizer import Detokenizer, token_text
from quire.text.tokenizer import Tokenizer

T = TypeVar("T")
AnyOutput = RequestOutput | PoolingRequestOutput[PoolingOutput]
_MANY_UNREAD = 64
"""Tokens after which text is decoded even for FINAL_ONLY: a long answer is not detokenized in one step."""


@dataclass(slots=True)
class ProcessedOutputs:
    """Result of `OutputProcessor.flush`: new outputs, and sequences that stopped or failed since the last
    flush."""

    outputs: list[AnyOutput]
    stopped: list[str]
    """Sequences that reached a stop string: the core still runs them and must abort them."""
    failed: dict[str, FinishReason]
    """Failed requests, each with the finish reason of one of its sequences."""
    stats: FrontStats


class OutputProcessor:
    """The open requests of one engine link and their outputs. `add_step` adds the output of one step, at
    little cost; `flush` builds the outputs of all added steps, so that quick steps share one output."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        stream_interval: int = 1,
        tokenizer_of: Callable[[LoRARequest | None], Tokenizer | None] | None = None,
    ) -> None:
        """Create a processor without requests. `stream_interval` is the number of tokens per streamed output;
        `tokenizer_of` returns the tokenizer of a LoRA adapter."""
        self.tokenizer = tokenizer
        self._tokenizer_of = tokenizer_of or (lambda lora: tokenizer)
        self.stream_interval = stream_interval
        self._sequences: dict[str, SequenceState] = {}
        self._parents: dict[str, RequestState] = {}
        self._updated: list[SequenceState] = []
        self._stopped: list[str] = []
        self._stats = FrontStats()

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._parents

    def add(
        self,
        request_id: str,
        prompt: Prompt,
        requests: list[Request],
        put_text: Callable[[str, int], None] | None = None,
        account: KeyAccount | None = None,
    ) -> RequestState:
        """Register the sequences of one prompt and return their state. If there is a single sequence that
        streams only text, its deltas, except the first and the last, go to `put_text` as the text and its
        number of tokens. All output tokens are counted in the `account`."""
        first = requests[0]
        if prompt.media is not None:  # media must not be kept alive by the cycle of states
            prompt = replace(prompt, media=None, prepared=())
        interval = max(self.stream_interval, first.params.stream_interval or 1)
        streams = interval == 1 and first.params.output_kind is not RequestOutputKind.FINAL_ONLY
        parent = RequestState(request_id, prompt, first.params, first.arrived_at, interval, streams)
        parent.num_open, parent.account, parent.lora = len(requests), account, first.lora
        parent.pools, parent.target = first.pooling is not None, first.target
        parent.tokenizer = self.tokenizer if first.lora is None else self._tokenizer_of(first.lora)
        if first.params.prompt_logprobs is not None:
            parent.prompt_logprobs = FlatLogprobs() if first.params.flat_logprobs else []
            parent.prompt_logprobs.append(None)
        parent.sequences = [self._sequence(request, index, parent) for index, request in enumerate(requests)]
        if parent.streams and len(requests) == 1 and parent.sequences[0].is_plain:
            parent.put_text = put_text
        self.attach(parent)
        return parent

    def attach(self, state: RequestState) -> None:
        """Register a request that is new, or was detached from this processor or another processor."""
        self._parents[state.request_id] = state
        self._sequences |= {sequence.id: sequence for sequence in state.sequences if sequence.finish is None}
        self._updated += [sequence for sequence in state.sequences if sequence.updated]

    def detach(self, request_ids: Iterable[str]) -> None:
        """Remove requests that another core will resume; their states are kept."""
        detached = {self._parents.pop(id) for id in request_ids if id in self._parents}
        for state in detached:
            for sequence in state.sequences:
                self._sequences.pop(sequence.id, None)
        self._updated = [sequence for sequence in self._updated if sequence.parent not in detached]

    def _sequence(self, request: Request, index: int, parent: RequestState) -> SequenceState:
        params, detokenizer = request.params, None
        if params.detokenize and parent.tokenizer is not None:
            detokenizer = Detokenizer(
                parent.tokenizer,
                request.tokens if request.embeds is None else (),
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                stop=params.stop or (),
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        logprobs: SampleLogprobs | None = None
        if params.logprobs is not None or params.logprob_token_ids is not None:
            logprobs = FlatLogprobs() if params.flat_logprobs else []
        has_stops = detokenizer is not None and bool(params.stop)
        return SequenceState(request.id, index, parent, detokenizer, logprobs, has_stops)

    def sequences_of(self, request_ids: list[str]) -> list[str]:
        parents = [self._parents[id] for id in request_ids if id in self._parents]
        return [sequence.id for parent in parents for sequence in parent.sequences]

    # ---- input

    def process(self, step: StepOutput) -> ProcessedOutputs:
        """Add one step and flush."""
        self.add_step(step)
        return self.flush()

    def add_step(self, step: StepOutput) -> None:
        """Add the output of one step; unknown sequences are ignored."""
        sequences, updated, stats, at = self._sequences, self._updated, self._stats, step.at
        for sequence, run in _known(sequences, step.admitted):
            sequence.num_cached, sequence.num_created = run.num_cached, run.num_created
            sequence.miss, times = run.miss, sequence.times
            times.queued_at, times.scheduled_at = run.queued_at, run.scheduled_at
            times.num_from_host, times.num_from_disk = run.num_from_host, run.num_from_disk
            times.num_from_remote = run.num_from_remote
        for sequence, seconds in _known(sequences, step.resumed):
            sequence.times.preempted_s += seconds
            sequence.times.num_preemptions += 1
        for sequence, seconds in _known(sequences, step.shares):
            sequence.times.step_share_s += seconds
        for sequence, count in _known(sequences, step.drafted):
            sequence.times.num_drafts += 1
            sequence.times.num_draft_tokens += count
        for sequence, positions in _known(sequences, step.prompt_logprobs):
            parent = sequence.parent
            assert parent.prompt_logprobs is not None
            for position in positions:
                parent.prompt_logprobs.append(_position_of(position, parent.tokenizer, ranked=True))
        for sequence, begins in _known(sequences, step.aligned):
            sequence.parent.aligned = begins
        if step.sampling_masks or step.routed:
            self._add_training_outputs(step)
        for sequence, positions in _known(sequences, step.logprobs):
            for position in positions:
                self._add_logprobs(sequence, position)
        for sequence, vector in _known(sequences, step.pooled):
            sequence.pooled = vector.array()
            sequence.times.first_token_at = sequence.times.last_token_at = at
        watched: list[SequenceState] = []
        for id, new in step.by_request():
            if id not in sequences:
                continue
            sequence = sequences[id]
            sequence.token_ids += new
            stats.num_tokens += len(new)
            times = sequence.times
            times.num_accepted += len(new) - 1
            if times.first_token_at == 0.0:
                times.first_token_at = at
                if sequence.index == 0:
                    stats.first_token_s.append(time.time() - sequence.parent.arrived_at)
            else:
                stats.between_tokens_s.append(at - times.last_token_at)
            times.last_token_at = at
            if not sequence.updated:
                sequence.updated = True
                updated.append(sequence)
            if sequence.has_stops:
                watched.append(sequence)
        self._end(step.finished, watched)

    def _add_training_outputs(self, step: StepOutput) -> None:
        """Add the sampling masks (the token ids that could be sampled) and the MoE experts of one step to its
        sequences."""
        for sequence, masks in _known(self._sequences, step.sampling_masks):
            sequence.sampling_masks += masks
        for sequence, rows in _known(self._sequences, step.routed):
            sequence.routed.append(rows.array())

    def _end(self, finished: dict[str, FinishReason], watched: list[SequenceState]) -> None:
        """End the sequences in `finished`, which the core finished (by id), and those in `watched` that
        reached a stop string."""
        ended = []
        for id, finish in finished.items():
            if (sequence := self._sequences.pop(id, None)) is not None:
                sequence.finish = finish
                ended.append(sequence)
        for sequence in watched:
            if (stop := sequence.find_stop()) is not None:
                known = sequence.finish
                if known is None:
                    del self._sequences[sequence.id]
                    self._stopped.append(sequence.id)
                    ended.append(sequence)
                known = known or FinishReason("stop")
                sequence.finish = FinishReason(
                    "stop", stop, known.num_preemptions, kv_transfer=known.kv_transfer
                )
        for sequence in ended:
            sequence.parent.num_open -= 1
            if not sequence.updated:
                sequence.updated = True
                self._updated.append(sequence)
            assert sequence.finish is not None
            self._stats.finished.append(sequence.finished_facts(sequence.finish))
            if sequence.finish.reason == "error":
                sequence.parent.failed = sequence.finish

    def _add_logprobs(self, sequence: SequenceState, position: RowLogprobs) -> None:
        assert sequence.logprobs is not None
        sequence.cumulative_logprob += position.logprobs[0]
        ranked = sequence.parent.params.logprob_token_ids is None
        sequence.logprobs.append(_position_of(position, sequence.parent.tokenizer, ranked=ranked))

    # ---- output

    def flush(self) -> ProcessedOutputs:
        """Build the outputs that are due from all steps that were added since the last call."""
        due: dict[RequestState, list[SequenceState]] = {}
        waiting: list[SequenceState] = []
        for sequence in self._updated:
            parent = sequence.parent
            if parent.prompt_logprobs is not None and parent.waits:
                waiting.append(sequence)
                continue
            sequence.updated = False
            if parent.account is not None:
                parent.account.add_output(len(sequence.token_ids) - sequence.num_counted)
                sequence.num_counted = len(sequence.token_ids)
            if parent.put_text is not None and sequence.num_sent and sequence.finish is None:
                start, sequence.num_sent = sequence.num_sent, len(sequence.token_ids)
                parent.put_text(sequence.read_text(), sequence.num_sent - start)
            elif parent.streams or self._is_due(sequence):
                due.setdefault(parent, []).append(sequence)
        outputs: list[AnyOutput] = [
            self._pooled_output(parent) if parent.pools else self._request_output(parent, sequences)
            for parent, sequences in due.items()
        ]
        failed = {parent.request_id: parent.failed for parent in due if parent.failed is not None}
        processed = ProcessedOutputs(outputs, self._stopped, failed, self._stats)
        self._updated, self._stopped, self._stats = waiting, [], FrontStats()
        return processed

    def _is_due(self, sequence: SequenceState) -> bool:
        parent = sequence.parent
        if parent.params.output_kind is not RequestOutputKind.FINAL_ONLY:
            return sequence.is_due()
        if len(sequence.token_ids) - sequence.num_read >= _MANY_UNREAD and sequence.finish is None:
            sequence.text += sequence.read_text()
        return not parent.num_open

    def _pooled_output(self, parent: RequestState) -> PoolingRequestOutput[PoolingOutput]:
        (sequence,) = parent.sequences
        self._remove(parent)
        return PoolingRequestOutput(
            request_id=parent.request_id,
            outputs=PoolingOutput(np.empty(0, np.float32) if sequence.pooled is None else sequence.pooled),
            prompt_token_ids=parent.prompt.token_ids,
            num_cached_tokens=sequence.num_cached,
            finished=True,
        )

    def _request_output(self, parent: RequestState, sequences: list[SequenceState]) -> RequestOutput:
        kind, finished = parent.params.output_kind, not parent.num_open
        is_delta = kind is RequestOutputKind.DELTA
        sequences = parent.sequences if kind is RequestOutputKind.FINAL_ONLY else sequences
        output = fast_instance(
            RequestOutput,
            request_id=parent.request_id,
            prompt=parent.prompt.text,
            prompt_token_ids=parent.prompt.token_ids,
            prompt_logprobs=parent.prompt_logprobs,
            aligned=parent.aligned,
            outputs=[s.delta_output() if is_delta else s.cumulative_output() for s in sequences],
            finished=finished,
            num_cached_tokens=parent.sequences[0].num_cached,
            num_cache_creation_tokens=parent.sequences[0].num_created,
        )
        if parent.lora is not None:
            output.lora_request = parent.lora
        if (finish := parent.sequences[0].finish) is not None and finish.kv_transfer is not None:
            output.kv_transfer_params = finish.kv_transfer
        if is_delta:
            parent.prompt_logprobs = None  # only the first delta has them
        if finished:
            output.metrics = parent.stats()
            self._remove(parent)
        return output

    def _remove(self, parent: RequestState) -> None:
        """Remove a request and break its reference cycle, so that it is freed at once."""
        self._parents.pop(parent.request_id, None)
        parent.sequences = []


def _known(
    sequences: Mapping[str, SequenceState], values: Mapping[str, T]
) -> Iterator[tuple[SequenceState, T]]:
    """Yield (sequence, value) for each sequence id in `values` that is known; other ids are skipped."""
    return ((sequences[id], value) for id, value in values.items() if id in sequences)


def _position_of(row: RowLogprobs, tokenizer: Tokenizer | None, *, ranked: bool) -> dict[int, Logprob]:
    """Return the logprobs of one position by token: the sampled token first, then the best by rank."""

    def text(token_id: int) -> str | None:
        return None if tokenizer is None else token_text(tokenizer, token_id)

    chosen, ids, values = row.token_ids[0], row.token_ids, row.logprobs
    position = {chosen: Logprob(values[0], row.rank, text(chosen))}
    for rank in range(1, len(ids)):
        if ids[rank] != chosen:
            position[ids[rank]] = Logprob(values[rank], rank if ranked else None, text(ids[rank]))
    return position
