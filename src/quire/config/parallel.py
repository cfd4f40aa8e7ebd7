"""Ranks and pipeline stages: the part of the model that each worker process has."""

from dataclasses import dataclass
from typing import Protocol

from quire.errors import ConfigError


class ParallelSizes(Protocol):
    """The sizes that determine the workers of an engine: ranks per pipeline stage, and stages."""

    @property
    def tensor_parallel_size(self) -> int: ...
    @property
    def pipeline_parallel_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Rank:
    """Data-parallel rank, pipeline stage and tensor-parallel rank of a worker."""

    dp: int = 0
    pp: int = 0
    tp: int = 0

    @staticmethod
    def of(index: int, sizes: ParallelSizes) -> "Rank":
        """Return the rank of the worker with this global index: tensor-parallel ranks are consecutive, then
        stages, then data-parallel ranks."""
        rest, tp = divmod(index, sizes.tensor_parallel_size)
        dp, pp = divmod(rest, sizes.pipeline_parallel_size)
        return Rank(dp, pp, tp)

    def index(self, sizes: ParallelSizes) -> int:
        return (self.dp * sizes.pipeline_parallel_size + self.pp) * sizes.tensor_parallel_size + self.tp


def stage_layers(num_layers: int, num_stages: int, partition: str = "") -> list[range]:
    """Return the indices of the layers of each pipeline stage, by `partition` ("8,8,6") or evenly. Remaining
    layers go to the stages before the last stage, from the end, since the last stage also has the output
    head."""
    counts = _parse_partition(partition, num_layers, num_stages) if partition else []
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


def _parse_partition(text: str, num_layers: int, num_stages: int) -> list[int]:
    setting = f"pp_layer_partition={text!r}"
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{setting} is not a list of layer counts such as '8,8,6'") from None
    if len(counts) != num_stages:
        raise ConfigError(f"{setting} has {len(counts)} parts, but pipeline_parallel_size is {num_stages}")
    if min(counts) < 1 or sum(counts) != num_layers:
        raise ConfigError(
            f"{setting} has {sum(counts)} layers, but this model has {num_layers}, and each part needs one"
        )
    return counts


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage; the default is a single stage with all layers."""

    number: int = 0
    count: int = 1
    partition: str = ""

    @property
    def is_first(self) -> bool:
        """Return whether the stage has the embedding."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Return whether the stage has the final norm and the output head."""
        return self.number == self.count - 1

    def layers(self, num_layers: int) -> range:
        """Return the layers of this stage."""
        return stage_layers(num_layers, self.count, self.partition)[self.number]
