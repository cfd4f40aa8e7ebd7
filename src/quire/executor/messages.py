"""What an executor and its ranks say to each other beside plans and results: structs in msgpack."""

from typing import Any, Literal

import msgspec

from quire.data.lora import LoRARequest
from quire.memory import CacheSize

Phase = Literal["load", "measure", "allocate", "warm_up", "run"]
Aside = Literal["fetch", "drop"]
"""What a rank that takes steps does beside them."""
DOING = {"load": "loading", "measure": "measuring", "allocate": "allocating", "warm_up": "warming up"}
DONE = {"load": "loaded", "measure": "measured", "allocate": "allocated", "warm_up": "warm", "run": "ready"}


class Order(msgspec.Struct, omit_defaults=True):
    """To a rank: the next phase; behind the last one, what to do with an adapter."""

    phase: Phase | Aside
    size: CacheSize | None = None
    """Of the cache to allocate."""
    number: int = 0
    """Of a fetch, which is answered by a Returned."""
    adapter: LoRARequest | None = None
    """To fetch."""
    name: str = ""
    """Of the adapter to drop."""


class Doing(msgspec.Struct, tag="doing"):
    """From a rank: where it is."""

    what: str
    share: float | None = None
    """How much of it is done, where that is known."""

    def __str__(self) -> str:
        return self.what if self.share is None else f"{self.what} {self.share:.0%}"


class Did(msgspec.Struct, tag="did"):
    """From a rank: the phase is over."""

    size: CacheSize | None = None
    """Of the cache that it could have, if it measured."""


class Failed(msgspec.Struct, tag="failed"):
    """From a rank: it could not."""

    error: str
    is_cause: bool = True
    """Whether the error is its own, rather than the end of somebody it waited for."""
    step: int | None = None
    """The step that failed; None for a phase, after which the rank ends."""
    is_fatal: bool = False
    """Whether the device is lost with the step."""


class WorkerCall(msgspec.Struct):
    """To a rank, among its plans: a method of its worker to call."""

    number: int
    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class Returned(msgspec.Struct, tag="returned"):
    """From a rank: what came of a call."""

    number: int
    value: Any = None
    error: str = ""
    """In place of a value."""
    is_request: bool = False
    """Whether the error is the caller's."""


class Gone(msgspec.Struct, tag="gone"):
    """Of a rank, by those who watch over it: it has ended."""

    why: str


Word = Doing | Did | Failed | Returned | Gone

encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_word = msgspec.msgpack.Decoder(Word).decode
_decode_call = msgspec.msgpack.Decoder(WorkerCall).decode
_CALL = b"\xc1"
"""Tells a call from a plan: no msgpack begins so."""


def encode_call(call: WorkerCall) -> bytes:
    return _CALL + encode(call)


def decode_call(data: bytes) -> WorkerCall | None:
    """None: it is a plan."""
    return _decode_call(data[1:]) if data[:1] == _CALL else None
