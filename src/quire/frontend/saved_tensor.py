"""Reader of tensors saved with `torch.save`, without torch.

Nothing of the file is executed: the pickle is interpreted here, and may only describe a view of a storage.
"""

import io
import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from quire.data.prompt_embeds import Rows
from quire.errors import RequestError

_STORED_AS = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
_DTYPES = {"FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16"}
_MAX_ENTRIES, _MAX_PICKLE_BYTES = 64, 16384
"""Limits; the file of a tensor has about six entries and a pickle of 300 bytes."""
_DIRECTORY_ENTRY = b"PK\x01\x02"
_BROKEN = (
    zipfile.BadZipFile,
    struct.error,
    ValueError,
    LookupError,
    OverflowError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    TypeError,
)
"""Exceptions of the standard library for invalid files."""


def _refused(reason: str) -> RequestError:
    return RequestError(f"prompt_embeds is not a tensor saved by torch.save: {reason}", param="prompt_embeds")


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except RequestError:
        raise
    except _BROKEN as error:
        raise _refused(f"{error!s:.200}") from None


class _Name(NamedTuple):
    """Name of a function or class in the pickle; it is never imported."""

    full: str


class _Storage(NamedTuple):
    key: str
    dtype: str


class _View(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of a file: dtype and shape, and the data on request."""

    archive: zipfile.ZipFile
    root: str
    view: _View

    @property
    def dtype(self) -> str:
        return self.view.storage.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.view.shape

    def rows(self) -> Rows:
        """Read the data of a tensor."""
        storage, offset, shape, strides = self.view
        with _reading():
            stored = _entry(self.archive, f"{self.root}/data/{storage.key}")
            flat = np.frombuffer(stored, _STORED_AS[self.dtype])
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if last >= len(flat):
            raise _refused(f"its storage has {len(flat)} elements, and it needs element {last}")
        steps = tuple(stride * flat.itemsize for stride in strides)
        return np.lib.stride_tricks.as_strided(flat[offset:], shape, steps, writeable=False)


def open_saved(data: bytes) -> SavedTensor:
    """Open a saved tensor; only the directory and the pickle of the file are read."""
    if data.count(_DIRECTORY_ENTRY) > _MAX_ENTRIES:
        raise _refused(f"it has more than {_MAX_ENTRIES} entries")
    with _reading():
        archive = zipfile.ZipFile(io.BytesIO(data))
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise _refused("it has no data.pkl, or several")
        root = pickles[0].removesuffix("/data.pkl")
        if f"{root}/byteorder" in archive.namelist() and _entry(archive, f"{root}/byteorder") != b"little":
            raise _refused("its data are big-endian")
        if archive.getinfo(pickles[0]).file_size > _MAX_PICKLE_BYTES:
            raise _refused("it contains more than a tensor")
        view = _Pickle().interpret(_entry(archive, pickles[0]))
    if not isinstance(view, _View):
        raise _refused("it does not contain a tensor")
    return SavedTensor(archive, root, view)


def _entry(archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
        raise _refused(f"{name} is compressed")
    return archive.read(name)


class _Pickle:
    """Interpreter of the pickle of a plain tensor; every other instruction is refused."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def interpret(self, data: bytes) -> Any:
        for code, argument, _ in pickletools.genops(data):
            if (act := _CODES.get(code.name)) is None:
                raise _refused(f"its pickle has {code.name}, which a plain tensor does not need")
            act(self, argument)
        return self._stack.pop()

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def name(self, argument: str) -> None:
        self.push(_Name(argument.replace(" ", ".", 1)))

    def name_on_stack(self, argument: None) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self.push(_Name(f"{module}.{name}"))

    def mark(self, argument: None) -> None:
        self._marks.append(len(self._stack))

    def tuple(self, argument: None) -> None:
        start = self._marks.pop()
        self._stack[start:] = [tuple(self._stack[start:])]

    def last(self, count: int) -> None:
        values = tuple(self._stack[-count:])
        if len(values) < count:
            raise _refused("its pickle pops more values than there are")
        self._stack[-count:] = [values]

    def keep(self, place: int | None) -> None:
        self._memo[len(self._memo) if place is None else place] = self._stack[-1]

    def recall(self, place: int) -> None:
        self.push(self._memo[place])

    def storage(self, argument: None) -> None:
        kind, type_, key, _, _ = self._stack.pop()
        if kind != "storage" or not isinstance(type_, _Name) or not (isinstance(key, str) and key.isdigit()):
            raise _refused("its storage is invalid")
        dtype = _DTYPES.get(type_.full.removeprefix("torch."))
        if dtype is None:
            raise RequestError(
                f"prompt_embeds is a tensor of {type_.full}: it must be of float32, float16 or bfloat16",
                param="prompt_embeds",
            )
        self.push(_Storage(key, dtype))

    def call(self, argument: None) -> None:
        arguments, callee = self._stack.pop(), self._stack.pop()
        if not isinstance(callee, _Name) or (build := _CALLS.get(callee.full)) is None:
            name = callee.full if isinstance(callee, _Name) else "something"
            raise _refused(f"its pickle would call {name}")
        self.push(build(*arguments))


def _view(storage: Any, offset: Any, shape: Any, strides: Any, *others: Any) -> _View:
    numbers = (offset, *shape, *strides)
    if not isinstance(storage, _Storage) or len(shape) != len(strides):
        raise _refused("its shape is invalid")
    if any(type(number) is not int or not 0 <= number < 1 << 40 for number in numbers):
        raise _refused("its shape is invalid")
    return _View(storage, offset, tuple(shape), tuple(strides))


_CALLS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _view,
    "torch._utils._rebuild_parameter": lambda view, *others: view,
    "collections.OrderedDict": lambda: None,
}
"""Functions that the pickle of a tensor may call, each with the function of this module that runs instead."""
_Act = Callable[[_Pickle, Any], None]
_PUSH: _Act = _Pickle.push
_CODES: dict[str, _Act] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda pickle, argument: None),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"), _PUSH),
    "NEWTRUE": lambda pickle, argument: pickle.push(True),
    "NEWFALSE": lambda pickle, argument: pickle.push(False),
    "EMPTY_TUPLE": lambda pickle, argument: pickle.push(()),
    "GLOBAL": _Pickle.name,
    "STACK_GLOBAL": _Pickle.name_on_stack,
    "MARK": _Pickle.mark,
    "TUPLE": _Pickle.tuple,
    "TUPLE1": lambda pickle, argument: pickle.last(1),
    "TUPLE2": lambda pickle, argument: pickle.last(2),
    "TUPLE3": lambda pickle, argument: pickle.last(3),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Pickle.keep),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Pickle.recall),
    "BINPERSID": _Pickle.storage,
    "REDUCE": _Pickle.call,
}
"""Handlers of the pickle instructions that are allowed, by name."""
