"""Shares: which part of a stored size a device of a group has."""

from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

from quire.errors import ConfigError
from quire.parallel.group import Group

_MOST_DEVICES = 64
"""That are named to those who asked for a number that does not fit."""


class Shard(NamedTuple):
    """Numbers that lie one after the other in the checkpoint, and those of them that this device has."""

    size: int
    """How many it has; those from the end of the whole on are zeros."""
    start: int = 0
    """The first of them."""
    whole: int = -1
    """How many there are in all; -1: it has all."""

    @property
    def all(self) -> int:
        return self.size if self.whole < 0 else self.whole

    @property
    def is_whole(self) -> bool:
        return self.size == self.all

    def per(self, unit: int | Fraction) -> "Shard":
        """The same of a tensor that has one number for so many of these."""
        return Shard(_over(self.size, unit), _over(self.start, unit), _over(self.all, unit))


def _over(size: int, unit: int | Fraction) -> int:
    return int(-(-size // unit)) if isinstance(unit, int) else int(size / unit)


Runs = tuple[Shard, ...]
"""All that lies one after the other along an axis of a stored tensor."""


def divided(group: Group, size: int) -> Shard:
    """An equal share for each device."""
    share = group.share(size)
    return Shard(share, group.rank * share, size)


def shards_of(numbers: Iterable[int], size: int) -> Runs:
    """Some numbers of a size, in rising order."""
    runs: list[Shard] = []
    end = 0
    for number in numbers:
        if runs and number == end:
            runs[-1] = Shard(runs[-1].size + 1, runs[-1].start, runs[-1].whole + 1)
        else:
            runs.append(Shard(1, number - end, number - end + 1))
        end = number + 1
    runs[-1] = runs[-1]._replace(whole=runs[-1].whole + size - end)
    return tuple(runs)


def padded(group: Group, size: int) -> Shard:
    """The same of a size that does not divide: the last device may have fewer."""
    share = -(-size // group.size)
    return Shard(share, min(group.rank * share, size), size)


def of_heads(group: Group, heads: int, width: int) -> Shard:
    """So many numbers for each head; where heads are fewer than devices, neighbours have the same one."""
    if group.size <= heads:
        return divided(group, heads * width)
    assert group.size % heads == 0
    return Shard(width, group.rank * heads // group.size * width, heads * width)


def by_group(group: Group, num: int, runs: Runs) -> Runs:
    """Runs of all groups of heads as they lie in the checkpoint if each group of them lies together: whole
    groups, or of one group what the device has of it."""
    whole = sum(run.all for run in runs)
    if num % group.size == 0:
        return (divided(group, whole),)
    own = group.rank * num // group.size
    ends = whole // num
    inside = [Shard(run.size, run.start - own * (run.all // num), run.all // num) for run in runs]
    return (Shard(0, 0, own * ends), *inside, Shard(0, 0, whole - (own + 1) * ends))


def check_units(name: str, runs: Iterable[Shard], unit: int, what: str) -> None:
    """Refuse shares that cut what is stored as one: a block, a group, a word of so many numbers."""
    for run in runs:
        ends = run.start + run.size
        if run.is_whole or not (run.start % unit or (ends % unit and ends != run.all)):
            continue
        fitting = [n for n in range(1, _MOST_DEVICES + 1) if run.all % (n * unit) == 0] or [1]
        whole = ", enable_expert_parallel, which leaves experts whole," if ".experts" in name else ","
        raise ConfigError(
            f"{name}: {what} of {unit} do not fit into shares of {run.size} out of {run.all}; use "
            f"tensor_parallel_size {listed(fitting)}{whole} or a checkpoint that is stored in another way"
        )


def listed(numbers: list[int]) -> str:
    """1, 2 or 4"""
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last
