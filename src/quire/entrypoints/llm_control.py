"""LLMControl: the methods of `LLM` and its engines that control the workers, their weights and caches."""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from quire.config.engine import EngineConfig
from quire.data.lora import LoRARequest
from quire.errors import RequestError
from quire.frontend.control import CoreControl

T = TypeVar("T")


@dataclass
class WeightTransferInitRequest:
    """Request to connect to a trainer. `init_info` has the settings of the backend
    (weight_transfer_config)."""

    init_info: dict[str, Any]


@dataclass
class WeightTransferUpdateRequest:
    """Request to receive new weights from a trainer. `update_info` describes the tensors; its fields depend
    on the backend of `weight_transfer_config`."""

    update_info: dict[str, Any]


class ConfigViews:
    """The configuration of an engine under vLLM's names."""

    config: EngineConfig

    @cached_property
    def vllm_config(self) -> Any:
        """Return the configuration, with the sections and names of vLLM."""
        from quire.worker.extensions import VllmConfig

        return VllmConfig(self.config)

    @property
    def model_config(self) -> Any:
        return self.vllm_config.model_config


class LLMControl(ConfigViews):
    """The control methods of `LLM` and of its engines, for callers without an event loop. Each runs a
    coroutine of `CoreControl`."""

    _operation: CoreControl

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that calls the engine cores, and return its result."""
        raise NotImplementedError

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a public method of each worker, or a function with each worker as its argument; return the
        results by worker. Raise RequestError after `timeout` seconds. For workers in other processes a
        function is pickled: set VLLM_ALLOW_INSECURE_SERIALIZATION=1."""
        return self._wait(self._operation.collective_rpc(method, timeout, args, kwargs))

    def apply_model(self, func: Callable[[Any], T]) -> list[T]:
        """Call a function with the model of each worker; return the results by worker."""
        return self.collective_rpc(_call_with_model, args=(func,))

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Start to profile the workers. Requires `profiler_config`."""
        self._wait(self._operation.profile(True, profile_prefix))

    def stop_profile(self) -> None:
        """Stop profiling and write the trace into `torch_profiler_dir`."""
        self._wait(self._operation.profile(False))

    def get_world_size(self, include_dp: bool = True) -> int:
        parallel = self.config.parallel
        size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        return size * parallel.data_parallel_size if include_dp else size

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Restore the memory that `sleep` released: all of it, or by `tags` the `weights` or the
        `kv_cache`."""
        self._wait(self._operation.wake_up(tags))

    def is_sleeping(self) -> bool:
        return self._wait(self._operation.is_sleeping())

    # ---- adapters

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load a LoRA adapter before a request needs it; return True."""
        return self._wait(self._operation.add_lora(lora_request))

    def remove_lora(self, lora_id: int) -> bool:
        """Remove an adapter that `add_lora` has loaded when no request uses it any more; return whether there
        was one."""
        return self._wait(self._operation.remove_lora(lora_id))

    def list_loras(self) -> set[int]:
        """Return the ids of the adapters that `add_lora` has loaded."""
        return set(self._operation.loras)

    # ---- caches

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes, with `reset_connector` also those in host memory and on disk. Return
        False while requests hold blocks, unless `reset_running_requests` preempts these requests."""
        return self._wait(self._operation.reset_prefix_cache(reset_running_requests, reset_connector))

    def reset_mm_cache(self) -> None:
        """Clear the cache of processed images, videos and audio."""
        self._wait(self._operation.reset_mm_cache())

    def reset_encoder_cache(self) -> bool:
        """Drop the encoder outputs that no request needs; return whether the encoder cache is empty."""
        return self._wait(self._operation.reset_encoder_cache())

    # ---- weight updates

    def init_weight_transfer_engine(self, request: Any) -> None:
        """Set up the transfer of weights from a trainer. `request` has the `init_info` of the backend of
        `weight_transfer_config`."""
        self._wait(self._operation.init_weight_transfer_engine(transfer_info(request, "init_info")))

    def start_weight_update(self) -> None:
        """Start an update of the weights. The old weights are served until `finish_weight_update`."""
        self._wait(self._operation.start_weight_update())

    def start_draft_weight_update(self) -> None:
        """Raise: the weights of draft models cannot be updated."""
        raise RequestError("the weights of a draft model cannot be updated: construct a new LLM")

    def update_weights(self, request: Any) -> None:
        """Receive new weights, which `update_info` of the request describes. If a tensor does not fit the
        model, the whole update is dropped."""
        self._wait(self._operation.update_weights(transfer_info(request, "update_info")))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Apply the received weights as version `weight_version`, and drop the old cached prefixes."""
        self._wait(self._operation.finish_weight_update(weight_version))

    def update_weight_version(self, new_version: str) -> None:
        """Set the version name of the current weights."""
        self._wait(self._operation.update_weight_version(new_version))

    def get_weight_version(self) -> str:
        """Return the version name of the weights; `default` until a version is set."""
        return self._operation.weight_version


def transfer_info(request: Any, name: str) -> Mapping[str, Any]:
    """Return the entry `name` of a weight transfer request, which is a dict or an object."""
    info = request.get(name) if isinstance(request, Mapping) else getattr(request, name, None)
    if not isinstance(info, Mapping):
        raise RequestError(f"the request needs {name!r}, a dict of the backend's keys", param=name)
    return info


def _call_with_model(worker: Any, function: Callable[[Any], Any]) -> Any:
    return function(worker.get_model())
