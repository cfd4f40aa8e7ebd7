"""Prompt embeddings: checks tensors and files of torch.save, and converts them to `PromptEmbeds`."""

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
"""Largest finite number of a model dtype whose range is smaller than that of some input dtypes."""
_NUMPY = b"\x93NUMPY"
_TYPES = ("float32", "float16", "bfloat16")


def _refused(reason: str) -> RequestError:
    return RequestError(f"prompt_embeds {reason}", param="prompt_embeds")


@dataclass(frozen=True, slots=True)
class PromptEmbedsReader:
    """Reads prompt embeddings for one model."""

    hidden: int
    dtype: str
    """dtype of the model."""

    def read(self, value: Any, check_len: Callable[[int], None]) -> PromptEmbeds:
        """Convert base64 of a saved tensor, or a tensor of torch or numpy, of shape [tokens, hidden size].
        `check_len` may raise for the number of tokens before the data are read."""
        dtype, shape, rows_of = _open_saved(value) if isinstance(value, str | bytes) else _open_tensor(value)
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
    """Build the reader for the model of a configuration; None if prompt embeddings are disabled."""
    if not config.model.enable_prompt_embeds:
        return None
    return PromptEmbedsReader(config.checkpoint.facts.hidden, config.model.dtype)


def tensor_of(value: Any, name: str) -> NDArray[Any]:
    """Read a tensor of torch or numpy, or base64 of a file of torch.save or numpy.save. bfloat16 is converted
    to float32; integers stay integers."""
    try:
        if isinstance(value, str | bytes):
            return _read_saved(value)
        if not hasattr(value, "dtype"):
            return as_numbers(value)
        dtype, _, rows_of = _open_tensor(value)
        return _widened(dtype, rows_of()) if dtype == "bfloat16" else as_numbers(rows_of())
    except RequestError as error:
        reason = str(error).removeprefix("prompt_embeds ")
        raise RequestError(f"{name} {reason}", param=name) from None


def as_numbers(value: Any) -> NDArray[Any]:
    """Convert an array or nested lists to an array of a supported dtype."""
    try:
        array = np.asarray(value)
    except ValueError:
        raise RequestError("has lists of different lengths") from None
    if array.dtype.kind not in "uif" or array.dtype.itemsize > 8:
        raise RequestError(f"is an array of {array.dtype}, which is not supported")
    return array


def _read_saved(text: str | bytes) -> NDArray[Any]:
    data = _decode_base64(text)
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
        raise _refused(f"is not a numpy file: {error}") from None


_TensorSource = tuple[str, tuple[int, ...], Callable[[], Rows]]
"""dtype, shape, and a function that returns the data."""


def _open_saved(text: str | bytes) -> _TensorSource:
    tensor = open_saved(_decode_base64(text))
    return tensor.dtype, tensor.shape, tensor.rows


def _decode_base64(text: str | bytes) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refused(f"is not base64: {error}") from None


def _open_tensor(value: Any) -> _TensorSource:
    """Return dtype, shape and data of a torch tensor or numpy array; torch is not imported here."""
    if not all(hasattr(value, name) for name in ("dtype", "shape")):
        raise _refused(f"must be a tensor, got {type(value).__name__}")
    dtype = str(value.dtype).removeprefix("torch.")

    def rows() -> Rows:
        if isinstance(value, np.ndarray):
            return value
        tensor = value.detach().cpu()
        if dtype == "bfloat16":  # not in numpy: the upper half of each float32
            bits: NDArray[np.uint32] = tensor.float().contiguous().numpy().view(np.uint32)
            return (bits >> np.uint32(16)).astype(np.uint16)
        numbers: Rows = tensor.numpy()
        return numbers

    return dtype, tuple(value.shape), rows


def _widened(dtype: str, rows: Rows) -> NDArray[np.float32]:
    if dtype == "bfloat16":
        return (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return rows.astype(np.float32, copy=False)
