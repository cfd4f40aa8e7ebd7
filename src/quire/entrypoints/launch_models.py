"""The supervisor of a server with several models: its API process starts and ends the engine cores itself."""

import os
from collections.abc import Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from quire.config.data_parallel import Topology
from quire.entrypoints.launch import Supervisor
from quire.entrypoints.models_config import ConfiguredModel
from quire.errors import ConfigError
from quire.memory import human, model_memory
from quire.server.settings import ServerSettings
from quire.system.process import raise_file_limit
from quire.system.scratch import Scratch

_SHARE = 0.95
"""Default fraction of the device's memory (models_memory_gb) that all models together may use."""


class ModelsSupervisor(Supervisor):
    """Starts the API process of a server with several models, and restarts it if it dies, until the server is
    stopped."""

    def __init__(
        self, models: Sequence[ConfiguredModel], settings: ServerSettings, budget_bytes: int, folder: Path
    ) -> None:
        super().__init__(models[0].config, settings, Topology(0, range(0), range(0), 1), folder)
        self._models, self._budget_bytes = list(models), budget_bytes

    def _make_api(self, index: int, parent: connection.Connection) -> BaseProcess:
        args = (
            self._models,
            self.settings,
            self._budget_bytes,
            self.listener,
            self._key_file,
            self.folder,
            parent,
        )
        return self.context.Process(target=_run_models, args=args, name=f"APIServer{index}")

    def _warn_about_threads(self) -> None:
        """Do not log advice about the number of threads: it depends on which models are loaded and not
        asleep."""


def _run_models(*args: Any) -> None:
    from quire.entrypoints.models_process import run_models  # here, so that the supervisor does not import it

    run_models(*args)


def memory_budget(models: Sequence[ConfiguredModel], settings: ServerSettings) -> int:
    """Return the memory in bytes that all models together may use; raise a ConfigError if one of them can
    never be loaded."""
    machine, limit_gb = models[0].config.machine, settings.models.models_memory_gb
    budget = int(machine.total_bytes * _SHARE if limit_gb is None else limit_gb * 2**30)
    pinned = sum(model_memory(model.config).awake for model in models if model.pinned)
    for model in models:
        needed = model_memory(model.config).awake
        total = pinned if model.pinned else pinned + needed
        if total > budget:
            beside = f" beside {human(total - needed)} of pinned models" if total > needed else ""
            raise ConfigError(
                f"{model.name} needs {human(needed)}{beside}, but models_memory_gb is {human(budget)}: raise "
                "it, or lower gpu_memory_utilization or kv_cache_memory_bytes of the models"
            )
    return budget


def launch_models(models: Sequence[ConfiguredModel], settings: ServerSettings) -> int:
    """Serve several models until the server is stopped; return the exit code."""
    if settings.http.headless or (settings.http.api_server_count or 1) > 1:
        raise ConfigError("several models have one API process: leave out api_server_count and headless")
    if settings.responses is not None:
        raise ConfigError(
            "the store of responses (VLLM_ENABLE_RESPONSES_API_STORE) is for one model: disable it"
        )
    budget_bytes = memory_budget(models, settings)
    raise_file_limit()
    with Scratch() as scratch:
        for number in range(len(models)):
            os.mkdir(scratch.path / f"model{number}")
        return ModelsSupervisor(models, settings, budget_bytes, scratch.path).run()
