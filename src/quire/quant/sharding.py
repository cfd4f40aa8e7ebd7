"""Shards: the part of a stored size that a device of a tensor-parallel group has."""

from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

from quire.errors import ConfigError
from quire.parallel.group import Group

_MOST_DEVICES = 64
"""Largest number of devices that error messages suggest."""


class Shard(NamedTuple):
    """A contiguous range of a stored axis that this device has."""

    size: int
    """Length of the range; entries beyond the end of the axis are zeros."""
    start: int = 0
    """Index of the first entry."""
    whole: int = -1
    """Length of the whole axis; -1: equal to `size`."""

    @property
    def all(self) -> int:
        return self.size if self.whole < 0 else self.whole

    @property
    def is_whole(self) -> bool:
        return self.size == self.all

    def per(self, unit: int | Fraction) -> "Shard":
        """Return the shard of a tensor that has one value per `unit` entries, such as a scale per block."""
        return Shard(_in_units(self.size, unit), _in_units(self.start, unit), _in_units(self.all, unit))


def _in_units(size: int, unit: int | Fraction) -> int:
    return int(-(-size // unit)) if isinstance(unit, int) else int(size / unit)


Runs = tuple[Shard, ...]
"""The parts of one axis of a stored tensor that this device loads: the axis is divided into consecutive
ranges, such as queries, keys and values, and there is a shard of each range."""


def divided(group: Group, size: int) -> Shard:
    """Return this device's shard of an axis that is divided evenly over the group."""
    share = group.share(size)
    return Shard(share, group.rank * share, size)


def shards_of(numbers: Iterable[int], size: int) -> Runs:
    """Return the `Runs` that select the entries with the ascending indices `numbers` from an axis of `size`
    entries."""
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
    """Return this device's shard of an axis that the group may not divide evenly: the last shards are padded
    with zeros."""
    share = -(-size // group.size)
    return Shard(share, min(group.rank * share, size), size)


def of_heads(group: Group, heads: int, width: int) -> Shard:
    """Return this device's shard of `heads` with `width` values each. If there are fewer heads than devices,
    adjacent devices have the same head."""
    if group.size <= heads:
        return divided(group, heads * width)
    assert group.size % heads == 0
    return Shard(width, group.rank * heads // group.size * width, heads * width)


def by_group(group: Group, num: int, runs: Runs) -> Runs:
    """Return this device's `Runs` of a fused projection (query, key and value) that the checkpoint stores by
    groups of heads: for each of `num` groups its queries, its key and its value. A device has whole groups or
    a part of one. `runs` are its shards if each projection were stored on its own."""
    whole = sum(run.all for run in runs)
    if num % group.size == 0:
        return (divided(group, whole),)
    index = group.rank * num // group.size
    ends = whole // num
    inside = [Shard(run.size, run.start - index * (run.all // num), run.all // num) for run in runs]
    return (Shard(0, 0, index * ends), *inside, Shard(0, 0, whole - (index + 1) * ends))


def check_units(name: str, runs: Iterable[Shard], unit: int, what: str) -> None:
    """Raise a ConfigError if a shard cuts a storage unit of `unit` values (a block, a group or a word);
    `what` names these units in the error."""
    for run in runs:
        ends = run.start + run.size
        if run.is_whole or not (run.start % unit or (ends % unit and ends != run.all)):
            continue
        fitting = [n for n in range(1, _MOST_DEVICES + 1) if run.all % (n * unit) == 0] or [1]
        whole = ", enable_expert_parallel, which leaves experts whole," if ".experts" in name else ","
        raise ConfigError(
            f"{name}: {what} of {unit} do not fit into shards of {run.size} out of {run.all}; use "
            f"tensor_parallel_size {listed(fitting)}{whole} or another checkpoint"
        )


def listed(numbers: list[int]) -> str:
    """Format numbers as "1, 2 or 4"."""
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last
