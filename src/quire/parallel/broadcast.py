"""A group of a trainer and workers for broadcasts, beside the groups of the engine."""

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class BroadcastGroup:
    """Ranks that meet at a TCP store of rank 0."""

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
        self._store = dist.TCPStore(host, port, world_size, rank == 0, timeout=timeout)
        store = dist.PrefixStore("quire-weights", self._store)
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
