"""Settings of the torch profiler, from `profiler_config`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from quire.errors import ConfigError, check_keys
from quire.logs import get_logger, warn_once

logger = get_logger(__name__)

_NO_EFFECT = frozenset(
    [
        "ignore_frontend",
        "delay_iterations",
        "max_iterations",
        "warmup_iterations",
        "active_iterations",
        "wait_iterations",
        "torch_profiler_dump_cuda_time_total",
    ]
)


@dataclass(frozen=True, slots=True)
class Profiling:
    """Directory and options of the traces that torch's profiler records."""

    torch_profiler_dir: str
    torch_profiler_with_stack: bool = False
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False
    torch_profiler_with_flops: bool = False
    torch_profiler_use_gzip: bool = False

    @staticmethod
    def of(config: Mapping[str, Any]) -> "Profiling | None":
        """Validate the settings; return None if profiling is disabled."""
        values = dict(config)
        kind = values.pop("profiler", None)
        for name in values.keys() & _NO_EFFECT:
            warn_once(logger, f"profiler_config: {name}={values.pop(name)!r} has no effect in Quire")
        check_keys("profiler_config", values, ["profiler", *(item.name for item in fields(Profiling))])
        for name, value in values.items():
            if not isinstance(value, str if name == "torch_profiler_dir" else bool):
                raise ConfigError(f"profiler_config: {name} cannot be {value!r}")
        if kind is None:
            return None
        if kind != "torch":
            raise ConfigError(f"profiler_config: the profiler {kind!r} is not supported, only 'torch'")
        if not values.get("torch_profiler_dir"):
            raise ConfigError("profiler_config: torch_profiler_dir must name a folder for the traces")
        return Profiling(**values)
