"""What crosses the socket between API processes and core: tagged structs in msgpack, never a pickle."""

from typing import Any

import msgspec

from quire.data.params import SamplingParams
from quire.data.plan import StepOutput
from quire.data.request import Request
from quire.data.stats import StepStats


class Hello(msgspec.Struct, tag="hello"):
    """An API process is there and wants to know when the core is."""

    token: str = ""
    """The secret of the deployment: without it, nothing else that the process sends is read."""


class Add(msgspec.Struct, tag="add", omit_defaults=True):
    """Sequences to continue. Those of one prompt share it: it travels once, and is stored once."""

    requests: list[Request]
    siblings: list[tuple[str, int]] = []
    """Id and seed of further sequences of the first request's prompt."""
    sibling_params: SamplingParams | None = None
    """Their params, where those are not the first's."""

    @classmethod
    def of(cls, requests: list[Request]) -> "Add":
        """The sequences of one prompt."""
        first, *others = requests
        differ = bool(others) and others[0].params is not first.params
        return cls([first], [(each.id, each.seed) for each in others], others[0].params if differ else None)

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
    """Nobody waits for these any more."""

    request_ids: list[str]


class ControlCall(msgspec.Struct, tag="call"):
    """Ask the core for something that is no request; answered by a Reply with the same number."""

    number: int
    method: str
    args: dict[str, Any] = {}


class Ready(msgspec.Struct, tag="ready"):
    """The core runs. Sent once to every API process that said Hello."""

    pid: int
    max_model_len: int
    num_blocks: int
    num_tokens: int
    """That fit into the cache."""
    start_s: float = 0.0
    """Seconds that the core took to load the model and to warm up."""


class Stepped(msgspec.Struct, tag="stepped"):
    """A step's outputs, as far as they concern this API process."""

    output: StepOutput


class Beat(msgspec.Struct, tag="beat"):
    """The core is alive: sent when nothing else was for a while."""

    stats: StepStats
    stalled_s: float = 0.0
    """For how long there was work and no step ended; 0 when there is none."""
    num_resets: int = 0
    """How often all were told to forget what they keep of images, videos and sounds."""
    page: bytes = b""
    """The core's page of metrics, now and then, where the API process has none of it: on another machine."""


class Reply(msgspec.Struct, tag="reply"):
    """The answer to a Call."""

    number: int
    value: Any = None
    error: str = ""
    """In place of a value."""
    is_request: bool = False
    """Whether the error is the caller's."""
    param: str | None = None


class Missing(msgspec.Struct, tag="missing"):
    """A request that was not added: it has items whose arrays are not here, though they were to be."""

    request_id: str
    """The first of its prompt."""


ToCore = Hello | Add | Abort | ControlCall
FromCore = Ready | Stepped | Beat | Reply | Missing

encode = msgspec.msgpack.Encoder().encode
decode_hello = msgspec.msgpack.Decoder(Hello).decode
decode_to_core = msgspec.msgpack.Decoder(ToCore).decode
decode_from_core = msgspec.msgpack.Decoder(FromCore).decode
