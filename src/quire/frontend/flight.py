"""Flight: a request on its way to a core and back."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.data.plan import DEAD_END, TOO_COMPLEX, Finish
from quire.data.request import Request
from quire.data.wire import Add
from quire.errors import EngineError, QuireError, RequestError
from quire.frontend.answer import Answer
from quire.frontend.inputs import Prompt
from quire.frontend.link import CoreLink
from quire.frontend.request_state import RequestState
from quire.frontend.tracing import PARENT
from quire.metrics.keys import Account
from quire.multimodal.larder import Larder

MAX_SENT = 3
"""Times that a request is sent: one that kills every core that it comes to must end."""


@dataclass(slots=True, eq=False)
class Flight:
    """A request on its way: what was sent, and to which core."""

    prompt: Prompt
    requests: list[Request]
    rank: int | None
    """The only core that it may go to."""
    account: Account | None = None
    """Whose share it is of."""
    answer: Answer[Any] | None = None
    link: CoreLink | None = None
    """None while it waits for a core to come back."""
    bringing: asyncio.Task[None] | None = None
    """While arrays are made again that no core has."""
    is_whole: bool = False
    """Whether it is sent with all that it has: the core lacked some of it."""
    state: RequestState | None = None
    """What has come of it; None before it is first sent."""
    num_sent: int = 0
    lost_at: float = 0.0
    """When it lost its core, or found none; 0 while it has one."""
    parent: str = field(default_factory=PARENT.get)
    """The span of whoever asked."""

    def outgoing(self, larder: Larder) -> Add:
        """As it is sent to a core."""
        assert self.state is not None
        is_new = not self.state.has_run
        message = Add.of(self.requests) if is_new else Add(self.state.continued(self.requests))
        message.requests = [
            request
            if request.media is None
            else msgspec.structs.replace(request, media=larder.outgoing(request.media, whole=self.is_whole))
            for request in message.requests
        ]
        return message

    @property
    def has_run(self) -> bool:
        """Whether a core has told that it computes for this request."""
        return self.state is not None and self.state.has_run

    def may_go_again(self, *, resumes: bool) -> bool:
        """Return whether it is sent again when its core has died: not if it was at too many deaths. One of
        which something was shown must be one that `resumes`."""
        if self.answer is None or self.num_sent >= MAX_SENT:
            return False
        return resumes or not self.answer.has_output


def failure(finish: Finish) -> QuireError:
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
