"""Messages between API server processes and the engine core: tagged structs in msgpack, never a pickle."""

from typing import Any

import msgspec

from quire.data.params import SamplingParams
from quire.data.request import Request
from quire.data.stats import StepStats
from quire.data.step_plan import StepOutput


class Hello(msgspec.Struct, tag="hello"):
    """First message of an API server process, which the core answers with Ready."""

    token: str = ""
    """Secret of the deployment; the core ignores a process with another secret."""


class Add(msgspec.Struct, tag="add", omit_defaults=True):
    """Message with sequences to run. The sequences of one prompt share it: the prompt is sent and stored
    once."""

    requests: list[Request]
    siblings: list[tuple[str, int]] = []
    """Id and seed of further sequences of the first request's prompt."""
    sibling_params: SamplingParams | None = None
    """Params of the siblings, if they differ from the params of the first request."""

    @classmethod
    def of(cls, requests: list[Request]) -> "Add":
        """Build the message for the sequences of one prompt."""
        first, *others = requests
        differ = bool(others) and others[0].params is not first.params
        return cls([first], [(r.id, r.seed) for r in others], others[0].params if differ else None)

    def all(self) -> list[Request]:
        if not self.siblings:
            return self.requests
        first = self.requests[0]
        params = first.params if self.sibling_params is None else self.sibling_params
        others = [
            msgspec.structs.replace(first, id=id, seed=seed, params=params, block_keys=[])
            for id, seed in self.siblings
        ]
        return [*self.requests, *others]


class Abort(msgspec.Struct, tag="abort"):
    """Message that ends sequences with these ids, because no client waits for them any more."""

    request_ids: list[str]


class ControlCall(msgspec.Struct, tag="call"):
    """Call of a control method, which the core answers with a Reply of the same number."""

    number: int
    method: str
    args: dict[str, Any] = {}


class Ready(msgspec.Struct, tag="ready"):
    """The core is ready. This message answers each Hello of an API server process."""

    pid: int
    max_model_len: int
    num_blocks: int
    num_tokens: int
    """Number of tokens that fit into the KV cache."""
    start_s: float = 0.0
    """Seconds that the core took to load the model and to warm up."""


class StepDone(msgspec.Struct, tag="stepped"):
    """Output of a step for the receiving API server process."""

    output: StepOutput


class Heartbeat(msgspec.Struct, tag="beat"):
    """Periodic heartbeat of the core, with its current gauges."""

    stats: StepStats
    stalled_s: float = 0.0
    """Seconds since the last step ended, while there is work; 0 without work."""
    num_resets: int = 0
    """Number of resets of the multimodal caches so far."""
    page: bytes = b""
    """Metrics page of the core, sent periodically to API server processes on other machines; else empty."""


class Reply(msgspec.Struct, tag="reply"):
    """Answer to a ControlCall."""

    number: int
    value: Any = None
    error: str = ""
    """Error message, in place of a value."""
    is_request: bool = False
    """Whether the error is a RequestError."""
    param: str | None = None


class Missing(msgspec.Struct, tag="missing"):
    """A request was not added, because the core lacks the arrays of its media items."""

    request_id: str
    """Id of the first sequence of the request's prompt."""


ToCore = Hello | Add | Abort | ControlCall
FromCore = Ready | StepDone | Heartbeat | Reply | Missing

encode = msgspec.msgpack.Encoder().encode
decode_hello = msgspec.msgpack.Decoder(Hello).decode
decode_to_core = msgspec.msgpack.Decoder(ToCore).decode
decode_from_core = msgspec.msgpack.Decoder(FromCore).decode
