"""Cache scopes: groups of requests that share cached prefixes and media."""

from contextvars import ContextVar

CACHE_SCOPE: ContextVar[str] = ContextVar("cache_scope", default="")
"""Cache scope of the current HTTP request: its API key, or the group of API keys that share caches. It is
empty for API keys without names and for offline calls; such requests all share cached prefixes."""
_ESCAPE = "\0"


def scoped_salt(salt: str | None) -> str | None:
    """Return the salt for the prefix cache keys of a request: the cache scope of the current HTTP request and
    the request's `cache_salt`. The salts of two scopes are never equal, whatever `cache_salt` a client
    chooses."""
    scope = CACHE_SCOPE.get()
    if scope:
        # The length separates scope and salt; "-" and "+" distinguish no salt and an empty salt.
        return f"{_ESCAPE}{len(scope)} {scope}{'-' if salt is None else '+' + salt}"
    return _ESCAPE * 2 + salt if salt is not None and salt.startswith(_ESCAPE) else salt


def split_salt(salt: str | None) -> tuple[str, str | None]:
    """Return the scope and the `cache_salt` of a salt that `scoped_salt` returned."""
    if salt is None or not salt.startswith(_ESCAPE):
        return "", salt
    if salt.startswith(_ESCAPE * 2):
        return "", salt.removeprefix(_ESCAPE * 2)
    length, _, rest = salt.removeprefix(_ESCAPE).partition(" ")
    scope, salt = rest[: int(length)], rest[int(length) :]
    return scope, salt[1:] if salt[0] == "+" else None
