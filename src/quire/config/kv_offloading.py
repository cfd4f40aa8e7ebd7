"""Settings of KV cache offloading to host memory and disk, checked against the model and the device."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.checkpoint.layout import CacheSpec
from quire.config.machine import Machine
from quire.errors import ConfigError, check_keys
from quire.logs import get_logger, warn_once

logger = get_logger(__name__)

_TIERS = ("kv_offloading_size", "kv_offloading_dir")
_CONNECTORS = ("OffloadingConnector", "SimpleCPUOffloadConnector")
ROLES = ("kv_both", "kv_producer", "kv_consumer")
_DEFAULT_PART = 10
_DEFAULT_BYTES = 16 << 30
"""Maximum default of kv_offloading_size in bytes per device; below it, the default is a tenth
(`_DEFAULT_PART`) of the free host memory."""
_SIMPLE_BYTES = 8 << 30
"""Default of cpu_bytes_to_use in vLLM's SimpleCPUOffloadConnector, in bytes."""
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "spec_name": ("CPUOffloadingSpec", "TieringOffloadingSpec"),
    "eviction_policy": ("lru",),
    "store_threshold": (0, 1),
    "self_describing_kv_events": (False,),
    "canonical_layout": (False,),
    "kv_offload_backend": ("cpu", "disk"),
}
"""Keys of kv_connector_extra_config with the values that Quire supports."""
_WITHOUT_EFFECT = (
    *("block_size", "blocks_per_chunk", "max_tracker_size", "offload_prompt_only", "lazy_offload"),
    *("disk_buffer_slots", "use_page_cache"),
)
_SIZES = ("cpu_bytes_to_use", "disk_path", "disk_capacity_bytes")
_OF_FS_TIER = ("type", "root_dir", "n_read_threads", "n_write_threads", "enable_kv_events", "locality")


def default_host_bytes(free: int, cache_bytes: int, *, num_devices: int, num_engines: int) -> int:
    """Return the default bytes of host memory for the evicted KV blocks of an engine. `free` is the free host
    memory, which `num_engines` engines share; `cache_bytes` and `num_devices` are those of one engine."""
    return min(free // _DEFAULT_PART // num_engines, _DEFAULT_BYTES * num_devices, cache_bytes)


def resolve_offloading(
    args: Mapping[str, Any], specs: Sequence[CacheSpec | None], machine: Machine, *, by_default: bool = True
) -> dict[str, Any]:
    """Return the cache settings (`args`) without the offloading that the model or the device does not
    support. `specs` are the caches of the model's layers. If `by_default` is False, offloading to host memory
    is off unless its size is set."""
    values = dict(args)
    if values.get("kv_offloading_size") is None and (machine.device == "cpu" or not by_default):
        values["kv_offloading_size"] = 0.0
    if values.get("kv_offloading_size") and machine.device == "cpu":
        warn_once(
            logger,
            f"kv_offloading_size={values['kv_offloading_size']} has no effect on a CPU, whose KV cache is in"
            " host memory already: kv_offloading_dir adds a tier on disk",
        )
        values["kv_offloading_size"] = 0.0
    off_reason = ""
    if not values.get("enable_prefix_caching", True):
        off_reason = "prefix caching is off"
    elif any(spec is not None and spec.kind == "cross_attention" for spec in specs):
        off_reason = "this model has cross-attention states, which have no lower tiers"
    if off_reason:
        for name in (name for name in _TIERS if values.pop(name, None)):
            warn_once(logger, f"{name} has no effect: {off_reason}")
        values["kv_offloading_size"] = 0.0
    if values.get("kv_offloading_dir") is not None:
        _check_folder(values["kv_offloading_dir"])
    return values


def existing_part(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists. A folder below one that cannot be read counts as
    missing."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))


def _check_folder(name: str) -> None:
    """Raise if the folder, or its nearest parent that exists, cannot be read and written."""
    if not name or "\0" in name:
        raise ConfigError(f"kv_offloading_dir={name!r} is not the name of a directory")
    try:
        folder = Path(name).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"kv_offloading_dir={name!r}: {error}") from None
    existing = existing_part(folder)
    if not existing.is_dir():
        raise ConfigError(f"kv_offloading_dir={str(folder)!r}: {existing} is not a directory")
    if not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(
            f"kv_offloading_dir={str(folder)!r}: {existing} cannot be read and written by this user; give"
            " another directory, or change its permissions"
        )


def offloading_of(config: Any, others: Sequence[str] = ()) -> dict[str, Any]:
    """Translate vLLM's kv_transfer_config for offloading into kv_offloading_size and kv_offloading_dir.
    `others` are further connectors to name in the error for an unknown one."""
    if not isinstance(config, dict):
        raise ConfigError(f"kv_transfer_config={config!r} must be a JSON object")
    connector, role = config.get("kv_connector"), config.get("kv_role", "kv_both")
    if connector not in _CONNECTORS:
        raise ConfigError(
            f"kv_transfer_config: kv_connector={connector!r} is not supported; known:"
            f" {', '.join((*_CONNECTORS, *others))}"
        )
    if role not in ROLES:
        raise ConfigError(f"kv_transfer_config: kv_role={role!r} must be one of {', '.join(ROLES)}")
    extra = config.get("kv_connector_extra_config") or {}
    if not isinstance(extra, dict):
        raise ConfigError(f"kv_transfer_config: kv_connector_extra_config={extra!r} must be an object")
    check_extra(extra, (*_SIZES, *_ALLOWED, *_WITHOUT_EFFECT, "secondary_tiers"), _ALLOWED)
    num_bytes = extra.get("cpu_bytes_to_use", _SIMPLE_BYTES if connector == _CONNECTORS[1] else None)
    mapped: dict[str, Any] = {"kv_offloading_size": _gib("cpu_bytes_to_use", num_bytes)}
    if (path := extra.get("disk_path")) is not None:
        if not isinstance(path, str) or not path:
            raise ConfigError(f"kv_connector_extra_config: disk_path={path!r} must be a directory")
        mapped["kv_offloading_dir"] = path
    if (capacity := extra.get("disk_capacity_bytes")) is not None:
        mapped["kv_offloading_dir_size"] = _gib("disk_capacity_bytes", capacity)
    return mapped | _secondary_tier(extra.get("secondary_tiers") or [])


def _gib(name: str, num_bytes: Any) -> float:
    """Return a number of bytes in GiB."""
    is_number = isinstance(num_bytes, int | float) and not isinstance(num_bytes, bool)
    if not is_number or not 0 < num_bytes < 2**63:
        raise ConfigError(
            f"{name} must be specified in kv_connector_extra_config, as a number of bytes above 0; it is"
            f" {num_bytes!r}"
        )
    return float(num_bytes) / 2**30


def check_extra(
    extra: Mapping[str, Any], known: Sequence[str], allowed: Mapping[str, tuple[Any, ...]]
) -> None:
    """Raise if kv_connector_extra_config has an unknown key, or a value that `allowed` lacks for its key."""
    check_keys("kv_connector_extra_config", extra, known)
    for name, value in extra.items():
        if name in allowed and value not in allowed[name]:
            choices = " or ".join(map(repr, allowed[name]))
            raise ConfigError(f"kv_connector_extra_config: {name}={value!r} is not supported; use {choices}")


def _secondary_tier(tiers: Any) -> dict[str, Any]:
    """Return the settings for `secondary_tiers`, of which one directory (type `fs`) is supported."""
    if not tiers:
        return {}
    entries = tiers if isinstance(tiers, list) else [tiers]
    kinds = [isinstance(tier, dict) and tier.get("type") for tier in entries]
    folder = entries[0].get("root_dir") if kinds == ["fs"] else None
    if not isinstance(folder, str) or not folder:
        raise ConfigError(
            f"kv_connector_extra_config: secondary_tiers={tiers!r} is not supported; give one tier with type"
            " 'fs' and its root_dir"
        )
    check_keys("secondary_tiers", entries[0], _OF_FS_TIER)
    return {"kv_offloading_dir": folder}
