"""User-defined classes that run inside the engine: their settings, and their import."""

import importlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quire.config.plugins import installed_processors
from quire.errors import ConfigError, check_keys, one_line
from quire.logs import get_logger
from quire.registry import LazyTable

log = get_logger(__name__)

_PATH = re.compile(r"[A-Za-z_][\w.]*[:.][A-Za-z_][\w.<>]*")
_TRANSFER = "quire.worker.weight_transfer"
TRANSFER_BACKENDS = LazyTable(
    "weight transfer backend",
    {
        "nccl": f"{_TRANSFER}:BroadcastTransport",
        "gloo": f"{_TRANSFER}:BroadcastTransport",
        "ipc": f"{_TRANSFER}:IpcTransport",
        "shared_memory": f"{_TRANSFER}:SharedMemoryTransport",
        "file": f"{_TRANSFER}:FileTransport",
    },
)
"""Classes that receive weights from a trainer, by the `backend` of weight_transfer_config."""
_CLASSES: dict[str, type] = {}
"""Classes that the user of this process passed as objects, by path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtensionSection:
    """Classes of your own that run inside of the engine, and updates of its weights."""

    logits_processors: tuple[str, ...] = ()
    """Classes of logits processors, as `module:Class`, in the order in which they are applied."""
    worker_extension_cls: str = ""
    """Class with further methods of the workers, as `module.Class`, for /collective_rpc and
    `LLM.collective_rpc`."""
    weight_transfer_config: dict[str, Any] = field(default_factory=dict)
    """JSON of weight updates by a trainer: backend (`nccl`, `gloo`, `ipc`, `shared_memory`, `file` or that of
    a plugin). Default: none."""
    enable_return_routed_experts: bool = False
    """Return the experts that each token was routed to with the output of every request."""
    return_sampling_mask: bool = False
    """Return with every output the token ids that top_k, top_p and min_p left to choose from, for each token.
    Needs logprobs_mode `processed_logprobs`."""


def name_classes(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with classes replaced by their paths, under which `load_class` finds them."""
    values = dict(args)
    if isinstance(classes := values.get("logits_processors"), list | tuple):
        values["logits_processors"] = [_path_of(entry) for entry in classes]
    if isinstance(values.get("worker_extension_cls"), type):
        values["worker_extension_cls"] = _path_of(values["worker_extension_cls"])
    return values


def _path_of(entry: Any) -> Any:
    if not isinstance(entry, type):
        return entry
    path = f"{entry.__module__}:{entry.__qualname__}"
    _CLASSES[path] = entry
    return path


def extension_section(
    values: Mapping[str, Any], pooling: object, speculation: object, logprobs_mode: str
) -> ExtensionSection:
    """Return the section with the user's settings; raise if they are invalid. `pooling` and `speculation` are
    None if they are off."""
    section = ExtensionSection(**values)
    for path in section.logits_processors:
        if not _PATH.fullmatch(path):
            raise ConfigError(f"logits_processors: {path!r} is not a class path; expected 'module:Class'")
    extension = section.worker_extension_cls
    if extension and not _PATH.fullmatch(extension):
        raise ConfigError(f"worker_extension_cls: {extension!r} is not a class path, as 'module.Class'")
    _check_transfer(section.weight_transfer_config)
    if section.logits_processors and pooling is not None:
        raise ConfigError(
            "logits_processors are not supported for a pooling model, which samples no token: leave them out"
        )
    if section.logits_processors and speculation is not None:
        raise ConfigError(
            "Custom logits processors are not supported when speculative decoding is enabled: leave out"
            " logits_processors or speculative_config"
        )
    if section.return_sampling_mask:
        _check_mask(section, pooling, speculation, logprobs_mode)
    return section


def _check_mask(section: ExtensionSection, pooling: object, speculation: object, logprobs_mode: str) -> None:
    reasons = {
        "a pooling model samples no token": pooling is not None,
        "leave out speculative_config": speculation is not None,
        "leave out logits_processors": bool(section.logits_processors),
        f"set logprobs_mode to 'processed_logprobs', not {logprobs_mode!r}": (
            logprobs_mode != "processed_logprobs"
        ),
    }
    for reason in (reason for reason, applies in reasons.items() if applies):
        raise ConfigError(f"return_sampling_mask is not supported here: {reason}")


def _check_transfer(settings: Mapping[str, Any]) -> None:
    check_keys("weight_transfer_config", settings, ["backend"])
    backend = settings.get("backend", "")
    if settings and backend not in TRANSFER_BACKENDS:
        known = ", ".join(TRANSFER_BACKENDS)
        raise ConfigError(f"weight_transfer_config: unknown backend {backend!r}; known: {known}")


def with_installed(section: ExtensionSection, pooling: object, speculation: object) -> ExtensionSection:
    """Return the section with the logits processors of installed packages before the configured ones. For a
    pooling model or with speculative decoding, processors of packages are ignored with a warning."""
    installed = installed_processors()
    if installed and (pooling is not None or speculation is not None):
        feature = "speculative decoding" if pooling is None else "a pooling model"
        text = "Logits processors of installed packages are not used with %s: %s"
        log.warning(text, feature, ", ".join(installed))
        return section
    return replace(section, logits_processors=(*installed, *section.logits_processors))


def load_class(path: str, setting: str) -> type:
    """Import a class by `module:Class` or `module.Class`. If its module imports names of `vllm`, it gets
    Quire's classes, unless vLLM itself is already imported."""
    if path in _CLASSES:
        return _CLASSES[path]
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if module == "__main__" or "<locals>" in name:
        raise ConfigError(
            f"{setting}: the class {name} of the script itself is not known to other processes: put it into a"
            " module that they can import"
        )
    if getattr(sys.modules.get("vllm"), "__file__", None) is None:
        importlib.import_module("quire.entrypoints.vllm_shim").install()
    try:
        loaded: Any = importlib.import_module(module)
        for part in name.split("."):
            loaded = getattr(loaded, part)
    except Exception as error:  # code of the operator, which may raise anything
        raise ConfigError(f"{setting}: {path!r} cannot be imported: {one_line(error)}") from error
    if not isinstance(loaded, type):
        raise ConfigError(f"{setting}: {path!r} is not a class, but a value of type {type(loaded).__name__}")
    return loaded
