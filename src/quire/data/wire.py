"""What crosses the socket between API processes and core: tagged structs in msgpack, never a pickle."""

from typing import Any

import msgspec

from quire.data.plan import StepOutput
from quire.data.request import Request
from quire.data.stats import StepStats


class Hello(msgspec.Struct, tag="hello"):
    """An API process is there and wants to know when the core is."""


class Add(msgspec.Struct, tag="add"):
    """New requests."""

    requests: list[Request]


class Abort(msgspec.Struct, tag="abort"):
    """Nobody waits for these any more."""

    request_ids: list[str]


class Call(msgspec.Struct, tag="call"):
    """Ask the core for something that is no request; answered by a Reply with the same number."""

    number: int
    method: str


class Ready(msgspec.Struct, tag="ready"):
    """The core runs. Sent once to every API process that said Hello."""

    pid: int
    max_model_len: int
    num_blocks: int


class Stepped(msgspec.Struct, tag="stepped"):
    """A step's outputs, as far as they concern this API process."""

    output: StepOutput


class Beat(msgspec.Struct, tag="beat"):
    """The core is alive: sent when nothing else was for a while."""

    stats: StepStats
    stalled_s: float = 0.0
    """For how long there was work and no step ended; 0 when there is none."""


class Reply(msgspec.Struct, tag="reply"):
    """The answer to a Call."""

    number: int
    value: Any


ToCore = Hello | Add | Abort | Call
FromCore = Ready | Stepped | Beat | Reply

encode = msgspec.msgpack.Encoder().encode
decode_to_core = msgspec.msgpack.Decoder(ToCore).decode
decode_from_core = msgspec.msgpack.Decoder(FromCore).decode
