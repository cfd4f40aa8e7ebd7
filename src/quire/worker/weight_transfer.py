"""Transports of new weights from a trainer to a worker: broadcasts, CUDA IPC, shared memory and files."""

import base64
import mmap
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.config.env import Env
from quire.errors import ConfigError, RequestError
from quire.loader.safetensors import entries_of
from quire.loader.update import TensorInfo
from quire.parallel.broadcast import (
    PACKED_BYTES,
    BroadcastGroup,
    StatelessProcessGroup,
    chunks,
    num_bytes,
)

_SHM = Path("/dev/shm")
_SHM_NAME = re.compile(r"[\w.-]{1,200}")
_META = ("names", "dtype_names", "shapes")
"""Keys of an `update_info` whose values are lists with one element per tensor."""


def tensor_infos(info: Mapping[str, Any]) -> list[TensorInfo]:
    """Return the tensors that the lists `names`, `dtype_names` and `shapes` describe."""
    lists = [_list(info, name) for name in _META]
    if len({len(values) for values in lists}) > 1:
        sizes = ", ".join(str(len(values)) for values in lists)
        raise RequestError(f"names, dtype_names and shapes have {sizes} entries, and need the same number")
    return [
        TensorInfo(str(name), _dtype(name, kind), _shape(name, shape))
        for name, kind, shape in zip(*lists, strict=True)
    ]


def _list(info: Mapping[str, Any], name: str) -> list[Any]:
    value = info.get(name)
    if not isinstance(value, list | tuple):
        raise RequestError(f"update_info needs the list {name!r}", param="update_info")
    return list(value)


def _dtype(name: Any, kind: Any) -> torch.dtype:
    dtype = getattr(torch, str(kind).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise RequestError(f"{name}: {kind!r:.80} is not a dtype, as 'bfloat16'", param="update_info")
    return dtype


def _shape(name: Any, shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list | tuple) or not all(type(size) is int and size >= 0 for size in shape):
        raise RequestError(f"{name}: {shape!r:.80} is not a shape, a list of sizes", param="update_info")
    return tuple(shape)


def _check_keys(what: str, info: Mapping[str, Any], needed: Iterable[str], optional: Iterable[str]) -> None:
    missing = [name for name in needed if name not in info]
    unknown = [name for name in info if name not in {*needed, *optional}]
    if missing or unknown:
        words = f"lacks {', '.join(missing)}" if missing else f"has the unknown key {unknown[0]!r:.80}"
        known = ", ".join([*needed, *optional])
        raise RequestError(f"{what} {words}; its keys are {known or 'none'}", param=what)


def split(buffer: Tensor, tensors: Sequence[TensorInfo]) -> Iterator[Tensor]:
    """Yield the tensors that these infos describe from a buffer of bytes, in which they lie in order and
    without gaps."""
    start = 0
    for info in tensors:
        part = buffer[start : start + num_bytes(info)]
        start += num_bytes(info)
        if part.data_ptr() % info.dtype.itemsize:
            part = part.clone()
        yield part.view(info.dtype).view(info.shape)


class WeightTransport:
    """Base of the classes that receive tensors from a trainer, one for each backend."""

    def __init__(self, device: torch.device, index: int) -> None:
        """Build the transport of the worker with this index among the workers of all engines."""
        self._device, self._index = device, index

    def connect(self, info: Mapping[str, Any]) -> None:
        """Set up the connection by the `init_info` of the trainer."""
        _check_keys("init_info", info, (), ())

    def start(self) -> None:
        """Prepare for an update, before the first of its tensors is received."""

    def describe(self, info: Mapping[str, Any]) -> list[TensorInfo]:
        """Return name, dtype and shape of each tensor of an `update_info`, before any of them is received."""
        raise NotImplementedError

    def receive(self, info: Mapping[str, Any], tensors: Sequence[TensorInfo]) -> Iterator[Tensor]:
        """Yield the tensors in order. Each is valid until the next one."""
        raise NotImplementedError

    def drain(self, tensors: Iterator[Tensor]) -> None:
        """Take the rest of the tensors that `receive` yields, if the trainer waits for it. By default it does
        not wait for this worker."""

    def finish(self) -> None:
        """End an update, after the last of its tensors was received."""


class BroadcastTransport(WeightTransport):
    """Receives broadcasts of the trainer, rank 0 of a group: NCCL between GPUs, Gloo between CPUs."""

    _PACKING = ("packed", "packed_buffer_size_bytes", "packed_num_buffers")

    def __init__(self, device: torch.device, index: int) -> None:
        super().__init__(device, index)
        self._group: BroadcastGroup | None = None
        self._options: dict[str, Any] = {}

    def connect(self, info: Mapping[str, Any]) -> None:
        needed = ("master_address", "master_port", "rank_offset", "world_size")
        _check_keys("init_info", info, needed, self._PACKING)
        for name in needed[1:]:
            if type(info[name]) is not int or info[name] < 0:
                raise RequestError(f"init_info: {name} must be a number, got {info[name]!r}", "init_info")
        rank, size = info["rank_offset"] + self._index, info["world_size"]
        if not 0 < rank < size:
            raise RequestError(
                f"init_info: worker {self._index} has the rank {rank}, and world_size is {size}; rank 0 is"
                " the trainer, and the workers follow from rank_offset on",
                param="init_info",
            )
        self._options = {name: info[name] for name in self._PACKING if name in info}
        address = str(info["master_address"]), info["master_port"]
        self._group = BroadcastGroup(StatelessProcessGroup.create(*address, rank, size), self._device)

    def describe(self, info: Mapping[str, Any]) -> list[TensorInfo]:
        _check_keys("update_info", info, _META, self._PACKING)
        return tensor_infos(info)

    def receive(self, info: Mapping[str, Any], tensors: Sequence[TensorInfo]) -> Iterator[Tensor]:
        if self._group is None:
            raise RequestError("the weight transfer is not initialized: call init_weight_transfer_engine")
        options = {**self._options, **{name: info[name] for name in self._PACKING if name in info}}
        if not options.get("packed", False):
            for tensor_info in tensors:
                tensor = torch.empty(tensor_info.shape, dtype=tensor_info.dtype, device=self._device)
                self._group.broadcast(tensor, src=0)
                yield tensor
            return
        for chunk in chunks(tensors, options.get("packed_buffer_size_bytes", PACKED_BYTES)):
            buffer = torch.empty(sum(map(num_bytes, chunk)), dtype=torch.uint8, device=self._device)
            self._group.broadcast(buffer, src=0)
            yield from split(buffer, chunk)

    def drain(self, tensors: Iterator[Tensor]) -> None:
        """Take part in the broadcasts of a refused update, which block the trainer until all ranks do."""
        if self._group is not None:
            for _ in tensors:
                pass


class IpcTransport(WeightTransport):
    """Opens memory of a trainer on the same GPU by CUDA IPC handles."""

    _KEYS = ("ipc_handles", "ipc_handles_pickled", "tensor_sizes")
    _is_packed = False

    def connect(self, info: Mapping[str, Any]) -> None:
        _check_keys("init_info", info, (), ("packed",))
        self._is_packed = bool(info.get("packed", False))

    def describe(self, info: Mapping[str, Any]) -> list[TensorInfo]:
        if self._device.type != "cuda":
            raise RequestError("CUDA IPC needs a GPU: use shared_memory, gloo or file")
        _check_keys("update_info", info, _META, self._KEYS)
        return tensor_infos(info)

    def receive(self, info: Mapping[str, Any], tensors: Sequence[TensorInfo]) -> Iterator[Tensor]:
        handles = info.get("ipc_handles")
        if handles is None:
            if not Env.read(os.environ).allow_insecure_serialization:
                raise RequestError("ipc_handles_pickled needs VLLM_ALLOW_INSECURE_SERIALIZATION=1")
            handles = pickle.loads(base64.b64decode(info.get("ipc_handles_pickled", "")))
        if self._is_packed or isinstance(handles, Mapping):
            yield from split(self._open(handles).view(torch.uint8).flatten(), tensors)
            return
        for handle in handles:
            yield self._open(handle)

    def _open(self, handle: Mapping[str, Any]) -> Tensor:
        """Open the handle of this worker's GPU, and return the tensor that it refers to."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        index = self._device.index if self._device.index is not None else torch.cuda.current_device()
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        if uuid not in handle:
            raise RequestError(f"no handle is for the GPU {uuid}; there are handles for {', '.join(handle)}")
        arguments = list(handle[uuid])
        arguments[6] = index
        tensor: Tensor = rebuild_cuda_tensor(*arguments)
        return tensor


class SharedMemoryTransport(WeightTransport):
    """Reads tensors from a POSIX shared memory object, in which they follow each other."""

    def describe(self, info: Mapping[str, Any]) -> list[TensorInfo]:
        _check_keys("update_info", info, (*_META, "shm_name"), ())
        tensors, path = tensor_infos(info), self._path(info)
        size, expected = path.stat().st_size, sum(map(num_bytes, tensors))
        if size < expected:
            raise RequestError(f"shm_name: {path.name} has {size} bytes, and the tensors have {expected}")
        return tensors

    def _path(self, info: Mapping[str, Any]) -> Path:
        name = str(info["shm_name"]).removeprefix("/")
        if not _SHM_NAME.fullmatch(name) or not (_SHM / name).is_file():
            raise RequestError(f"shm_name: there is no shared memory {name!r:.80}", param="update_info")
        return _SHM / name

    def receive(self, info: Mapping[str, Any], tensors: Sequence[TensorInfo]) -> Iterator[Tensor]:
        with self._path(info).open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        yield from split(torch.frombuffer(memory, dtype=torch.uint8), tensors)


class FileTransport(WeightTransport):
    """Reads tensors from safetensors files: all of a directory, or one file."""

    def describe(self, info: Mapping[str, Any]) -> list[TensorInfo]:
        _check_keys("update_info", info, ("path",), ())
        return [
            TensorInfo(name, entry.dtype, entry.shape)
            for path in self._paths(info)
            for name, entry in self._entries(path).items()
        ]

    def _entries(self, path: Path) -> Mapping[str, Any]:
        try:
            return entries_of(path)
        except ConfigError as error:
            raise RequestError(str(error), param="update_info") from error

    def _paths(self, info: Mapping[str, Any]) -> list[Path]:
        path = Path(str(info["path"]))
        paths = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not paths or not paths[0].is_file():
            raise RequestError(f"path: {path} has no safetensors file", param="update_info")
        return paths

    def receive(self, info: Mapping[str, Any], tensors: Sequence[TensorInfo]) -> Iterator[Tensor]:
        from safetensors import safe_open

        for path in self._paths(info):
            names = self._entries(path)
            with safe_open(path, framework="pt") as file:
                for name in names:
                    yield file.get_tensor(name)
