"""What the deployer sets: environment variables, read once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Env:
    """What the deployer sets. Each is read as QUIRE_NAME, then as VLLM_NAME."""

    cache_root: Path
    logging_level: str = "INFO"
    log_stats_interval: float = 10.0
    """Seconds between two lines of statistics."""
    api_key: str | None = field(default=None, repr=False)
    host_ip: str | None = None
    port: int | None = None
    """First port for messages between processes."""
    cpu_kvcache_space: float | None = None
    """KV cache on a CPU, GiB."""
    allow_long_max_model_len: bool = False
    attention_backend: str | None = None
    server_dev_mode: bool = False

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> "Env":
        found: dict[str, Any] = {}
        for name, kind in _ENV_KINDS.items():
            variable = next(
                (f"{p}_{name.upper()}" for p in ("QUIRE", "VLLM") if environ.get(f"{p}_{name.upper()}")), ""
            )
            if not variable:
                continue
            try:
                found[name] = kind(environ[variable])
            except ValueError:
                raise ConfigError(
                    f"{variable}={environ[variable]!r} is not a valid value; unset it or correct it"
                ) from None
        cache_home = environ.get("XDG_CACHE_HOME") or "~/.cache"
        found.setdefault("cache_root", Path(cache_home).expanduser() / "quire")
        return cls(**found)


def _switch(text: str) -> bool:
    if text.lower() not in ("0", "1", "true", "false"):
        raise ValueError(text)
    return text.lower() in ("1", "true")


_ENV_KINDS: dict[str, Any] = {
    "cache_root": lambda text: Path(text).expanduser(),
    "logging_level": str,
    "log_stats_interval": float,
    "api_key": str,
    "host_ip": str,
    "port": int,
    "cpu_kvcache_space": float,
    "allow_long_max_model_len": _switch,
    "attention_backend": str,
    "server_dev_mode": _switch,
}
