"""Groups of ranks that share work, and their collectives."""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Sending(Protocol):
    """A send in progress."""

    def wait(self) -> Any:
        """Wait until the tensor may be changed; for a GPU only the stream waits, not the host."""


class Group:
    """A group of ranks, and the rank of this device. This class communicates nothing: it is a group of one,
    or used for sizes only."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    def share(self, size: int) -> int:
        """Return this rank's share of a size: the size divided by the number of ranks."""
        assert size % self.size == 0
        return size // self.size

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x; x may be changed."""
        return x

    def gather(self, x: Tensor, axis: int = -1) -> Tensor:
        """Return all ranks' x, of equal shapes, concatenated along an axis."""
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum x over all ranks, and return this rank's equal part of the rows of the sum."""
        return x

    def all_to_all(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send the rows of x: `sent[i]` consecutive rows to rank i. Return the rows from all ranks, in order:
        `received[i]` rows from rank i."""
        return x

    def send(self, x: Tensor, to: int) -> None:
        """Send x to the rank `to`, and return when x may be changed."""
        raise AssertionError("a group of one cannot send")

    def isend(self, x: Tensor, to: int) -> Sending:
        """Start to send x to the rank `to`, without waiting if possible; x must not change until it is
        sent."""
        self.send(x, to)
        return _Sent()

    def receive(self, x: Tensor, source: int) -> None:
        """Receive a tensor from the rank `source` into x."""
        raise AssertionError("a group of one cannot receive")


class _Sent:
    """The result of `Group.isend` for a send that is complete when the call returns."""

    def wait(self) -> None: ...


ALONE = Group()

# Names since torch 2.13, or older ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TorchGroup(Group):
    """A group of torch.distributed processes: NCCL between GPUs, Gloo between CPUs."""

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


class OrderedGroup(TorchGroup):
    """A group that always sums in the order of the ranks. Other groups choose an algorithm, and with it the
    order, by the size of the tensor."""

    def all_reduce(self, x: Tensor) -> Tensor:
        first, *others = self.gather(x[None], 0).float().unbind()
        for other in others:
            first = first + other
        return first.to(x.dtype)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        share = self.share(len(x))
        return self.all_reduce(x)[self.rank * share : (self.rank + 1) * share]
