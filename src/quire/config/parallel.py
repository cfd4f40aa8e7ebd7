"""Ranks: which part of the work each worker process has."""

from dataclasses import dataclass
from typing import Protocol

from quire.errors import ConfigError


class ParallelSizes(Protocol):
    """Over how many workers an engine is spread."""

    @property
    def tensor_parallel_size(self) -> int: ...
    @property
    def pipeline_parallel_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Rank:
    """The place of one worker: its core, its stage of layers there, its share of them."""

    dp: int = 0
    pp: int = 0
    tp: int = 0

    @staticmethod
    def of(index: int, sizes: ParallelSizes) -> "Rank":
        """The worker of this number when all are counted: shares of a stage are neighbours, then stages."""
        rest, tp = divmod(index, sizes.tensor_parallel_size)
        dp, pp = divmod(rest, sizes.pipeline_parallel_size)
        return Rank(dp, pp, tp)

    def index(self, sizes: ParallelSizes) -> int:
        return (self.dp * sizes.pipeline_parallel_size + self.pp) * sizes.tensor_parallel_size + self.tp


def stage_layers(num_layers: int, num_stages: int, partition: str = "") -> list[range]:
    """The layers of each stage, as many in each as `partition` says ("8,8,6"). Without one they are divided
    evenly; what is left over goes to stages from the last but one on backwards, since the last has the head,
    too."""
    counts = _partition(partition, num_layers, num_stages) if partition else []
    if not counts:
        if num_layers < num_stages:
            raise ConfigError(
                f"pipeline_parallel_size={num_stages} is more than the {num_layers} layers of this model: "
                f"use at most {num_layers}"
            )
        least, left_over = divmod(num_layers, num_stages)
        from_end = range(num_stages - 1, -1, -1)
        counts = [least + (0 < number <= left_over) for number in from_end]
    ends = [sum(counts[: number + 1]) for number in range(num_stages)]
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def _partition(text: str, num_layers: int, num_stages: int) -> list[int]:
    said = f"pp_layer_partition={text!r}"
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{said} is no list of numbers of layers, such as '8,8,6'") from None
    if len(counts) != num_stages:
        raise ConfigError(f"{said} has {len(counts)} parts, but pipeline_parallel_size is {num_stages}")
    if min(counts) < 1 or sum(counts) != num_layers:
        raise ConfigError(
            f"{said} makes {sum(counts)} layers, but this model has {num_layers}, and each part needs one"
        )
    return counts


@dataclass(frozen=True, slots=True)
class Stage:
    """One of the stages that the layers of a model are divided into; this one has them all."""

    number: int = 0
    count: int = 1
    partition: str = ""

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the norm behind all layers, and the head."""
        return self.number == self.count - 1

    def layers(self, num_layers: int) -> range:
        """Those of a model's layers that it has."""
        return stage_layers(num_layers, self.count, self.partition)[self.number]
