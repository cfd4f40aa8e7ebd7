"""What is recorded of the workers when somebody asks for it, out of `profiler_config`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from quire.errors import ConfigError, nearest
from quire.logs import get_logger, warn_once

logger = get_logger(__name__)

_WITHOUT_USE = frozenset(
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
    """A recording of torch's profiler: where it goes, and what it has beside times."""

    torch_profiler_dir: str
    torch_profiler_with_stack: bool = False
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False
    torch_profiler_with_flops: bool = False
    torch_profiler_use_gzip: bool = False

    @staticmethod
    def of(given: Mapping[str, Any]) -> "Profiling | None":
        """None: nothing can be recorded."""
        values = dict(given)
        kind = values.pop("profiler", None)
        for name in values.keys() & _WITHOUT_USE:
            warn_once(logger, f"profiler_config: {name}={values.pop(name)!r} has no effect in Quire")
        known = [each.name for each in fields(Profiling)]
        for name, value in values.items():
            if name not in known:
                raise ConfigError(
                    f"unknown profiler_config key {name!r}; known: profiler, {', '.join(known)}"
                    f"{nearest(name, known)}"
                )
            if not isinstance(value, str if name == "torch_profiler_dir" else bool):
                raise ConfigError(f"profiler_config: {name} cannot be {value!r}")
        if kind is None:
            return None
        if kind != "torch":
            raise ConfigError(f"profiler_config: there is no profiler {kind!r} here, only 'torch'")
        if not values.get("torch_profiler_dir"):
            raise ConfigError("profiler_config: torch_profiler_dir must name a folder for the traces")
        return Profiling(**values)
