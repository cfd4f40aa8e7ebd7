"""Messages between an executor and its ranks besides plans and results, in msgpack."""

from typing import Any, Literal

import msgspec

from quire.data.kv_tiers import BlockLoad, BlockRead
from quire.data.lora import LoRARequest
from quire.memory import CacheSize

Phase = Literal["load", "measure", "allocate", "warm_up", "run"]
BackgroundWork = Literal["fetch", "drop", "load", "read"]
"""Work of a started rank besides steps: fetch or drop a LoRA adapter, load or read KV cache blocks."""
NUM_LOADERS = 4
"""Threads of a worker that copy KV cache blocks to the device."""
RUNNING = {"load": "loading", "measure": "measuring", "allocate": "allocating", "warm_up": "warming up"}
DONE = {"load": "loaded", "measure": "measured", "allocate": "allocated", "warm_up": "warm", "run": "ready"}


class Order(msgspec.Struct, omit_defaults=True):
    """Message to a rank: the next phase of the start, or background work of a started rank."""

    phase: Phase | BackgroundWork
    size: CacheSize | None = None
    """Size of the cache to allocate."""
    number: int = 0
    """Number of the fetch or load; the answer, `Returned`, has the same number."""
    adapter: LoRARequest | None = None
    """Adapter to fetch."""
    name: str = ""
    """Name of the adapter to drop."""
    load: BlockLoad | None = None
    """KV cache blocks to copy to the device."""
    read: BlockRead | None = None
    """KV cache blocks to copy for another engine."""


class PhaseProgress(msgspec.Struct, tag="progress"):
    """Message of a rank: its progress in a phase of the start."""

    what: str
    share: float | None = None
    """Finished share of the phase (0 to 1); None if it is not known."""

    def __str__(self) -> str:
        return self.what if self.share is None else f"{self.what} {self.share:.0%}"


class PhaseDone(msgspec.Struct, tag="done"):
    """Message of a rank: the phase is finished."""

    size: CacheSize | None = None
    """Size of the cache that fits, after the measure phase."""


class Failed(msgspec.Struct, tag="failed"):
    """Message of a rank: a phase or a step failed."""

    error: str
    is_cause: bool = True
    """Whether the error began on this rank; False if the rank only lost another rank."""
    step: int | None = None
    """The step that failed; None for a phase, after which the rank ends."""
    is_fatal: bool = False
    """Whether the device is lost with the step."""


class WorkerCall(msgspec.Struct):
    """Message to a rank: a call of a worker method, which runs after the plans sent before it."""

    number: int
    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    packed: bytes = b""
    """Pickled function with its arguments, called instead of the method; empty for none."""


class Returned(msgspec.Struct, tag="returned"):
    """Message of a rank: the result of a `WorkerCall` or of background work with the same number."""

    number: int
    value: Any = None
    error: str = ""
    """Error message instead of a value."""
    is_request: bool = False
    """Whether the caller caused the error."""


class RankEnded(msgspec.Struct, tag="ended"):
    """Event of the worker group: a rank has ended, or its connection is lost."""

    reason: str


FromRank = PhaseProgress | PhaseDone | Failed | Returned | RankEnded

encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
_decode_call = msgspec.msgpack.Decoder(WorkerCall).decode
_CALL = b"\xc1"
"""Prefix that distinguishes a call from a plan: no msgpack message begins with it."""


def encode_call(call: WorkerCall) -> bytes:
    return _CALL + encode(call)


def decode_call(data: bytes) -> WorkerCall | None:
    """Decode a call; return None if the data is a plan."""
    return _decode_call(data[1:]) if data[:1] == _CALL else None
