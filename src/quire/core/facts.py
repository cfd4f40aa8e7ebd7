"""Facts about an engine core and its machine, which the core gets when it starts."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from quire.config.engine import EngineConfig


@dataclass(frozen=True, slots=True)
class CoreFacts:
    """Facts that an engine core gets when it starts: its address, its metrics page, and its number among the
    cores of its machine."""

    address: str
    metrics_file: Path
    token: str = field(repr=False)
    """Secret shared with the core's API server processes, and with the engines that step together with it."""
    page: int = 0
    num_pages: int = 1
    """Number of engines with pages in `metrics_file`."""
    index: int = 0
    num_local: int = 1
    """Number of cores on this machine, which share its devices; `index` is the number of this core."""
    keeps_media: bool = False
    """Whether the core caches the data of multimodal items that its API server process sent."""


def core_name(rank: int, size: int) -> str:
    return "EngineCore" if size == 1 else f"EngineCore_DP{rank}"


def config_of_rank(config: EngineConfig, rank: int) -> EngineConfig:
    """Return the configuration of the core with data-parallel rank `rank`."""
    return replace(config, parallel=replace(config.parallel, data_parallel_rank=rank))
