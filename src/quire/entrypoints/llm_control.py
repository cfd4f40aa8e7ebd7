"""LLMControl: the methods of `LLM` that control its workers and their weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.config.engine import EngineConfig
from quire.errors import RequestError

if TYPE_CHECKING:
    from quire.entrypoints.in_process import LocalEngine
    from quire.entrypoints.multi_core import MultiCoreEngine


@dataclass
class WeightTransferInitRequest:
    """Connection of a trainer, with the keys of its backend."""

    init_info: dict[str, Any]


@dataclass
class WeightTransferUpdateRequest:
    """Tensors of a trainer, with the keys of its backend."""

    update_info: dict[str, Any]


class LLMControl:
    """Worker calls, profiles and weight updates of an offline engine."""

    config: EngineConfig
    llm_engine: "LocalEngine | MultiCoreEngine"

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a public method of each worker, or a function with the worker, and return the results. A
        function is pickled for workers in other processes, with VLLM_ALLOW_INSECURE_SERIALIZATION=1."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Start to profile the workers. Requires `profiler_config`."""
        self.llm_engine.profile(True, profile_prefix)

    def stop_profile(self) -> None:
        """Stop profiling and write the trace into `torch_profiler_dir`."""
        self.llm_engine.profile(False)

    def get_world_size(self, include_dp: bool = True) -> int:
        parallel = self.config.parallel
        size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        return size * parallel.data_parallel_size if include_dp else size

    # ---- weight updates

    def init_weight_transfer_engine(self, request: Any) -> None:
        """Set up the transfer of weights from a trainer. `request` has the `init_info` of the backend of
        `weight_transfer_config`."""
        self.llm_engine.init_weight_transfer_engine(transfer_info(request, "init_info"))

    def start_weight_update(self) -> None:
        """Start an update of the weights."""
        self.llm_engine.start_weight_update()

    def start_draft_weight_update(self) -> None:
        """Raise: the weights of draft models cannot be updated."""
        raise RequestError("the weights of a draft model cannot be updated: construct a new LLM")

    def update_weights(self, request: Any) -> None:
        """Receive new weights, which `update_info` of the request describes. If one does not fit the model,
        the whole update is dropped."""
        self.llm_engine.update_weights(transfer_info(request, "update_info"))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Apply the received weights, and drop the cached prefixes of the old ones."""
        self.llm_engine.finish_weight_update(weight_version)

    def update_weight_version(self, new_version: str) -> None:
        """Name the current weights."""
        self.llm_engine.update_weight_version(new_version)

    def get_weight_version(self) -> str:
        """Return the version of the weights; `default` at start."""
        return self.llm_engine.weight_version


def transfer_info(request: Any, name: str) -> Mapping[str, Any]:
    """Return the part of a request that describes a transfer; requests are dicts or objects."""
    info = request.get(name) if isinstance(request, Mapping) else getattr(request, name, None)
    if not isinstance(info, Mapping):
        raise RequestError(f"the request needs {name!r}, a dict of the backend's keys", param=name)
    return info
