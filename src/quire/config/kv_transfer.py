"""Settings of prefill and decode in different engines, from `kv_transfer_config`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.checkpoint.layout import CacheSpec
from quire.config.kv_offloading import ROLES, check_extra, offloading_of
from quire.config.sections import CacheSection
from quire.errors import ConfigError, check_keys

CONNECTORS = ("NixlConnector", "NixlPullConnector")
"""Connectors of vLLM. Quire's requests and responses have their fields, but KV cache entries move over
connections of Quire's own."""
_KNOWN = (
    *("kv_connector", "kv_role", "engine_id", "kv_connector_extra_config", "kv_load_failure_policy"),
    *("kv_buffer_device", "kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip", "kv_port"),
    "enable_permute_local_kv",
)
_EXTRA = (
    *("peers", "load_timeout", "backends", "num_threads", "kv_lease_duration", "bidirectional_kv_xfer"),
    *("kv_recompute_threshold", "decoder_kv_blocks_ttl", "engine_ttl", "enforce_handshake_compat"),
)
_ALLOWED = {"bidirectional_kv_xfer": (False,), "enforce_handshake_compat": (True,)}
"""Keys of kv_connector_extra_config with the only value that Quire supports."""
_POLICIES = ("recompute", "fail")
_ENGINE_ID = re.compile(r"\w[\w.-]{0,127}")
LAST_PORT = 65535


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """Role and peers of an engine that exchanges cached prefixes with other engines."""

    role: str
    engine_id: str | None = None
    fails: bool = False
    """Whether a request fails if its prefix cannot be loaded; otherwise this engine computes the prefix."""
    peers: tuple[tuple[str, int | None], ...] = ()
    """Hosts and ports that prefixes may be loaded from; a port of None means any port of the host."""
    load_timeout: float = 30.0
    """Maximum seconds to load a prefix."""

    @property
    def produces(self) -> bool:
        return self.role != "kv_consumer"

    @property
    def consumes(self) -> bool:
        return self.role != "kv_producer"

    @staticmethod
    def of(config: Mapping[str, Any]) -> "TransferSettings | None":
        """Validate the settings; return None if the engine exchanges no prefixes."""
        if not config:
            return None
        check_keys("kv_transfer_config", config, _KNOWN)
        role, engine_id = config.get("kv_role"), config.get("engine_id")
        if role not in ROLES:
            raise ConfigError(f"kv_transfer_config: kv_role={role!r} must be one of {', '.join(ROLES)}")
        if engine_id is not None and not (isinstance(engine_id, str) and _ENGINE_ID.fullmatch(engine_id)):
            raise ConfigError(
                f"kv_transfer_config: engine_id={engine_id!r:.200} must have 1 to 128 letters, digits, '.',"
                " '_' and '-', and must not begin with '.' or '-'"
            )
        policy = config.get("kv_load_failure_policy", "recompute")
        if policy not in _POLICIES:
            raise ConfigError(
                f"kv_transfer_config: kv_load_failure_policy={policy!r} must be {' or '.join(_POLICIES)}"
            )
        extra = config.get("kv_connector_extra_config") or {}
        if not isinstance(extra, dict):
            raise ConfigError(f"kv_transfer_config: kv_connector_extra_config={extra!r} must be an object")
        check_extra(extra, _EXTRA, _ALLOWED)
        seconds = extra.get("load_timeout", 30.0)
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds <= 3600:
            raise ConfigError(
                f"kv_connector_extra_config: load_timeout={seconds!r} must be a number of seconds above 0, at"
                " most 3600"
            )
        return TransferSettings(role, engine_id, policy == "fail", _peers(extra), float(seconds))


def _peers(extra: Mapping[str, Any]) -> tuple[tuple[str, int | None], ...]:
    peers = extra.get("peers", [])
    if not isinstance(peers, list) or not all(isinstance(peer, str) for peer in peers):
        raise ConfigError(
            f"kv_connector_extra_config: peers={peers!r} must be a list of addresses, as ['10.0.0.1:5600']"
        )
    return tuple(map(_peer, peers))


def _peer(text: str) -> tuple[str, int | None]:
    """Parse `host`, `host:port` or `[IPv6]:port`."""
    parts = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]+))(?::(\d{1,5}))?", text)
    if parts is None or (parts[3] is not None and not 1 <= int(parts[3]) <= LAST_PORT):
        raise ConfigError(f"kv_connector_extra_config: peer {text!r} must be host, host:port or [IPv6]:port")
    return parts[1] or parts[2], None if parts[3] is None else int(parts[3])


def transfer_of(config: Any) -> dict[str, Any]:
    """Translate vLLM's kv_transfer_config: a connector for offloading becomes the kv_offloading settings; a
    connector for prefill and decode in different engines is returned unchanged."""
    if isinstance(config, dict) and config.get("kv_connector") is None:
        return {"kv_transfer_config": {}}
    if not isinstance(config, dict) or config["kv_connector"] not in CONNECTORS:
        return offloading_of(config, CONNECTORS)
    return {"kv_transfer_config": config}


def check_transfer(cache: CacheSection, specs: Sequence[CacheSpec | None]) -> None:
    """Raise if the settings are invalid, or this model cannot exchange prefixes."""
    if TransferSettings.of(cache.kv_transfer_config) is None:
        return
    problem = ""
    if not cache.enable_prefix_caching:
        problem = "prefix caching is off: set enable_prefix_caching, if the model has it"
    elif any(spec is not None and spec.kind == "cross_attention" for spec in specs):
        problem = "this model has cross-attention states, which are not in the prefix cache: leave it out"
    if problem:
        raise ConfigError(f"kv_transfer_config is not supported here: {problem}")
