"""Steps on their way between processes: plans and results in msgpack, arrays as their bytes."""

from functools import cache
from typing import Any, get_args

import msgspec
import numpy as np

from quire.data.plan import Masks, StepPlan, StepResult


class Outcome(msgspec.Struct):
    """How a step went on a rank."""

    step: int
    result: StepResult | None = None
    error: str = ""
    """In place of a result: the type of what was raised, and its message."""


def _array_out(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.tobytes(), *value.shape)
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value)} does not travel")


@cache
def _dtype(kind: Any) -> np.dtype[Any]:
    """Of an annotation like `NDArray[np.int32]`."""
    (scalar,) = get_args(get_args(kind)[1])
    found: np.dtype[Any] = np.dtype(scalar)
    return found


def _array_in(kind: Any, value: Any) -> Any:
    data, *shape = value
    return np.frombuffer(bytearray(data), _dtype(kind)).reshape(shape)


_encode = msgspec.msgpack.Encoder(enc_hook=_array_out).encode


def encode_plan(plan: StepPlan) -> bytes:
    return _encode(plan)


def encode_masks(masks: Masks) -> bytes:
    """Once they are there."""
    masks.wait()
    return _encode(masks)


def encode_outcome(outcome: Outcome) -> bytes:
    return _encode(outcome)


decode_plan = msgspec.msgpack.Decoder(StepPlan, dec_hook=_array_in).decode
decode_masks = msgspec.msgpack.Decoder(Masks, dec_hook=_array_in).decode
decode_outcome = msgspec.msgpack.Decoder(Outcome, dec_hook=_array_in).decode
