"""Cache hints: information from the client about the later use of a prompt."""

import msgspec

MAX_NAME_CHARS = 256
"""Maximum characters of a session id and of a `prompt_cache_key`."""
RETENTION_S = {"5m": 300, "in_memory": 600, "in-memory": 600, "1h": 3600, "24h": 86400}
"""Retention in seconds by the `ttl` of `cache_control` and by `prompt_cache_retention`."""
DEFAULT_RETENTION_S = RETENTION_S["in_memory"]
"""Seconds for which the blocks of a session or a `prompt_cache_key` are retained without a further hint."""


class CacheHints(msgspec.Struct, frozen=True, omit_defaults=True):
    """Hints of a request: for `retention_s`, its KV blocks are evicted only after blocks without hints."""

    retention_s: int
    """Seconds from the last use of a block for which the block is retained."""
    name: str = ""
    """Session id or `prompt_cache_key`; empty if there is none."""
    scope: str = ""
    """Cache scope of the request: equal names in different scopes are different sessions."""

    @property
    def session(self) -> str | None:
        """Return a session name that is unique over all scopes, or None without a name."""
        return f"{len(self.scope)} {self.scope}{self.name}" if self.name else None
