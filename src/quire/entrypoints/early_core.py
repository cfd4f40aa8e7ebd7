"""The engine core of a server on a CPU, whose process starts before the configuration is known.

Its imports take longer than everything else that a server does before it is ready. They do not depend on the
configuration, so they run while the supervisor resolves it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from quire.config.server_sections import HttpSection
from quire.system.platform import detect
from quire.system.process import imports_frozen, limit_thread_spinning
from quire.system.waiting_process import WaitingProcess

_SINGLE = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size", "nnodes")
"""Engine arguments that must all be 1 for the worker to run in the engine core's process, the only one."""


@contextmanager
def early_core(values: Mapping[str, Any], http: HttpSection) -> Iterator[WaitingProcess | None]:
    """Yield a process that imports the engine while it waits for the task to run the engine core. Yield None
    if the engine arguments `values` need more processes or a GPU. A process that got no task ends with the
    context."""
    if not _is_alone(values, http):
        yield None
        return
    process = WaitingProcess(_import_engine, "EngineCore")
    try:
        yield process
    finally:
        process.close()


def _is_alone(values: Mapping[str, Any], http: HttpSection) -> bool:
    """Whether one core process on a CPU runs the worker. On a GPU, the processes that compile kernels must
    start before torch is imported."""
    is_single = all(values.get(name, 1) == 1 for name in _SINGLE)
    backend, device = values.get("distributed_executor_backend") or "uni", values.get("device", "auto")
    if not is_single or backend != "uni" or http.headless or device not in ("auto", "cpu"):
        return False
    return detect(device).device == "cpu"


def _import_engine() -> None:
    limit_thread_spinning()
    with imports_frozen():
        import quire.core.process
        import quire.executor.inprocess  # noqa: F401  # imports torch
