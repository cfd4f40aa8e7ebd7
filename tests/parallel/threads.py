"""Ranks as threads for fast tests: the same function in each, synchronized by a barrier."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.config.parallel import Rank
from quire.parallel.group import Group
from quire.parallel.world import World

TIMEOUT_S = 120.0


class Table:
    """The shared buffer of a group of threads."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self.laid: list[Any] = [None] * size
        self.mail: dict[tuple[int, int], list[Tensor]] = {}
        self.arrived = threading.Condition()


class ThreadGroup(Group):
    """A group of threads of this process. `num_told` counts the exchanges."""

    def __init__(self, table: Table, rank: int) -> None:
        super().__init__(rank, len(table.laid))
        self.table = table
        self.num_told = 0

    def _exchange(self, value: Any) -> list[Any]:
        """Return the tensors of all ranks, after all ranks have taken them."""
        self.num_told += 1
        self.table.laid[self.rank] = value
        self.table.barrier.wait()
        laid = list(self.table.laid)
        self.table.barrier.wait()
        return laid

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(torch.stack(self._exchange(x.clone())).sum(0))

    def gather(self, x: Tensor, axis: int = -1) -> Tensor:
        return torch.cat(self._exchange(x.clone()), axis)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x.clone())).sum(0).chunk(self.size)[self.rank].clone()

    def all_to_all(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out = torch.cat([pieces[self.rank] for pieces in self._exchange(x.clone().split(sent))])
        assert len(out) == sum(received)
        return out

    def send(self, x: Tensor, to: int) -> None:
        with self.table.arrived:
            self.table.mail.setdefault((self.rank, to), []).append(x.clone())
            self.table.arrived.notify_all()

    def receive(self, x: Tensor, source: int) -> None:
        with self.table.arrived:
            mail = self.table.mail.setdefault((source, self.rank), [])
            assert self.table.arrived.wait_for(lambda: bool(mail), TIMEOUT_S), f"nothing came from {source}"
            x.copy_(mail.pop(0))


def groups(size: int) -> list[Group]:
    """Return the group as seen by each of its ranks."""
    table = Table(size)
    return [ThreadGroup(table, rank) for rank in range(size)]


def tp_worlds(size: int) -> list[World]:
    return [World(Rank(tp=rank), tp=group) for rank, group in enumerate(groups(size))]


def run_threads(
    size: int,
    what: Callable[..., Any],
    *args: Any,
    worlds: Callable[[int], list[World]] = tp_worlds,
) -> list[Any]:
    """Return the result of `what(world, *args)` in each of this many threads, or raise the first error.

    `worlds` makes their worlds (tensor-parallel by default).
    """
    output: list[Any] = [None] * size
    errors: list[BaseException] = []
    made = worlds(size)
    grad = torch.is_grad_enabled()

    def run(index: int) -> None:
        try:
            with torch.set_grad_enabled(grad):
                output[index] = what(made[index], *args)
        except BaseException as error:
            errors.append(error)
            for group in (made[index].tp, made[index].pp, made[index].ep):
                if isinstance(group, ThreadGroup):
                    group.table.barrier.abort()

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S + 60)
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    assert not errors and not any(thread.is_alive() for thread in threads), "a thread waits for the others"
    return output
