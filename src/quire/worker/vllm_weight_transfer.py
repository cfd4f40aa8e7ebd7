"""Backends of weight updates that were written for vLLM: subclasses of its WeightTransferEngine."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from quire.config.engine import EngineConfig
from quire.config.extensions import TRANSFER_BACKENDS
from quire.errors import RequestError, one_line
from quire.loader.update import TensorInfo
from quire.worker.extensions import VllmConfig
from quire.worker.weight_transfer import WeightTransport

TInitInfo = TypeVar("TInitInfo", bound="WeightTransferInitInfo")
TUpdateInfo = TypeVar("TUpdateInfo", bound="WeightTransferUpdateInfo")


@dataclass
class WeightTransferInitInfo:
    """Base of the `init_info` of a backend, as its fields."""


@dataclass
class WeightTransferUpdateInfo:
    """Base of the `update_info` of a backend, as its fields."""


class WeightTransferEngine(Generic[TInitInfo, TUpdateInfo]):
    """Base of backends with vLLM's interface. `receive_weights` gives tensors to `self.model.load_weights`,
    or to its second argument, as in older releases of vLLM."""

    init_info_cls: Any = WeightTransferInitInfo
    update_info_cls: Any = WeightTransferUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: Any = None, model: Any = None) -> None:
        """Build the backend of a worker. Older subclasses pass the parallel section as `vllm_config`."""
        self.config, self.vllm_config = config, vllm_config
        self.parallel_config = getattr(vllm_config, "parallel_config", vllm_config)
        self.model_config = getattr(vllm_config, "model_config", None)
        self.device, self.model = device, model

    def parse_init_info(self, init_dict: Mapping[str, Any]) -> Any:
        return self._parse("init_info", self.init_info_cls, init_dict)

    def parse_update_info(self, update_dict: Mapping[str, Any]) -> Any:
        return self._parse("update_info", self.update_info_cls, update_dict)

    def _parse(self, what: str, kind: Any, values: Mapping[str, Any]) -> Any:
        try:
            return kind(**values)
        except TypeError as error:
            raise ValueError(f"Invalid {what} for {type(self).__name__}: {error}") from error

    def init_transfer_engine(self, init_info: Any) -> None:
        """Connect to the trainer."""
        raise NotImplementedError

    def start_weight_update(self) -> None:
        """Prepare for an update."""

    def receive_weights(self, update_info: Any, *load_weights: Any) -> None:
        """Receive the tensors of an `update_info`."""
        raise NotImplementedError

    def finish_weight_update(self) -> None:
        """End an update."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        typed = self.parse_update_info(update_info)
        takes_loader = len(inspect.signature(self.receive_weights).parameters) > 1
        self.receive_weights(typed, *((self.model.load_weights,) if takes_loader else ()))

    def shutdown(self) -> None:
        """Close the connection."""


class _CollectingModel:
    """The model for a WeightTransferEngine: its `load_weights` keeps copies of the tensors."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.weights: list[tuple[str, Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        copies = [(name, tensor.detach().clone()) for name, tensor in weights]
        self.weights += copies
        return {name for name, _ in copies}


class EngineTransport(WeightTransport):
    """Receives tensors by a WeightTransferEngine. All tensors of an `update_info` are received before the
    first one is checked, so that the trainer never waits for a refused update."""

    def __init__(
        self,
        kind: type[WeightTransferEngine[Any, Any]],
        config: EngineConfig,
        device: torch.device,
        model: Any,
    ) -> None:
        self._name, self._model = kind.__name__, _CollectingModel(model)
        self._device, vllm_config = device, VllmConfig(config)
        arguments = {
            "config": SimpleNamespace(**config.extensions.weight_transfer_config),
            "vllm_config": vllm_config,
            "device": device,
            "model": self._model,
        }
        parameters = inspect.signature(kind).parameters
        if "parallel_config" in parameters:
            arguments["parallel_config"] = vllm_config.parallel_config
        names = [name for name in arguments if name in parameters]
        self._engine = kind(**{name: arguments[name] for name in names or list(arguments)[:4]})
        if self._engine.model is None:  # older subclasses are built without it
            self._engine.device, self._engine.model = device, self._model

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return function(*args)
        except Exception as error:  # code of the operator, which may raise anything
            raise RequestError(f"the weight transfer by {self._name} failed: {one_line(error)}") from error

    def connect(self, info: Mapping[str, Any]) -> None:
        self._call(self._engine.init_transfer_engine, self._call(self._engine.parse_init_info, info))

    def start(self) -> None:
        self._call(self._engine.start_weight_update)

    def describe(self, info: Mapping[str, Any]) -> list[TensorInfo]:
        self._model.weights.clear()
        self._call(self._engine.update_weights, dict(info))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return [TensorInfo(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._model.weights]

    def receive(self, info: Mapping[str, Any], tensors: Sequence[TensorInfo]) -> Iterator[Tensor]:
        for _, tensor in self._model.weights:
            yield tensor
        self._model.weights.clear()

    def finish(self) -> None:
        self._call(self._engine.finish_weight_update)


def open_transport(
    config: EngineConfig, device: torch.device, index: int, model: nn.Module
) -> WeightTransport | None:
    """Return the transport of the worker with this index among the workers of all engines; None if no trainer
    is configured."""
    backend = config.extensions.weight_transfer_config.get("backend", "")
    if not backend:
        return None
    kind: Any = TRANSFER_BACKENDS[backend]
    if isinstance(kind, type) and issubclass(kind, WeightTransferEngine):
        return EngineTransport(kind, config, device, model)
    transport: WeightTransport = kind(device, index)
    return transport
