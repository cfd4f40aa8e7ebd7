"""State of a request in the API process: the output so far of each of its sequences."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.data.latency_target import NO_TARGET, LatencyTarget
from quire.data.lora import LoRARequest
from quire.data.outputs import (
    CompletionOutput,
    PromptLogprobs,
    RequestStateStats,
    SampleLogprobs,
    SamplingMask,
    fast_instance,
)
from quire.data.params import RequestOutputKind, SamplingParams
from quire.data.pooling import Floats
from quire.data.prefix_miss import PrefixMiss
from quire.data.request import Request
from quire.data.stats import FinishedSequence, SequenceTimes
from quire.data.step_plan import FinishReason
from quire.frontend.inputs import Prompt
from quire.metrics.api_keys import KeyAccount
from quire.text.detokenizer import Detokenizer
from quire.text.tokenizer import Tokenizer


@dataclass(slots=True, eq=False)
class SequenceState:
    """One of the n continuations of a prompt."""

    id: str
    index: int
    parent: "RequestState"
    detokenizer: Detokenizer | None
    logprobs: SampleLogprobs | None
    has_stops: bool
    """Whether the text is searched for stop strings token by token."""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    times: SequenceTimes = field(default_factory=SequenceTimes)
    num_cached: int = 0
    num_created: int = 0
    miss: PrefixMiss | None = None
    finish: FinishReason | None = None
    num_read: int = 0
    """Number of output tokens that are detokenized."""
    num_sent: int = 0
    """Number of output tokens that were part of an output."""
    num_counted: int = 0
    """Number of output tokens that were counted for the API key of the request."""
    updated: bool = False
    """Whether the sequence has new output since the last flush."""
    pooled: Floats | None = None
    """Output of a pooling model."""
    sampling_masks: list[list[int]] = field(default_factory=list)
    """Token ids that could have been sampled, for each token; empty if the request does not return them."""
    routed: list[NDArray[Any]] = field(default_factory=list)
    """Routed experts of consecutive tokens: arrays of [tokens, MoE layers, experts per token]."""
    text: str = ""
    """Text of the outputs so far: text that may be the beginning of a stop string is held back."""

    @property
    def is_plain(self) -> bool:
        """Whether the deltas of this sequence contain only text."""
        delta = self.parent.params.output_kind is RequestOutputKind.DELTA
        return delta and self.logprobs is None and not self.has_stops and self.detokenizer is not None

    def is_due(self) -> bool:
        """Return whether an output must be built now: for the first token, the end, or after
        `parent.interval` new tokens."""
        return (
            self.finish is not None
            or not self.num_sent
            or len(self.token_ids) >= self.num_sent + self.parent.interval
        )

    def find_stop(self) -> str | None:
        """Return the stop string that the new tokens complete, or None; tokens after it are dropped."""
        assert self.detokenizer is not None
        stop = self.detokenizer.push(self._unread(), final=self.finish is not None)
        if stop is not None:
            self._truncate(self.detokenizer.num_tokens)
        return stop

    def _truncate(self, length: int) -> None:
        if self.logprobs is not None:
            chosen = (next(iter(position.values())) for position in self.logprobs[length:] if position)
            self.cumulative_logprob -= sum(token.logprob for token in chosen)
            self.logprobs = self.logprobs[:length]
        del self.token_ids[length:], self.sampling_masks[length:]
        self.num_read = length

    def read_text(self) -> str:
        """Return the new text for the next output."""
        detokenizer, final = self.detokenizer, self.finish is not None
        if detokenizer is None:
            return ""
        return (
            detokenizer.take_delta(final) if self.has_stops else detokenizer.read(self._unread(), final=final)
        )

    def _unread(self) -> list[int]:
        """Return the token ids that are not detokenized yet, and mark them as detokenized."""
        start, self.num_read = self.num_read, len(self.token_ids)
        unread = self.token_ids[start:]
        # A stop token is part of the text only with include_stop_str_in_output.
        finish = self.finish
        stopped = finish is not None and finish.reason == "stop" and not finish.keeps_last
        if stopped and not self.parent.params.include_stop_str_in_output:
            del unread[-1:]
        return unread

    def continued(self, request: Request) -> Request:
        """Return the request to resume this sequence in another engine core, with the output so far."""
        return msgspec.structs.replace(
            request,
            tokens=[*request.tokens, *self.token_ids],
            has_run=self.has_run,
            num_cached=self.num_cached,
            num_prompt_logprobs=self.parent.num_prompt_logprobs,
            num_routed=self.parent.params.routed_experts_prompt_start + sum(map(len, self.routed)),
        )

    def routed_experts(self) -> NDArray[Any] | None:
        """Return the routed experts of all computed tokens of an ended sequence; None if there are none."""
        if not self.routed:
            return None
        first = self.parent.params.routed_experts_prompt_start
        end = len(self.parent.prompt.token_ids) + len(self.token_ids) - 1
        return np.concatenate(self.routed)[: end - first]

    @property
    def has_run(self) -> bool:
        """Whether an engine core has scheduled this sequence."""
        return self.times.scheduled_at > 0.0 or bool(self.token_ids)

    def cumulative_output(self) -> CompletionOutput:
        """Return an output with all text, tokens and logprobs so far."""
        final = not self.parent.num_open
        self.num_sent = len(self.token_ids)
        self.text += self.read_text()
        token_ids = self.token_ids if final else self.token_ids.copy()
        logprobs = self.logprobs if final or self.logprobs is None else self.logprobs[:]
        return self._completion(self.text, token_ids, logprobs)

    def delta_output(self) -> CompletionOutput:
        """Return an output with only what is new since the last output."""
        start, self.num_sent = self.num_sent, len(self.token_ids)
        token_ids = self.token_ids[start:]
        logprobs = None if self.logprobs is None else self.logprobs[start:]
        return self._completion(self.read_text(), token_ids, logprobs)

    def _completion(
        self, text: str, token_ids: list[int], logprobs: SampleLogprobs | None
    ) -> CompletionOutput:
        output = fast_instance(
            CompletionOutput,
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=None if logprobs is None else self.cumulative_logprob,
            logprobs=logprobs,
        )
        if self.sampling_masks:
            output.sampling_mask = SamplingMask(self.sampling_masks[len(self.token_ids) - len(token_ids) :])
        if self.parent.lora is not None:
            output.lora_request = self.parent.lora
        if self.finish is not None:
            output.finish_reason, output.stop_reason = self.finish.reason, self.finish.stop_reason
            output.routed_experts = self.routed_experts()
            if (times := self.times).num_drafts:
                output.spec_decode_metrics = {
                    "num_drafts": times.num_drafts,
                    "num_draft_tokens": times.num_draft_tokens,
                    "num_accepted_tokens": times.num_accepted,
                }
        return output

    def finished_facts(self, finish: FinishReason) -> FinishedSequence:
        """Return the facts of the ended sequence for the metrics."""
        parent = self.parent
        return FinishedSequence(
            reason=finish.reason,
            num_prompt_tokens=len(parent.prompt.token_ids),
            num_output_tokens=len(self.token_ids),
            num_cached=self.num_cached,
            longest=max(len(other.token_ids) for other in parent.sequences) if not parent.num_open else None,
            params=parent.params,
            arrived_at=parent.arrived_at,
            times=self.times,
            target=parent.target,
        )


@dataclass(slots=True, eq=False)
class RequestState:
    """State of a request with all of its sequences."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    arrived_at: float
    interval: int
    """Number of new tokens after which a further output is streamed."""
    streams: bool
    """Whether each new token is streamed immediately."""
    sequences: list[SequenceState] = field(default_factory=list)
    num_open: int = 0
    """Sequences that have not ended."""
    failed: FinishReason | None = None
    """Finish reason of a sequence that failed; None if none has failed."""
    put_text: Callable[[str, int], None] | None = None
    """Callback for deltas that contain only text: it gets the text and its number of tokens."""
    prompt_logprobs: PromptLogprobs | None = None
    aligned: list[int] | None = None
    pools: bool = False
    lora: LoRARequest | None = None
    tokenizer: Tokenizer | None = None
    account: KeyAccount | None = None
    target: LatencyTarget = NO_TARGET

    @property
    def has_run(self) -> bool:
        return any(sequence.has_run for sequence in self.sequences)

    @property
    def has_tokens(self) -> bool:
        return any(sequence.token_ids for sequence in self.sequences)

    @property
    def num_prompt_logprobs(self) -> int:
        """Return the number of prompt positions with logprobs so far."""
        if self.params.prompt_logprobs is None:
            return 0
        delivered = self.prompt_logprobs is None
        return len(self.prompt.token_ids if delivered else self.prompt_logprobs or ()) - 1

    def continued(self, requests: list[Request]) -> list[Request]:
        """Return the requests of the sequences that have not ended, each with its output so far."""
        pairs = zip(self.sequences, requests, strict=True)
        return [sequence.continued(request) for sequence, request in pairs if sequence.finish is None]

    @property
    def waits(self) -> bool:
        """Whether outputs must wait for the prompt logprobs: the first sequence computes them, and the first
        output of any sequence contains them."""
        first = self.sequences[0]
        return not first.token_ids and first.finish is None

    def stats(self) -> RequestStateStats:
        first, times = self.sequences[0].times, [sequence.times for sequence in self.sequences]
        return RequestStateStats(
            num_generation_tokens=sum(len(sequence.token_ids) for sequence in self.sequences),
            arrival_time=self.arrived_at,
            queued_ts=first.queued_at,
            scheduled_ts=first.scheduled_at,
            first_token_ts=first.first_token_at,
            last_token_ts=max(t.last_token_at for t in times),
            first_token_latency=max(first.first_token_at - first.queued_at, 0.0),
            latency=time.time() - self.arrived_at,
            preempted_s=sum(t.preempted_s for t in times),
            num_preemptions=sum(t.num_preemptions for t in times),
            step_share_s=sum(t.step_share_s for t in times),
            num_draft_tokens=sum(t.num_draft_tokens for t in times),
            num_accepted_tokens=sum(t.num_accepted for t in times),
            num_from_host=first.num_from_host,
            num_from_disk=first.num_from_disk,
            num_from_remote=first.num_from_remote,
            prefix_miss=self.sequences[0].miss,
        )
