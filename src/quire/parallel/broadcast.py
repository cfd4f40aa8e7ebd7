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


_torch_dist: Any = dist
"""The module without its stubs, which lack some of its names."""


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


class StatelessProcessGroup:
    """Processes that find each other through a TCP store on rank 0, beside the default process group of
    torch. The names of this class and of its members are those of vLLM."""

    def __init__(self, rank: int, world_size: int, store: Any) -> None:
        self.rank, self.world_size, self.store = rank, world_size, store
        self.socket: Any = None
        """Always None: the store has the only socket. Trainers set this attribute and `store` to None."""
        self._num_barriers = 0

    @staticmethod
    def create(
        host: str, port: int, rank: int, world_size: int, *_: Any, store_timeout: float = 300.0, **__: Any
    ) -> "StatelessProcessGroup":
        """Connect to the store on rank 0, and wait until all ranks have done so."""
        timeout = datetime.timedelta(seconds=store_timeout)
        store = _torch_dist.TCPStore(host, port, world_size, rank == 0, timeout=timeout)
        return StatelessProcessGroup(rank, world_size, store)

    def barrier(self, timeout: float = 300.0) -> None:
        """Wait until all ranks have called this method equally often."""
        self._num_barriers += 1
        prefix = f"quire-barrier/{self._num_barriers}/"
        self.store.set(f"{prefix}{self.rank}", "1")
        keys = [f"{prefix}{rank}" for rank in range(self.world_size)]
        self.store.wait(keys, datetime.timedelta(seconds=timeout))


class BroadcastGroup:
    """Collectives between a trainer and workers: by NCCL between GPUs, else by Gloo. It has the interface of
    vLLM's PyNcclCommunicator."""

    disabled, available = False, True

    def __init__(
        self,
        group: StatelessProcessGroup,
        device: torch.device | str | int,
        *_: Any,
        timeout_s: float = 300.0,
    ) -> None:
        """Join with all other ranks of the group. A number is the index of a GPU; without GPUs, the device is
        the CPU."""
        timeout = datetime.timedelta(seconds=timeout_s)
        self.group, self.rank, self.world_size = group, group.rank, group.world_size
        self.device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if not torch.cuda.is_available():
            self.device = torch.device("cpu")
        store = _torch_dist.PrefixStore("quire-weights", group.store)
        self._group: Any
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, self.rank, self.world_size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, self.rank, self.world_size, timeout)

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        """Send the tensor of rank `src` to all ranks, or receive it; it must be contiguous."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._group.broadcast([tensor], options).wait()

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, stream: Any = None) -> Tensor:
        """Return the sum (or another reduction) of all ranks' tensors."""
        options, out = dist.AllreduceOptions(), tensor.clone()
        options.reduceOp = op
        self._group.allreduce([out], options).wait()
        return out

    def send(self, tensor: Tensor, dst: int, stream: Any = None) -> None:
        self._group.send([tensor], dst, 0).wait()

    def recv(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        self._group.recv([tensor], src, 0).wait()


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
        address = str(init_info["master_address"]), int(init_info["master_port"])
        group = StatelessProcessGroup.create(*address, 0, int(init_info["world_size"]))
        return BroadcastGroup(group, "cuda")

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
