"""Prompts as vectors: a tensor, or what torch.save wrote of one, is checked and becomes `PromptEmbeds`."""

import base64
import binascii
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.format import read_array_header_1_0, read_array_header_2_0, read_magic
from numpy.typing import NDArray

from quire.config.engine import EngineConfig
from quire.data.prompt_embeds import PromptEmbeds, Rows
from quire.errors import RequestError
from quire.frontend.saved_tensor import open_saved

_LARGEST = {"float16": 65504.0}
"""The largest number of a type, where a wider one may bring more."""
_NUMPY = b"\x93NUMPY"
_TYPES = ("float32", "float16", "bfloat16")


def _refused(why: str) -> RequestError:
    return RequestError(f"prompt_embeds {why}", param="prompt_embeds")


@dataclass(frozen=True, slots=True)
class PromptEmbedsReader:
    """Reads the vectors of prompts for one model."""

    hidden: int
    dtype: str
    """What the model computes in."""

    def read(self, given: Any, check_len: Callable[[int], None]) -> PromptEmbeds:
        """Base64 of a saved tensor, or a tensor of torch or numpy. `check_len` may refuse the number of
        tokens, before their numbers are looked at."""
        dtype, shape, rows_of = _saved(given) if isinstance(given, str | bytes) else _live(given)
        if dtype not in _TYPES:
            raise _refused(f"is a tensor of {dtype}: it must be of {', '.join(_TYPES[:-1])} or {_TYPES[-1]}")
        shape = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
        if len(shape) != 2:
            raise _refused(f"has the shape {list(shape)}: it must be [tokens, hidden size]")
        if shape[1] != self.hidden:
            raise _refused(f"has vectors of {shape[1]} numbers, and the hidden size is {self.hidden}")
        check_len(shape[0])
        rows = rows_of()
        self._check_numbers(_widened(dtype, rows))
        return PromptEmbeds.of(dtype, rows.reshape(shape))

    def _check_numbers(self, numbers: NDArray[np.float32]) -> None:
        if not np.isfinite(numbers).all():
            raise _refused("has numbers that are not finite")
        largest = _LARGEST.get(self.dtype)
        if largest is not None and np.abs(numbers).max() > largest:
            raise _refused(f"has numbers beyond {largest:g}, the largest of {self.dtype}")


def embeds_reader(config: EngineConfig) -> PromptEmbedsReader | None:
    """None where prompts may not be vectors."""
    if not config.model.enable_prompt_embeds:
        return None
    return PromptEmbedsReader(config.checkpoint.facts.hidden, config.model.dtype)


def tensor_of(given: Any, name: str) -> NDArray[Any]:
    """A tensor of torch or numpy, or base64 of a file that torch.save or numpy.save has written. bfloat16 is
    widened, and whole numbers stay so."""
    try:
        if isinstance(given, str | bytes):
            return _stored(given)
        if not hasattr(given, "dtype"):
            return as_numbers(given)
        dtype, _, rows_of = _live(given)
        return _widened(dtype, rows_of()) if dtype == "bfloat16" else as_numbers(rows_of())
    except RequestError as error:
        why = str(error).removeprefix("prompt_embeds ")
        raise RequestError(f"{name} {why}", param=name) from None


def as_numbers(given: Any) -> NDArray[Any]:
    """An array, or lists that are one, of numbers that a device knows."""
    try:
        found = np.asarray(given)
    except ValueError:
        raise RequestError("has lists that are not all of one length") from None
    if found.dtype.kind not in "uif" or found.dtype.itemsize > 8:
        raise RequestError(f"is an array of {found.dtype}, which are no numbers here")
    return found


def _stored(given: str | bytes) -> NDArray[Any]:
    data = _decoded(given)
    if not data.startswith(_NUMPY):
        tensor = open_saved(data)
        return _widened(tensor.dtype, tensor.rows()).reshape(tensor.shape)
    try:
        file = io.BytesIO(data)
        head = {(1, 0): read_array_header_1_0, (2, 0): read_array_header_2_0}[read_magic(file)]
        shape, by_columns, dtype = head(file)
        if dtype.kind not in "uif" or dtype.itemsize > 8:
            raise _refused(f"is an array of {dtype}")
        numbers: NDArray[Any] = np.frombuffer(data, dtype, offset=file.tell())
        return numbers.reshape(shape, order="F" if by_columns else "C")
    except (KeyError, ValueError, EOFError) as error:
        if isinstance(error, RequestError):
            raise
        raise _refused(f"is not a file of numpy: {error}") from None


_Found = tuple[str, tuple[int, ...], Callable[[], Rows]]
"""Type, shape, and the way to the numbers."""


def _saved(given: str | bytes) -> _Found:
    tensor = open_saved(_decoded(given))
    return tensor.dtype, tensor.shape, tensor.rows


def _decoded(given: str | bytes) -> bytes:
    try:
        return base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refused(f"is not base64: {error}") from None


def _live(given: Any) -> _Found:
    """A tensor of torch, which whoever has one has imported, or an array of numpy."""
    if not all(hasattr(given, name) for name in ("dtype", "shape")):
        raise _refused(f"must be a tensor, got {type(given).__name__}")
    dtype = str(given.dtype).removeprefix("torch.")

    def rows() -> Rows:
        if isinstance(given, np.ndarray):
            return given
        tensor = given.detach().cpu()
        if dtype == "bfloat16":  # numpy has none: the upper half of each float32
            bits: NDArray[np.uint32] = tensor.float().contiguous().numpy().view(np.uint32)
            return (bits >> np.uint32(16)).astype(np.uint16)
        numbers: Rows = tensor.numpy()
        return numbers

    return dtype, tuple(given.shape), rows


def _widened(dtype: str, rows: Rows) -> NDArray[np.float32]:
    if dtype == "bfloat16":
        return (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return rows.astype(np.float32, copy=False)
