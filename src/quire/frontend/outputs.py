"""Outputs: tokens of the core become text, logprobs and RequestOutputs, by request and by sequence of it."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from quire.data.lora import LoRARequest
from quire.data.outputs import (
    CompletionOutput,
    FlatLogprobs,
    PromptLogprobs,
    RequestOutput,
    RequestStateStats,
    SampleLogprobs,
    light,
)
from quire.data.params import RequestOutputKind, SamplingParams
from quire.data.plan import Finish, RowLogprobs, StepOutput
from quire.data.pooled_outputs import PoolingOutput, PoolingRequestOutput
from quire.data.pooling import Floats
from quire.data.request import Request
from quire.data.stats import FinishedSequence, FrontStats, Timeline
from quire.frontend.inputs import Prompt
from quire.frontend.logprobs import position_of
from quire.metrics.keys import Account
from quire.text.detokenizer import Detokenizer
from quire.text.tokenizer import Tokenizer

AnyOutput = RequestOutput | PoolingRequestOutput[PoolingOutput]
_MANY_UNREAD = 64
"""So many tokens become text even if nobody wants it before the end: a long answer is not read in one go."""


@dataclass(slots=True)
class Processed:
    """What has come to the outside since the last time."""

    outputs: list[AnyOutput]
    stopped: list[str]
    """Sequences that met a stop string: the core still runs them and has to be told."""
    failed: dict[str, Finish]
    """The requests that the core failed on, each with the end of one of its sequences."""
    stats: FrontStats


@dataclass(slots=True, eq=False)
class _Sequence:
    """One of the n continuations of a prompt."""

    id: str
    index: int
    parent: "_Parent"
    detokenizer: Detokenizer | None
    logprobs: SampleLogprobs | None
    has_stops: bool
    """Whether its text must be looked at token by token."""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    times: Timeline = field(default_factory=Timeline)
    num_cached: int = 0
    finish: Finish | None = None
    num_read: int = 0
    """Tokens that have become text."""
    num_sent: int = 0
    """Tokens already given out."""
    num_counted: int = 0
    """Tokens already counted in the account of the request's key."""
    touched: bool = False
    """Whether something came since the last flush."""
    pooled: Floats | None = None
    """What a pooling model made of the prompt."""
    text: str = ""
    """What has been shown: text that may yet turn out to be part of a stop string is held back."""

    @property
    def is_plain(self) -> bool:
        """Whether its deltas are text and nothing else."""
        delta = self.parent.params.output_kind is RequestOutputKind.DELTA
        return delta and self.logprobs is None and not self.has_stops and self.detokenizer is not None

    def is_due(self) -> bool:
        """Whether it has something to say: a first token, an end, or as many tokens as make a chunk."""
        return (
            self.finish is not None
            or not self.num_sent
            or len(self.token_ids) >= self.num_sent + self.parent.interval
        )

    def look_for_stops(self) -> str | None:
        """The stop string that the new tokens completed. What came behind it is dropped."""
        assert self.detokenizer is not None
        met = self.detokenizer.push(self._unread(), final=self.finish is not None)
        if met is not None:
            self._cut(self.detokenizer.num_tokens)
        return met

    def _cut(self, length: int) -> None:
        """To so many tokens."""
        if self.logprobs is not None:
            chosen = (next(iter(each.values())) for each in self.logprobs[length:] if each)
            self.cumulative_logprob -= sum(each.logprob for each in chosen)
            self.logprobs = self.logprobs[:length]
        del self.token_ids[length:]
        self.num_read = length

    def take_text(self) -> str:
        """The text to show now that was not shown before."""
        detokenizer, final = self.detokenizer, self.finish is not None
        if detokenizer is None:
            return ""
        return (
            detokenizer.take_delta(final) if self.has_stops else detokenizer.read(self._unread(), final=final)
        )

    def _unread(self) -> list[int]:
        """The tokens that have not become text."""
        start, self.num_read = self.num_read, len(self.token_ids)
        unread = self.token_ids[start:]
        # A token that ended the sequence as a stop is part of the text only if it was asked for.
        finish = self.finish
        stopped = finish is not None and finish.reason == "stop" and not finish.keeps_last
        if stopped and not self.parent.params.include_stop_str_in_output:
            del unread[-1:]
        return unread


@dataclass(slots=True, eq=False)
class _Parent:
    """A request as the user made it."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    arrived_at: float
    interval: int
    """Tokens that make a chunk."""
    streams: bool
    """Whether every token is shown in the moment it comes."""
    sequences: list[_Sequence] = field(default_factory=list)
    num_open: int = 0
    """Sequences that have not ended."""
    failed: Finish | None = None
    """One that ended as an error."""
    put_text: Callable[[str, int], None] | None = None
    """Where text goes that needs no output around it."""
    prompt_logprobs: PromptLogprobs | None = None
    aligned: list[int] | None = None
    pools: bool = False
    lora: LoRARequest | None = None
    tokenizer: Tokenizer | None = None
    account: Account | None = None

    @property
    def waits(self) -> bool:
        """Whether the logprobs of the prompt are still to come, which the first sequence brings: whichever
        speaks first speaks with them."""
        first = self.sequences[0]
        return not first.token_ids and first.finish is None


class OutputProcessor:
    """The requests of one front end and what has come of them. `take` notes what a step brought, at little
    cost; `flush` makes outputs of all that was noted, so that steps that come in quick succession share
    one."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        stream_interval: int = 1,
        tokenizer_of: Callable[[LoRARequest | None], Tokenizer | None] | None = None,
    ) -> None:
        """`tokenizer_of` an adapter that has one of its own."""
        self.tokenizer = tokenizer
        self._tokenizer_of = tokenizer_of or (lambda lora: tokenizer)
        self.stream_interval = stream_interval
        self._sequences: dict[str, _Sequence] = {}
        self._parents: dict[str, _Parent] = {}
        self._touched: list[_Sequence] = []
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
        account: Account | None = None,
    ) -> None:
        """Expect outputs of these sequences of one prompt. A single one that streams nothing but text may
        hand it to `put_text`, with the number of its tokens, from its second delta to the one before the
        last. All tokens are counted in the `account`."""
        first = requests[0]
        if prompt.media is not None:  # which goes with the request, and not with a cycle of objects
            prompt = replace(prompt, media=None, prepared=())
        interval = max(self.stream_interval, first.params.stream_interval or 1)
        streams = interval == 1 and first.params.output_kind is not RequestOutputKind.FINAL_ONLY
        parent = _Parent(request_id, prompt, first.params, first.arrived_at, interval, streams)
        parent.num_open, parent.account, parent.lora = len(requests), account, first.lora
        parent.pools = first.pooling is not None
        parent.tokenizer = self.tokenizer if first.lora is None else self._tokenizer_of(first.lora)
        if first.params.prompt_logprobs is not None:
            parent.prompt_logprobs = FlatLogprobs() if first.params.flat_logprobs else []
            parent.prompt_logprobs.append(None)
        parent.sequences = [self._sequence(request, index, parent) for index, request in enumerate(requests)]
        self._sequences |= {sequence.id: sequence for sequence in parent.sequences}
        if parent.streams and len(requests) == 1 and parent.sequences[0].is_plain:
            parent.put_text = put_text
        self._parents[request_id] = parent

    def _sequence(self, request: Request, index: int, parent: _Parent) -> _Sequence:
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
        return _Sequence(request.id, index, parent, detokenizer, logprobs, has_stops)

    def sequences_of(self, request_ids: list[str]) -> list[str]:
        """The ids that the core knows these requests by."""
        parents = [self._parents[id] for id in request_ids if id in self._parents]
        return [sequence.id for parent in parents for sequence in parent.sequences]

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget requests, as if they had never come."""
        for sequence in self.sequences_of(list(request_ids)):
            self._sequences.pop(sequence, None)
        dropped = {self._parents[id] for id in request_ids if id in self._parents}
        self._touched = [each for each in self._touched if each.parent not in dropped]
        for parent in dropped:
            self._forget(parent)

    # ---- what comes in

    def process(self, step: StepOutput) -> Processed:
        """One step, in and out."""
        self.take(step)
        return self.flush()

    def take(self, step: StepOutput) -> None:
        """Note one step of the core. Sequences that nobody waits for any more are passed over."""
        sequences, touched, stats, at = self._sequences, self._touched, self._stats, step.at
        for id, run in step.admitted.items():
            if (sequence := sequences.get(id)) is not None:
                sequence.num_cached = run.num_cached
                sequence.times.queued_at, sequence.times.scheduled_at = run.queued_at, run.scheduled_at
        for id, seconds in step.resumed.items():
            if (sequence := sequences.get(id)) is not None:
                sequence.times.preempted_s += seconds
                sequence.times.num_preemptions += 1
        for id, seconds in step.shares.items():
            if (sequence := sequences.get(id)) is not None:
                sequence.times.step_share_s += seconds
        for id, count in step.drafted.items():
            if (sequence := sequences.get(id)) is not None:
                sequence.times.num_drafts += 1
                sequence.times.num_draft_tokens += count
        for id, positions in step.prompt_logprobs.items():
            if (sequence := sequences.get(id)) is not None:
                self._add_prompt_logprobs(sequence.parent, positions)
        for id, begins in step.aligned.items():
            if (sequence := sequences.get(id)) is not None:
                sequence.parent.aligned = begins
        for id, positions in step.logprobs.items():
            if (sequence := sequences.get(id)) is not None:
                for found in positions:
                    self._add_logprobs(sequence, found)
        for id, vector in step.pooled.items():
            if (sequence := sequences.get(id)) is not None:
                sequence.pooled = vector.array()
                sequence.times.first_token_at = sequence.times.last_token_at = at
        watched: list[_Sequence] = []
        for id, new in step.by_request():
            if (sequence := sequences.get(id)) is None:
                continue
            sequence.token_ids += new
            stats.num_tokens += len(new)
            times = sequence.times
            times.num_held += len(new) - 1
            if times.first_token_at == 0.0:
                times.first_token_at = at
                if sequence.index == 0:
                    stats.first_token_s.append(time.time() - sequence.parent.arrived_at)
            else:
                stats.between_tokens_s.append(at - times.last_token_at)
            times.last_token_at = at
            if not sequence.touched:
                sequence.touched = True
                touched.append(sequence)
            if sequence.has_stops:
                watched.append(sequence)
        self._end(step.finished, watched)

    def _end(self, finished: dict[str, Finish], watched: list[_Sequence]) -> None:
        """Sequences that the core ended, and those that met a stop string."""
        ended = []
        for id, finish in finished.items():
            if (sequence := self._sequences.pop(id, None)) is not None:
                sequence.finish = finish
                ended.append(sequence)
        for sequence in watched:
            if (met := sequence.look_for_stops()) is not None:
                known = sequence.finish
                if known is None:
                    del self._sequences[sequence.id]
                    self._stopped.append(sequence.id)
                    ended.append(sequence)
                sequence.finish = Finish("stop", met, known.num_preemptions if known else 0)
        for sequence in ended:
            sequence.parent.num_open -= 1
            if not sequence.touched:
                sequence.touched = True
                self._touched.append(sequence)
            assert sequence.finish is not None
            self._stats.finished.append(_facts(sequence, sequence.finish))
            if sequence.finish.reason == "error":
                sequence.parent.failed = sequence.finish

    def _add_logprobs(self, sequence: _Sequence, found: RowLogprobs) -> None:
        assert sequence.logprobs is not None
        sequence.cumulative_logprob += found.logprobs[0]
        sequence.logprobs.append(
            position_of(
                found, sequence.parent.tokenizer, ranked=sequence.parent.params.logprob_token_ids is None
            )
        )

    def _add_prompt_logprobs(self, parent: _Parent, positions: list[RowLogprobs]) -> None:
        assert parent.prompt_logprobs is not None
        for found in positions:
            parent.prompt_logprobs.append(position_of(found, parent.tokenizer, ranked=True))

    # ---- what the user sees

    def flush(self) -> Processed:
        """The outputs that are due, of all that was noted since the last call."""
        due: dict[_Parent, list[_Sequence]] = {}
        waiting: list[_Sequence] = []
        for sequence in self._touched:
            parent = sequence.parent
            if parent.prompt_logprobs is not None and parent.waits:
                waiting.append(sequence)
                continue
            sequence.touched = False
            if parent.account is not None:
                parent.account.add_output(len(sequence.token_ids) - sequence.num_counted)
                sequence.num_counted = len(sequence.token_ids)
            if parent.put_text is not None and sequence.num_sent and sequence.finish is None:
                start, sequence.num_sent = sequence.num_sent, len(sequence.token_ids)
                parent.put_text(sequence.take_text(), sequence.num_sent - start)
            elif parent.streams or self._is_due(sequence):
                due.setdefault(parent, []).append(sequence)
        outputs: list[AnyOutput] = [
            self._pooled_output(parent) if parent.pools else self._request_output(parent, sequences)
            for parent, sequences in due.items()
        ]
        failed = {parent.request_id: parent.failed for parent in due if parent.failed is not None}
        processed = Processed(outputs, self._stopped, failed, self._stats)
        self._touched, self._stopped, self._stats = waiting, [], FrontStats()
        return processed

    def _is_due(self, sequence: _Sequence) -> bool:
        parent = sequence.parent
        if parent.params.output_kind is not RequestOutputKind.FINAL_ONLY:
            return sequence.is_due()
        if len(sequence.token_ids) - sequence.num_read >= _MANY_UNREAD and sequence.finish is None:
            sequence.text += sequence.take_text()
        return not parent.num_open

    def _pooled_output(self, parent: _Parent) -> PoolingRequestOutput[PoolingOutput]:
        (sequence,) = parent.sequences
        self._forget(parent)
        return PoolingRequestOutput(
            request_id=parent.request_id,
            outputs=PoolingOutput(np.empty(0, np.float32) if sequence.pooled is None else sequence.pooled),
            prompt_token_ids=parent.prompt.token_ids,
            num_cached_tokens=sequence.num_cached,
            finished=True,
        )

    def _request_output(self, parent: _Parent, sequences: list[_Sequence]) -> RequestOutput:
        kind, finished = parent.params.output_kind, not parent.num_open
        make = _delta if kind is RequestOutputKind.DELTA else _whole
        sequences = parent.sequences if kind is RequestOutputKind.FINAL_ONLY else sequences
        output = light(
            RequestOutput,
            request_id=parent.request_id,
            prompt=parent.prompt.text,
            prompt_token_ids=parent.prompt.token_ids,
            prompt_logprobs=parent.prompt_logprobs,
            aligned=parent.aligned,
            outputs=[make(sequence) for sequence in sequences],
            finished=finished,
            num_cached_tokens=parent.sequences[0].num_cached,
        )
        if parent.lora is not None:
            output.lora_request = parent.lora
        if kind is RequestOutputKind.DELTA:
            parent.prompt_logprobs = None  # they come with the first delta, and only with that
        if finished:
            output.metrics = _stats(parent)
            self._forget(parent)
        return output

    def _forget(self, parent: _Parent) -> None:
        """It and its sequences know each other: whatever they hold would stay until the collector comes."""
        self._parents.pop(parent.request_id, None)
        parent.sequences = []


def _whole(sequence: _Sequence) -> CompletionOutput:
    final = not sequence.parent.num_open
    sequence.num_sent = len(sequence.token_ids)
    sequence.text += sequence.take_text()
    token_ids = sequence.token_ids if final else sequence.token_ids.copy()
    logprobs = sequence.logprobs if final or sequence.logprobs is None else sequence.logprobs[:]
    return _completion(sequence, sequence.text, token_ids, logprobs)


def _delta(sequence: _Sequence) -> CompletionOutput:
    start, sequence.num_sent = sequence.num_sent, len(sequence.token_ids)
    token_ids = sequence.token_ids[start:]
    logprobs = None if sequence.logprobs is None else sequence.logprobs[start:]
    return _completion(sequence, sequence.take_text(), token_ids, logprobs)


def _completion(
    sequence: _Sequence, text: str, token_ids: list[int], logprobs: SampleLogprobs | None
) -> CompletionOutput:
    made = light(
        CompletionOutput,
        index=sequence.index,
        text=text,
        token_ids=token_ids,
        cumulative_logprob=None if logprobs is None else sequence.cumulative_logprob,
        logprobs=logprobs,
    )
    if sequence.parent.lora is not None:
        made.lora_request = sequence.parent.lora
    if sequence.finish is not None:
        made.finish_reason, made.stop_reason = sequence.finish.reason, sequence.finish.stop_reason
        if (times := sequence.times).num_drafts:
            made.spec_decode_metrics = {
                "num_drafts": times.num_drafts,
                "num_draft_tokens": times.num_draft_tokens,
                "num_accepted_tokens": times.num_held,
            }
    return made


def _facts(sequence: _Sequence, finish: Finish) -> FinishedSequence:
    parent = sequence.parent
    return FinishedSequence(
        reason=finish.reason,
        num_prompt_tokens=len(parent.prompt.token_ids),
        num_output_tokens=len(sequence.token_ids),
        num_cached=sequence.num_cached,
        longest=max(len(each.token_ids) for each in parent.sequences) if not parent.num_open else None,
        params=parent.params,
        arrived_at=parent.arrived_at,
        times=sequence.times,
    )


def _stats(parent: _Parent) -> RequestStateStats:
    first, times = parent.sequences[0].times, [sequence.times for sequence in parent.sequences]
    return RequestStateStats(
        num_generation_tokens=sum(len(sequence.token_ids) for sequence in parent.sequences),
        arrival_time=parent.arrived_at,
        queued_ts=first.queued_at,
        scheduled_ts=first.scheduled_at,
        first_token_ts=first.first_token_at,
        last_token_ts=max(each.last_token_at for each in times),
        first_token_latency=max(first.first_token_at - first.queued_at, 0.0),
        latency=time.time() - parent.arrived_at,
        preempted_s=sum(each.preempted_s for each in times),
        num_preemptions=sum(each.num_preemptions for each in times),
        step_share_s=sum(each.step_share_s for each in times),
        num_draft_tokens=sum(each.num_draft_tokens for each in times),
        num_accepted_tokens=sum(each.num_held for each in times),
    )
