"""Functions and small classes of vLLM that scripts import, for the modules of `vllm_shim`."""

import enum
import functools
import gc
import logging
import os
import socket
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quire.config.engine_args import EngineArgs
from quire.config.env import Env
from quire.config.extensions import TRANSFER_BACKENDS
from quire.configure import configure
from quire.errors import ConfigError
from quire.logs import get_logger
from quire.plugins import register_weight_transfer


class Section(dict[str, Any]):
    """A configuration object of vLLM, such as CompilationConfig, as scripts build it. It is the dictionary of
    its fields, which an engine argument takes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"{name} is not set; set are: {', '.join(self) or 'none'}")
        return self[name]


class VllmEngineArgs(EngineArgs):  # type: ignore[misc]
    """`EngineArgs` with vLLM's method that resolves them."""

    def create_engine_config(self, usage_context: Any = None, headless: bool = False) -> Any:
        """Return the resolved configuration, with the sections and names of vLLM."""
        from quire.worker.extensions import VllmConfig

        return VllmConfig(configure(self.given(), usage="server"))


class UsageContext(enum.StrEnum):
    """Kinds of programs that build an engine. The value has no effect: nothing is reported."""

    UNKNOWN_CONTEXT = enum.auto()
    LLM_CLASS = enum.auto()
    API_SERVER = enum.auto()
    OPENAI_API_SERVER = enum.auto()
    OPENAI_BATCH_RUNNER = enum.auto()
    ENGINE_CONTEXT = enum.auto()


class Platform:
    """The device of this machine, as `vllm.platforms.current_platform` describes it."""

    device_control_env_var = "CUDA_VISIBLE_DEVICES"

    @property
    def device_type(self) -> str:
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    device_name = device_type

    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    is_cuda_alike = is_cuda

    def is_cpu(self) -> bool:
        return self.device_type == "cpu"

    def is_rocm(self) -> bool:
        return False

    is_xpu = is_tpu = is_rocm

    def get_device_name(self, device_id: int = 0) -> str:
        import torch

        return torch.cuda.get_device_name(device_id) if self.is_cuda() else "cpu"


current_platform = Platform()


class ScriptLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger with vLLM's methods that log a message only once."""

    @functools.lru_cache(1024)  # noqa: B019 (loggers live as long as the process)
    def _once(self, level: int, message: str, *args: Any) -> None:
        self.log(level, message, *args, stacklevel=3)

    debug_once = functools.partialmethod(_once, logging.DEBUG)
    info_once = functools.partialmethod(_once, logging.INFO)
    warning_once = functools.partialmethod(_once, logging.WARNING)


def init_logger(name: str) -> ScriptLogger:
    """Return a logger that writes lines as Quire's loggers do."""
    return ScriptLogger(get_logger(name if name.startswith("quire") else f"quire.scripts.{name}"))


def get_tokenizer(tokenizer_name: str, *args: Any, tokenizer_mode: str = "auto", **options: Any) -> Any:
    """Return a tokenizer of transformers."""
    from transformers import AutoTokenizer

    options.setdefault("use_fast", tokenizer_mode != "slow")
    return AutoTokenizer.from_pretrained(tokenizer_name, *args, **options)


def initialize_ray_cluster(parallel_config: Any = None, ray_address: str | None = None) -> None:
    """Join or start a Ray cluster for engines with distributed_executor_backend='ray'. Without this call, the
    engine joins or starts one itself."""
    try:
        import ray
    except ImportError:
        raise ConfigError("initialize_ray_cluster needs Ray: pip install 'quire[ray]'") from None
    if not ray.is_initialized():
        ray.init(address=ray_address, logging_level=logging.WARNING)


def random_uuid() -> str:
    """Return a random id for a request."""
    return uuid.uuid4().hex


def get_ip() -> str:
    """Return the address of this machine that other machines connect to."""
    if address := Env.read(os.environ).host_ip:
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))  # sends nothing; selects the interface
            address = str(probe.getsockname()[0])
        except OSError:
            address = "127.0.0.1"
    return address


def get_open_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def destroy_model_parallel() -> None:
    """Do nothing: an engine closes its process groups itself."""


destroy_distributed_environment = destroy_model_parallel


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free the memory of deleted engines."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if shutdown_ray and "ray" in sys.modules:
        sys.modules["ray"].shutdown()


@contextmanager
def set_current_vllm_config(vllm_config: Any, **_: Any) -> Iterator[None]:
    """Do nothing: no code of Quire reads a current configuration."""
    yield


def initialize_layerwise_reload(model: Any) -> None:
    """Do nothing: `load_weights` of a worker's model repacks every layer that it changes."""


def finalize_layerwise_reload(model: Any, model_config: Any = None) -> None:
    """Do nothing, as `initialize_layerwise_reload`."""


class WeightTransferEngineFactory:
    """The backends of weight updates, by the `backend` of weight_transfer_config."""

    _registry = TRANSFER_BACKENDS

    @staticmethod
    def register_engine(name: str, module_path_or_cls: Any, class_name: str | None = None) -> None:
        """Add a backend: a subclass of `WeightTransferEngine`, or its module and its name."""
        if name in TRANSFER_BACKENDS:
            raise ValueError(f"Weight transfer engine {name!r} is already registered")
        is_path = isinstance(module_path_or_cls, str)
        register_weight_transfer(
            name, f"{module_path_or_cls}:{class_name}" if is_path else module_path_or_cls
        )
