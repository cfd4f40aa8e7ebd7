"""Broadcasts of a trainer's weights to workers, in a process group beside those of the engine."""

import datetime
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

PACKED_BYTES = 1 << 30
"""Bytes of a chunk of packed tensors, by default as in vLLM."""


class Sized(Protocol):
    """A tensor, or a description of one by shape and dtype."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype: ...


T = TypeVar("T", bound=Sized)


def num_bytes(tensor: Sized) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def chunks(tensors: Iterable[T], max_bytes: int) -> Iterator[list[T]]:
    """Yield tensors in chunks, as vLLM packs them: a chunk ends with the tensor by which it exceeds
    `max_bytes`."""
    chunk: list[T] = []
    size = 0
    for tensor in tensors:
        chunk.append(tensor)
        size += num_bytes(tensor)
        if size > max_bytes:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class BroadcastGroup:
    """A group of a trainer and workers, which connect to each other through a TCP store on rank 0."""

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        device: torch.device,
        *,
        timeout_s: float = 300.0,
    ) -> None:
        """Join the group: by NCCL if the device is a GPU, else by Gloo. All ranks must call it."""
        timeout = datetime.timedelta(seconds=timeout_s)
        self.rank, self.world_size, self.device = rank, world_size, device
        torch_dist: Any = dist  # the stubs lack some of its names
        self._store = torch_dist.TCPStore(host, port, world_size, rank == 0, timeout=timeout)
        store = torch_dist.PrefixStore("quire-weights", self._store)
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, world_size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, world_size, timeout)

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        """Send the tensor of rank `src` to all ranks, or receive it; it must be contiguous."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._group.broadcast([tensor], options).wait()


@dataclass
class NCCLTrainerSendWeightsArgs:
    """Options of a trainer's broadcasts, as in vLLM."""

    group: Any
    src: int = 0
    post_iter_func: Callable[[tuple[str, Tensor]], Tensor] | None = None
    packed: bool = False
    stream: Any = None
    packed_buffer_size_bytes: int = PACKED_BYTES
    packed_num_buffers: int = 2


class NCCLWeightTransferEngine:
    """The trainer's side of weight updates by broadcasts, with vLLM's names; without a GPU by Gloo."""

    @staticmethod
    def trainer_init(init_info: Mapping[str, Any]) -> BroadcastGroup:
        """Join the broadcast group of the workers as rank 0, and return it."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        address = str(init_info["master_address"]), int(init_info["master_port"])
        return BroadcastGroup(*address, 0, int(init_info["world_size"]), device)

    @staticmethod
    def trainer_send_weights(
        iterator: Iterable[tuple[str, Tensor]], trainer_args: NCCLTrainerSendWeightsArgs | Mapping[str, Any]
    ) -> None:
        """Send weights in the order that `update_info` of the workers names them."""
        args = (
            NCCLTrainerSendWeightsArgs(**trainer_args) if isinstance(trainer_args, Mapping) else trainer_args
        )
        convert = args.post_iter_func or (lambda item: item[1])
        tensors = (convert(item).detach().contiguous() for item in iterator)
        if not args.packed:
            for tensor in tensors:
                args.group.broadcast(tensor, src=args.src)
            return
        for chunk in chunks(tensors, args.packed_buffer_size_bytes):
            parts = [tensor.flatten().view(torch.uint8) for tensor in chunk]
            args.group.broadcast(torch.cat(parts), src=args.src)
