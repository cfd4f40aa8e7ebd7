"""Serialization of plans and results between processes: msgpack, with arrays as bytes."""

from functools import cache
from typing import Any, get_args

import msgspec
import numpy as np

from quire.data.step_plan import Masks, StepPlan, StepResult


class Outcome(msgspec.Struct):
    """Result or error of a step on one rank."""

    step: int
    result: StepResult | None = None
    error: str = ""
    """Type and message of the exception, in place of a result."""


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.tobytes(), *value.shape)
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value)} cannot be serialized")


@cache
def _dtype(kind: Any) -> np.dtype[Any]:
    """Return the dtype of an annotation like `NDArray[np.int32]`."""
    (scalar,) = get_args(get_args(kind)[1])
    dtype: np.dtype[Any] = np.dtype(scalar)
    return dtype


def _decode_array(kind: Any, value: Any) -> Any:
    data, *shape = value
    return np.frombuffer(bytearray(data), _dtype(kind)).reshape(shape)


_encode = msgspec.msgpack.Encoder(enc_hook=_encode_array).encode


def encode_plan(plan: StepPlan) -> bytes:
    return _encode(plan)


def encode_masks(masks: Masks) -> bytes:
    """Wait until the grammar masks are complete, and encode them."""
    masks.wait_for_bits()
    return _encode(masks)


def encode_outcome(outcome: Outcome) -> bytes:
    return _encode(outcome)


decode_plan = msgspec.msgpack.Decoder(StepPlan, dec_hook=_decode_array).decode
decode_masks = msgspec.msgpack.Decoder(Masks, dec_hook=_decode_array).decode
decode_outcome = msgspec.msgpack.Decoder(Outcome, dec_hook=_decode_array).decode
