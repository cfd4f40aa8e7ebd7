"""Flight: a request on its way to a core and back."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.data.plan import DEAD_END, TOO_COMPLEX, FinishReason
from quire.data.request import Request
from quire.data.wire import Add
from quire.errors import EngineError, QuireError, RequestError
from quire.frontend.core_client import CoreLink
from quire.frontend.inputs import Prompt
from quire.frontend.output_stream import OutputStream
from quire.frontend.request_state import RequestState
from quire.frontend.tracing import PARENT
from quire.metrics.keys import KeyAccount
from quire.multimodal.processor_cache import ProcessorCache

MAX_SENT = 32
"""How often a request is sent: one that outlives every core for a while must end, too."""
MAX_DEATHS = 3
"""Deaths of cores in a row without progress of a request between them, after which it counts as their cause.
Two are enough if it was the only request each time."""
PROGRESS = 16
"""New tokens that show that a request is not what ends its cores."""


@dataclass(slots=True, eq=False)
class RequestInFlight:
    """A request on its way: what was sent, and to which core."""

    prompt: Prompt
    requests: list[Request]
    rank: int | None
    """The only core that it may go to."""
    account: KeyAccount | None = None
    """Whose share it is of."""
    answer: OutputStream[Any] | None = None
    link: CoreLink | None = None
    """None while it waits for a core to come back."""
    bringing: asyncio.Task[None] | None = None
    """While arrays are made again that no core has."""
    is_whole: bool = False
    """Whether it is sent with all that it has: the core lacked some of it."""
    state: RequestState | None = None
    """What has come of it; None before it is first sent."""
    num_sent: int = 0
    num_before: int = 0
    """Its tokens when it was last sent."""
    num_deaths: int = 0
    """Deaths of its cores since it last made progress."""
    lost_at: float = 0.0
    """When it lost its core, or found none; 0 while it has one."""
    parent: str = field(default_factory=PARENT.get)
    """The span of whoever asked."""

    def outgoing(self, processor_cache: ProcessorCache) -> Add:
        """As it is sent to a core."""
        assert self.state is not None
        is_new = not self.state.has_run
        message = Add.of(self.requests) if is_new else Add(self.state.continued(self.requests))
        message.requests = [
            request
            if request.media is None
            else msgspec.structs.replace(
                request, media=processor_cache.outgoing(request.media, whole=self.is_whole)
            )
            for request in message.requests
        ]
        return message

    @property
    def has_run(self) -> bool:
        """Whether a core has told that it computes for this request."""
        return self.state is not None and self.state.has_run

    @property
    def num_tokens(self) -> int:
        """Tokens of all its sequences that have come."""
        return 0 if self.state is None else sum(len(sequence.token_ids) for sequence in self.state.sequences)

    @property
    def has_progressed(self) -> bool:
        """Whether enough tokens have come since it was last sent."""
        return self.num_tokens - self.num_before >= PROGRESS

    @property
    def is_suspect(self) -> bool:
        """Whether it may be what ended its cores: it was at two deaths without progress between them."""
        return self.num_deaths >= 2 and not self.has_progressed

    def outlives(self, *, is_alone: bool, resumes: bool) -> bool:
        """Note the death of its core, and return whether it is sent to another one. Not if it is likely to be
        the cause, or if part of the answer was shown and it does not `resume`."""
        self.num_deaths = 1 if self.has_progressed else self.num_deaths + 1
        is_cause = self.num_deaths >= (2 if is_alone else MAX_DEATHS) or self.num_sent >= MAX_SENT
        if self.answer is None or is_cause:
            return False
        return resumes or not self.answer.has_output


def next_to_send(flights: Mapping[str, RequestInFlight]) -> list[tuple[str, RequestInFlight]]:
    """Return the requests without a core in the order in which to send them.

    A core puts each request that has run in front of all others, so that the oldest of these is sent last.
    Suspects are sent one at a time: each must make progress before the next one. So the request that ends
    its cores is alone among the suspects when it does so again, and the others go on.
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
    """Of a request that ended as an error."""
    if finish.stop_reason == DEAD_END:
        return RequestError(
            "structured_outputs: the text has come to a point where nothing fits the grammar any more; give "
            "every part of it an end",
            param="structured_outputs",
        )
    if finish.stop_reason == TOO_COMPLEX:
        return RequestError(
            "structured_outputs: at this point of the text the grammar has more states or more alternatives "
            "than the grammar library can follow; simplify it, or give fewer alternatives that begin alike",
            param="structured_outputs",
        )
    if isinstance(finish.stop_reason, str):
        return RequestError(finish.stop_reason, param="model")
    return EngineError("the engine failed on this request; others are not affected")


def marks(request: Request) -> list[int]:
    """The prompt as numbers that are the same for the same: of vectors and media, what they are known by."""
    if request.embeds is not None:
        return request.embeds.marks()
    return request.tokens if request.media is None else request.media.marks(request.tokens)


def prefix_extra(request: Request) -> str | None:
    """What a prefix depends on beside its tokens, as far as it is known here."""
    if request.lora is None:
        return request.cache_salt
    return f"{request.lora.lora_name}\0{request.lora.lora_path}\0{request.cache_salt or ''}"
