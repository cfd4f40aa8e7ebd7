"""Requests in flight: those that were sent to an engine core, or wait for one."""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.data.request import Request
from quire.data.step_plan import DEAD_END, TOO_COMPLEX, FinishReason
from quire.data.wire import Add
from quire.errors import EngineError, QuireError, RequestError
from quire.frontend.engine_link import EngineLink
from quire.frontend.inputs import Prompt
from quire.frontend.output_stream import OutputStream
from quire.frontend.request_state import RequestState
from quire.frontend.tracing import PARENT
from quire.metrics.api_keys import KeyAccount
from quire.multimodal.processor_cache import ProcessorCache

MAX_SENT = 32
"""Largest number of times that a request is sent before it fails, so that it ends even if every core dies."""
MAX_DEATHS = 3
"""Core deaths without progress of a request in between, after which the request counts as their cause. Two
deaths are enough if the core ran no other request at its death."""
PROGRESS = 16
"""New tokens after which a request is no longer suspected to crash its cores."""


@dataclass(slots=True, eq=False)
class RequestInFlight:
    """A request that was sent to a core, or waits for one."""

    prompt: Prompt
    requests: list[Request]
    rank: int | None
    """Data-parallel rank that the request must go to; None: any."""
    account: KeyAccount | None = None
    stream: OutputStream[Any] | None = None
    link: EngineLink | None = None
    """Connection to the request's core; None while the request waits for one."""
    media_task: asyncio.Task[None] | None = None
    """Task that processes the media again, because the arrays of an item are no longer cached anywhere."""
    sends_all_arrays: bool = False
    """Whether the arrays of all media items are sent, because the core lacked some of them."""
    state: RequestState | None = None
    """State of the output so far; None before the request is first sent."""
    num_sent: int = 0
    num_before: int = 0
    """Number of output tokens when the request was last sent."""
    num_deaths: int = 0
    """Core deaths since the request last made progress."""
    lost_at: float = 0.0
    """Time in seconds of the engine's clock at which the request lost its core or found none; 0 while it has
    a core."""
    parent: str = field(default_factory=PARENT.get)
    """Header `traceparent` of the client's HTTP request; empty without one."""

    def outgoing(self, processor_cache: ProcessorCache) -> Add:
        """Build the message that sends the request to a core: with its output so far if it has run before,
        and without media arrays that the core has cached."""
        assert self.state is not None
        is_new = not self.state.has_run
        message = Add.of(self.requests) if is_new else Add(self.state.continued(self.requests))
        message.requests = [
            request
            if request.media is None
            else msgspec.structs.replace(
                request, media=processor_cache.outgoing(request.media, all_arrays=self.sends_all_arrays)
            )
            for request in message.requests
        ]
        return message

    @property
    def has_run(self) -> bool:
        return self.state is not None and self.state.has_run

    @property
    def num_tokens(self) -> int:
        return 0 if self.state is None else sum(len(sequence.token_ids) for sequence in self.state.sequences)

    @property
    def has_progressed(self) -> bool:
        """Whether the request has at least PROGRESS new tokens since it was last sent to a core."""
        return self.num_tokens - self.num_before >= PROGRESS

    @property
    def is_suspect(self) -> bool:
        """Whether the request may have crashed its cores: at least two died without progress in between."""
        return self.num_deaths >= 2 and not self.has_progressed

    def may_resend(self, *, is_alone: bool, resumes: bool) -> bool:
        """Count the death of the request's core, and return whether the request may be sent again: not if it
        likely caused the deaths, or if output was streamed and requests do not resume."""
        self.num_deaths = 1 if self.has_progressed else self.num_deaths + 1
        is_cause = self.num_deaths >= (2 if is_alone else MAX_DEATHS) or self.num_sent >= MAX_SENT
        if self.stream is None or is_cause:
            return False
        return resumes or not self.stream.has_output


def running_requests(
    link: EngineLink, flights: Mapping[str, RequestInFlight], sequence_ids: Collection[str] | None = None
) -> dict[str, RequestInFlight]:
    """Return the unfinished requests, by id, that were sent over a connection to an engine core: all of them,
    or only those of which a sequence has one of `sequence_ids`."""
    return {
        id: flight
        for id, flight in flights.items()
        if flight.link is link
        and (sequence_ids is None or any(request.id in sequence_ids for request in flight.requests))
    }


def next_to_send(flights: Mapping[str, RequestInFlight]) -> list[tuple[str, RequestInFlight]]:
    """Return the requests without a core in the order in which to send them.

    A core queues a resumed request before all others, so the oldest resumed request is sent last. Suspects
    are sent one at a time: each suspect must make progress before the next one is sent. So a request that
    crashes cores is the only running suspect when it does so again, and other requests continue.
    """
    lost = [(id, flight) for id, flight in flights.items() if flight.link is None]
    waiting = [(id, flight) for id, flight in lost if not flight.has_run]
    begun = [(id, flight) for id, flight in lost if flight.has_run]
    is_tried = any(flight.is_suspect for flight in flights.values() if flight.link is not None)
    chosen = []
    for id, flight in [*waiting, *reversed(begun)]:
        if not (flight.is_suspect and is_tried):
            chosen.append((id, flight))
            is_tried = is_tried or flight.is_suspect
    return chosen


def failure(finish: FinishReason) -> QuireError:
    if finish.stop_reason == DEAD_END:
        return RequestError(
            "structured_outputs: no token is valid after the text so far; make sure that every part of the "
            "grammar can end",
            param="structured_outputs",
        )
    if finish.stop_reason == TOO_COMPLEX:
        return RequestError(
            "structured_outputs: after the text so far the grammar has more states or alternatives than the "
            "grammar library supports; simplify it, or use fewer alternatives with the same beginning",
            param="structured_outputs",
        )
    if isinstance(finish.stop_reason, str):
        return RequestError(finish.stop_reason, param="model")
    return EngineError("the engine failed on this request; others are not affected")


def prefix_tokens(request: Request) -> list[int]:
    """Return the prompt as numbers for prefix matching: embeddings and media are replaced by their hashes."""
    if request.embeds is not None:
        return request.embeds.routing_ids()
    return request.tokens if request.media is None else request.media.routing_ids(request.tokens)


def affinity(request: Request) -> dict[str, str | None]:
    """Return the keyword arguments `extra` (see `prefix_extra`) and `session` for the router's choice of a
    core."""
    session = None if request.hints is None else request.hints.session
    return {"extra": prefix_extra(request), "session": session}


def prefix_extra(request: Request) -> str | None:
    """Return what a cached prefix depends on beside its tokens: the LoRA adapter and the cache salt."""
    if request.lora is None:
        return request.cache_salt
    return f"{request.lora.lora_name}\0{request.lora.lora_path}\0{request.cache_salt or ''}"
