"""Settings of KV events, from `kv_events_config`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from quire.config.sections import CacheSection, ParallelSection
from quire.errors import ConfigError, check_keys
from quire.logs import get_logger, warn_once

logger = get_logger(__name__)

_PUBLISHERS = ("zmq", "null")
_ENCODINGS = ("map", "array")
_LEAST = {"buffer_steps": 1, "hwm": 0, "max_queue_size": 1}
_TCP = re.compile(r"(tcp://.+):(\d+)$")
_LAST_PORT = 65535


@dataclass(frozen=True, slots=True)
class KVEventSettings:
    """Addresses, queues and encoding of the events of the prefix cache."""

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    """Number of past batches of events that are kept for replay."""
    hwm: int = 100_000
    """Maximum number of messages that are queued for a slow subscriber; further messages are dropped. 0: no
    limit."""
    max_queue_size: int = 100_000
    """Maximum number of batches of events that wait for the publishing thread; further batches are
    dropped."""
    topic: str = ""
    encoding: str = "map"
    """How an event is encoded: as a map with its type, or as an array, as in vLLM before 0.24."""

    @staticmethod
    def of(config: Mapping[str, Any]) -> "KVEventSettings | None":
        """Validate the settings; return None if KV events are off."""
        known = ["enable_kv_cache_events", "publisher", *(item.name for item in fields(KVEventSettings))]
        check_keys("kv_events_config", config, known)
        for name, value in config.items():
            _check(name, value)
        values = dict(config)
        is_on, publisher = values.pop("enable_kv_cache_events", False), values.pop("publisher", None)
        settings = KVEventSettings(**values)
        return settings if is_on and publisher != "null" else None


def check_events(config: Mapping[str, Any], parallel: ParallelSection, cache: CacheSection) -> None:
    """Raise if the settings are invalid, or the endpoints of data-parallel ranks collide."""
    if (settings := KVEventSettings.of(config)) is None:
        return
    if not cache.enable_prefix_caching:
        warn_once(logger, "kv_events_config has no effect: prefix caching is off")
    ranks = range(parallel.data_parallel_size)
    used = {_port_of(endpoint_of(settings.endpoint, rank)) for rank in ranks}
    for rank in ranks if settings.replay_endpoint is not None else ():
        address = endpoint_of(str(settings.replay_endpoint), rank)
        if _port_of(address) in used:
            raise ConfigError(
                f"kv_events_config: replay_endpoint is {address} on data-parallel rank {rank}, and endpoint"
                f" takes the same port: keep the two ports at least {len(ranks)} apart"
            )


def _check(name: str, value: Any) -> None:
    """Raise if a value has the wrong type or is out of range."""
    match name:
        case "enable_kv_cache_events":
            wanted = None if isinstance(value, bool) else "true or false"
        case "publisher":
            wanted = None if value is None or value in _PUBLISHERS else "zmq or null"
        case "encoding":
            wanted = None if value in _ENCODINGS else "map or array"
        case "topic":
            wanted = None if isinstance(value, str) else "a string"
        case "endpoint" | "replay_endpoint":
            is_none = value is None and name == "replay_endpoint"
            wanted = (
                None if is_none or _is_endpoint(value) else "an address such as tcp://*:5557 or ipc://path"
            )
        case _:
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= _LEAST[name]
            wanted = None if is_count else f"a whole number of at least {_LEAST[name]}"
    if wanted is not None:
        raise ConfigError(f"kv_events_config: {name}={value!r} must be {wanted}")


def _is_endpoint(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    if value.startswith("tcp://"):
        parts = _TCP.match(value)
        return parts is not None and 1 <= int(parts[2]) <= _LAST_PORT
    return value.startswith(("ipc://", "inproc://")) and not value.endswith("://")


def _port_of(endpoint: str) -> str:
    """Return the port of a TCP endpoint, or the whole endpoint of another kind."""
    return parts[2] if (parts := _TCP.match(endpoint)) else endpoint


def endpoint_of(endpoint: str, rank: int) -> str:
    """Return the endpoint of a data-parallel rank: ranks above 0 add their number to the port or the name."""
    if rank == 0:
        return endpoint
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{rank}"
    parts = _TCP.match(endpoint)
    if parts is None:
        raise ConfigError(
            f"kv_events_config: {endpoint!r} is one address, and each data-parallel rank needs its own: use"
            " tcp://host:port, where ranks add their number to the port"
        )
    port = int(parts[2]) + rank
    if port > _LAST_PORT:
        raise ConfigError(
            f"kv_events_config: the port of data-parallel rank {rank} is {port}, above {_LAST_PORT}: lower"
            f" that of {endpoint!r}"
        )
    return f"{parts[1]}:{port}"
