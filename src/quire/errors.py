"""The exceptions of Quire. Errors that a caller causes name the value, the limit and the remedy."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class QuireError(Exception):
    """Base class of all exceptions that Quire raises on purpose."""


class ConfigError(QuireError, ValueError):
    """Raised if a flag, a model file or a combination of settings is invalid, before the engine starts."""


class UnsupportedSetting(ConfigError):
    """Raised if Quire's own code of an architecture does not support the value of `key` in config.json."""

    def __init__(self, message: str, key: str) -> None:
        super().__init__(message)
        self.key = key


class RequestError(QuireError, ValueError):
    """Raised if one request is invalid; the engine is not affected. `param` names the invalid field."""

    status = 400

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Unreachable(RequestError):
    """Raised if a resource that a request refers to cannot be fetched."""

    status = 422


class TooMany(RequestError):
    """Raised if a request exceeds a limit at the moment; it may be sent again after `retry_after_s`
    seconds."""

    status = 429

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(QuireError, RuntimeError):
    """Raised if the engine failed while it processed a request."""

    status = 500


class EngineDead(EngineError):
    """Raised if the engine is not available: starting, dead or hung. The same request may succeed later."""

    status = 503


class RequestsFailed(EngineError):
    """Raised if some requests of one offline call failed; the others are finished.

    `outputs` has the outputs of all requests in the order of the prompts, including the partial outputs of
    failed ones. `errors` has the error of every failed request by the index of its prompt.
    """

    def __init__(self, outputs: Sequence[Any], errors: Mapping[int, Exception]) -> None:
        index, error = min(errors.items())
        super().__init__(
            f"{len(errors)} of {len(outputs)} requests failed, the first at prompt {index}: {error}; the "
            "outputs of the others are in `outputs` of this exception"
        )
        self.outputs = list(outputs)
        self.errors = dict(errors)


def one_line(error: BaseException) -> str:
    """Return the type and the message of an error as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` if an entry of `known` is close to `name`, else an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def check_keys(setting: str, keys: Iterable[str], known: Sequence[str]) -> None:
    """Raise a ConfigError if one of `keys`, the keys of the JSON option `setting`, is not in `known`."""
    for key in keys:
        if key not in known:
            names, close = ", ".join(known), nearest(str(key), known)
            raise ConfigError(f"unknown {setting} key {key!r}; known: {names}{close}")
