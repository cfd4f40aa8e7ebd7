"""Outputs: tokens of a step become text, logprobs and RequestOutputs, per request and per sequence of it."""

import time
from dataclasses import dataclass, field

from quire.data.outputs import (
    CompletionOutput,
    FlatLogprobs,
    Logprob,
    PromptLogprobs,
    RequestOutput,
    RequestStateStats,
    SampleLogprobs,
)
from quire.data.params import RequestOutputKind, SamplingParams
from quire.data.plan import Finish, RowLogprobs, StepOutput
from quire.data.request import Request
from quire.data.stats import FinishedSequence, FrontStats, Timeline
from quire.frontend.inputs import Prompt
from quire.text.detokenizer import Detokenizer, token_text
from quire.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Processed:
    """What a step brought to the outside."""

    outputs: list[RequestOutput]
    stopped: list[str]
    """Sequences that met a stop string: the core still runs them and has to be told."""
    stats: FrontStats


@dataclass(slots=True)
class _Sequence:
    """One of the n continuations of a prompt."""

    id: str
    index: int
    parent: "_Parent"
    detokenizer: Detokenizer | None
    logprobs: SampleLogprobs | None
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    times: Timeline = field(default_factory=Timeline)
    num_cached: int = 0
    finish: Finish | None = None
    num_sent: int = 0
    """Tokens already given out."""

    def is_due(self, interval: int) -> bool:
        """Whether it has something to say: a first token, an end, or as many tokens as make a chunk."""
        return self.finish is not None or not self.num_sent or len(self.token_ids) >= self.num_sent + interval

    text: str = ""
    """What has been shown: text that may yet turn out to be part of a stop string is held back."""

    def take_text(self) -> str:
        """The text to show now that was not shown before."""
        return self.detokenizer.take_delta(final=self.finish is not None) if self.detokenizer else ""


@dataclass(slots=True)
class _Parent:
    """A request as the user made it."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    arrived_at: float
    sequences: list[_Sequence] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None

    def take_prompt_logprobs(self) -> PromptLogprobs | None:
        """With the first delta, and only with that."""
        taken, self.prompt_logprobs = self.prompt_logprobs, None
        return taken

    @property
    def finished(self) -> bool:
        return all(sequence.finish is not None for sequence in self.sequences)


class OutputProcessor:
    def __init__(self, tokenizer: Tokenizer | None, *, stream_interval: int = 1) -> None:
        self.tokenizer = tokenizer
        self.stream_interval = stream_interval
        self._sequences: dict[str, _Sequence] = {}
        self._parents: dict[str, _Parent] = {}

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._parents

    def add(self, request_id: str, prompt: Prompt, requests: list[Request]) -> None:
        """Expect outputs of these sequences of one prompt."""
        first = requests[0]
        parent = _Parent(request_id, prompt, first.params, first.arrived_at)
        if first.params.prompt_logprobs is not None:
            parent.prompt_logprobs = FlatLogprobs() if first.params.flat_logprobs else []
            parent.prompt_logprobs.append(None)
        for index, request in enumerate(requests):
            sequence = self._sequence(request, index, parent)
            parent.sequences.append(sequence)
            self._sequences[request.id] = sequence
        self._parents[request_id] = parent

    def _sequence(self, request: Request, index: int, parent: _Parent) -> _Sequence:
        params, detokenizer = request.params, None
        if params.detokenize and self.tokenizer is not None:
            detokenizer = Detokenizer(
                self.tokenizer,
                request.tokens,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                stop=params.stop or (),
                include_stop_str_in_output=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )
        logprobs: SampleLogprobs | None = None
        if params.logprobs is not None or params.logprob_token_ids is not None:
            logprobs = FlatLogprobs() if params.flat_logprobs else []
        return _Sequence(request.id, index, parent, detokenizer, logprobs)

    def sequences_of(self, request_ids: list[str]) -> list[str]:
        """The ids that the core knows these requests by."""
        parents = [self._parents[id] for id in request_ids if id in self._parents]
        return [sequence.id for parent in parents for sequence in parent.sequences]

    # ---- a step

    def process(self, step: StepOutput) -> Processed:
        """Take in one step of the core. Sequences that nobody waits for any more are passed over."""
        touched: dict[str, _Sequence] = {}
        stopped: list[str] = []
        stats = FrontStats()
        for id, run in step.admitted.items():
            if (sequence := self._sequences.get(id)) is not None:
                sequence.num_cached = run.num_cached
                sequence.times.queued_at, sequence.times.scheduled_at = run.queued_at, run.scheduled_at
        for id, positions in step.prompt_logprobs.items():
            if (sequence := self._sequences.get(id)) is not None:
                self._add_prompt_logprobs(sequence.parent, positions)
        for id, token_id in zip(step.request_ids, step.token_ids, strict=True):
            if (sequence := self._sequences.get(id)) is None:
                continue
            touched[id] = sequence
            self._stamp(sequence, step.at, stats)
            finish = step.finished.get(id)
            if (logprobs := step.logprobs.get(id)) is not None:
                self._add_logprobs(sequence, logprobs)
            if (met := self._add_token(sequence, token_id, finish)) is not None:
                if finish is None:
                    stopped.append(id)
                step.finished[id] = Finish("stop", met, finish.num_preemptions if finish else 0)
        for id, finish in step.finished.items():
            if (sequence := self._sequences.pop(id, None)) is not None:
                sequence.finish = finish
                touched[id] = sequence
                stats.finished.append(_facts(sequence, finish))
        return Processed(self._outputs(touched), stopped, stats)

    def _stamp(self, sequence: _Sequence, at: float, stats: FrontStats) -> None:
        times = sequence.times
        stats.num_tokens += 1
        if times.first_token_at == 0.0:
            times.first_token_at = at
            if sequence.index == 0:
                stats.first_token_s.append(time.time() - sequence.parent.arrived_at)
        else:
            stats.between_tokens_s.append(at - times.last_token_at)
        times.last_token_at = at

    def _add_token(self, sequence: _Sequence, token_id: int, finish: Finish | None) -> str | None:
        """Append a token; the stop string that it completed, if any."""
        sequence.token_ids.append(token_id)
        detokenizer = sequence.detokenizer
        if detokenizer is None:
            return None
        # A token that ended the sequence as a stop is part of the text only if it was asked for.
        silent = (
            finish is not None
            and finish.reason == "stop"
            and not sequence.parent.params.include_stop_str_in_output
        )
        return detokenizer.push(() if silent else (token_id,), final=finish is not None)

    def _add_logprobs(self, sequence: _Sequence, found: RowLogprobs) -> None:
        assert sequence.logprobs is not None
        sequence.cumulative_logprob += found.logprobs[0]
        sequence.logprobs.append(
            self._position(found, ranked=sequence.parent.params.logprob_token_ids is None)
        )

    def _add_prompt_logprobs(self, parent: _Parent, positions: list[RowLogprobs]) -> None:
        assert parent.prompt_logprobs is not None
        for found in positions:
            parent.prompt_logprobs.append(self._position(found, ranked=True))

    def _position(self, found: RowLogprobs, *, ranked: bool) -> dict[int, Logprob]:
        """The chosen token first; the others are the best in order, so their place is their rank."""
        chosen, ids, values = found.token_ids[0], found.token_ids, found.logprobs
        position = {chosen: Logprob(values[0], found.rank, self._token_text(chosen))}
        for rank in range(1, len(ids)):
            if ids[rank] != chosen:
                position[ids[rank]] = Logprob(
                    values[rank], rank if ranked else None, self._token_text(ids[rank])
                )
        return position

    def _token_text(self, token_id: int) -> str | None:
        return None if self.tokenizer is None else token_text(self.tokenizer, token_id)

    # ---- what the user sees

    def _outputs(self, touched: dict[str, _Sequence]) -> list[RequestOutput]:
        by_parent: dict[str, list[_Sequence]] = {}
        for sequence in touched.values():
            by_parent.setdefault(sequence.parent.request_id, []).append(sequence)
        outputs = []
        for request_id, sequences in by_parent.items():
            parent = sequences[0].parent
            if parent.finished:
                del self._parents[request_id]
            if parent.params.output_kind is RequestOutputKind.FINAL_ONLY:
                if not parent.finished:
                    continue
                sequences = parent.sequences
            elif (interval := max(self.stream_interval, parent.params.stream_interval or 1)) > 1:
                sequences = [each for each in sequences if each.is_due(interval)]
                if not sequences:
                    continue
            outputs.append(self._request_output(parent, sequences))
        return outputs

    def _request_output(self, parent: _Parent, sequences: list[_Sequence]) -> RequestOutput:
        deltas = parent.params.output_kind is RequestOutputKind.DELTA
        return RequestOutput(
            request_id=parent.request_id,
            prompt=parent.prompt.text,
            prompt_token_ids=parent.prompt.token_ids,
            prompt_logprobs=parent.take_prompt_logprobs() if deltas else parent.prompt_logprobs,
            outputs=[self._delta(each) if deltas else self._whole(each) for each in sequences],
            finished=parent.finished,
            metrics=_stats(parent) if parent.finished else None,
            num_cached_tokens=parent.sequences[0].num_cached,
        )

    def _whole(self, sequence: _Sequence) -> CompletionOutput:
        final = sequence.parent.finished
        sequence.num_sent = len(sequence.token_ids)
        sequence.text += sequence.take_text()
        return self._completion(
            sequence,
            sequence.text,
            sequence.token_ids if final else sequence.token_ids.copy(),
            sequence.logprobs if final or sequence.logprobs is None else sequence.logprobs[:],
        )

    def _delta(self, sequence: _Sequence) -> CompletionOutput:
        start, sequence.num_sent = sequence.num_sent, len(sequence.token_ids)
        logprobs = None if sequence.logprobs is None else sequence.logprobs[start:]
        return self._completion(sequence, sequence.take_text(), sequence.token_ids[start:], logprobs)

    def _completion(
        self, sequence: _Sequence, text: str, token_ids: list[int], logprobs: SampleLogprobs | None
    ) -> CompletionOutput:
        finish = sequence.finish
        return CompletionOutput(
            index=sequence.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=None if sequence.logprobs is None else sequence.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=finish.reason if finish else None,
            stop_reason=finish.stop_reason if finish else None,
        )


def _facts(sequence: _Sequence, finish: Finish) -> FinishedSequence:
    parent = sequence.parent
    return FinishedSequence(
        reason=finish.reason,
        num_prompt_tokens=len(parent.prompt.token_ids),
        num_output_tokens=len(sequence.token_ids),
        num_cached=sequence.num_cached,
        longest=max(len(each.token_ids) for each in parent.sequences) if parent.finished else None,
        params=parent.params,
        arrived_at=parent.arrived_at,
        times=sequence.times,
    )


def _stats(parent: _Parent) -> RequestStateStats:
    first = parent.sequences[0].times
    return RequestStateStats(
        num_generation_tokens=sum(len(sequence.token_ids) for sequence in parent.sequences),
        arrival_time=parent.arrived_at,
        queued_ts=first.queued_at,
        scheduled_ts=first.scheduled_at,
        first_token_ts=first.first_token_at,
        last_token_ts=max(sequence.times.last_token_at for sequence in parent.sequences),
        first_token_latency=max(first.first_token_at - first.queued_at, 0.0),
    )
