"""Group: devices that share work, and what they tell each other."""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Sending(Protocol):
    """A tensor on its way."""

    def wait(self) -> Any:
        """Returns when it may be changed; a GPU waits by itself, and the host does not."""


class Group:
    """The devices that share a piece of work, and which of them this is. This one tells nothing: it is alone,
    or is asked for shares only."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    def share(self, size: int) -> int:
        """How much of a size is this device's."""
        assert size % self.size == 0
        return size // self.size

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all devices' x; x itself may be changed."""
        return x

    def gather(self, x: Tensor, axis: int = -1) -> Tensor:
        """All devices' x, of equal shapes, one after the other along an axis."""
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """The sum of all devices' x, of which each gets an equal share of the rows."""
        return x

    def all_to_all(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Rows of x to each device in turn, so many to each; so many have come from each."""
        return x

    def send(self, x: Tensor, to: int) -> None:
        """To the device of this rank; returns when x may be changed."""
        raise AssertionError("there is nobody to send to")

    def isend(self, x: Tensor, to: int) -> Sending:
        """The same without waiting, where that can be had; x stays as it is until it has gone."""
        self.send(x, to)
        return _Gone()

    def receive(self, x: Tensor, source: int) -> None:
        """Into x, from the device of this rank."""
        raise AssertionError("there is nobody to hear from")


class _Gone:
    """Nothing is left to wait for."""

    def wait(self) -> None: ...


ALONE = Group()

# Under their names since torch 2.13, or those before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TorchGroup(Group):
    """Devices that are processes of torch.distributed: NCCL between GPUs, Gloo between CPUs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self.group = group

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.group)
        return x

    def gather(self, x: Tensor, axis: int = -1) -> Tensor:
        x, axis = x.contiguous(), axis % x.ndim
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        _all_gather(out, x, group=self.group)
        return out if axis == 0 else torch.cat(out.chunk(self.size), axis)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.share(len(x)), *x.shape[1:])
        _reduce_scatter(out, x.contiguous(), group=self.group)
        return out

    def all_to_all(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=self.group)
        return out

    def send(self, x: Tensor, to: int) -> None:
        dist.send(x, group=self.group, group_dst=to)

    def isend(self, x: Tensor, to: int) -> Sending:
        work = dist.isend(x, group=self.group, group_dst=to)
        assert work is not None
        return work

    def receive(self, x: Tensor, source: int) -> None:
        dist.recv(x, group=self.group, group_src=source)
