"""The exception tree. Every error that a caller can cause names the value, the limit and the way out."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class QuireError(Exception):
    """The root: catch this to catch everything that Quire raises on purpose."""


class ConfigError(QuireError, ValueError):
    """The launch is wrong: a flag, a model file, a combination. Nothing has started."""


class RequestError(QuireError, ValueError):
    """One request is wrong; the engine is untouched. `param` names the field at fault."""

    status = 400

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Unreachable(RequestError):
    """What one request points to cannot be had from there."""

    status = 422


class EngineError(QuireError, RuntimeError):
    """The engine failed while working on a request."""

    status = 500


class EngineDead(EngineError):
    """The engine is not there: starting, dead or hung. The same request may succeed later."""

    status = 503


class RequestsFailed(EngineError):
    """Some requests of one offline call failed, and the others are done.

    `outputs` has the outputs of all requests in the order of the prompts, also what the failed ones had so
    far. `errors` has the error of every failed request by the index of its prompt.
    """

    def __init__(self, outputs: Sequence[Any], errors: Mapping[int, Exception]) -> None:
        index, error = min(errors.items())
        super().__init__(
            f"{len(errors)} of {len(outputs)} requests failed, the first at prompt {index}: {error}; the "
            "outputs of the others are in `outputs` of this exception"
        )
        self.outputs = list(outputs)
        self.errors = dict(errors)


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` when something in `known` is close to `name`, else the empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
