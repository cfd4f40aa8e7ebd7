"""Cache hints: what a client says about the later use of a prompt."""

import msgspec

MAX_NAME_CHARS = 256
"""Maximum characters of a session id and of a `prompt_cache_key`."""
RETENTION_S = {"5m": 300, "in_memory": 600, "in-memory": 600, "1h": 3600, "24h": 86400}
"""Seconds by the `ttl` of `cache_control` and by `prompt_cache_retention`."""
DEFAULT_RETENTION_S = RETENTION_S["in_memory"]
"""Seconds for which the blocks of a session or a `prompt_cache_key` are retained without a further hint."""


class CacheHints(msgspec.Struct, frozen=True, omit_defaults=True):
    """Hints of a request: its blocks are evicted after those of requests without hints, for some time."""

    retention_s: int
    """Seconds from the last use of a block."""
    name: str = ""
    """Session id or `prompt_cache_key`; empty if there is none."""
    scope: str = ""
    """Cache scope of the request: names of different scopes are different."""

    @property
    def session(self) -> str | None:
        """Return the name that requests for the same engine core share, or None."""
        return f"{len(self.scope)} {self.scope}{self.name}" if self.name else None
