"""Ranks: which part of the work each worker process has."""

from dataclasses import dataclass
from typing import Protocol


class Sizes(Protocol):
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
    def of(index: int, sizes: Sizes) -> "Rank":
        """The worker of this number when all are counted: shares of a stage are neighbours, then stages."""
        rest, tp = divmod(index, sizes.tensor_parallel_size)
        dp, pp = divmod(rest, sizes.pipeline_parallel_size)
        return Rank(dp, pp, tp)

    def index(self, sizes: Sizes) -> int:
        return (self.dp * sizes.pipeline_parallel_size + self.pp) * sizes.tensor_parallel_size + self.tp
