"""Calls of a worker's methods by their names, wherever the worker is."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from quire.data.lora import AdapterFacts, LoRARequest
from quire.errors import RequestError, nearest

ENGINES_OWN = frozenset(
    [
        "start",
        "load",
        "measure",
        "allocate",
        "warm_up",
        "submit",
        "draw",
        "close",
        "sleep",
        "wake_up",
        "profile",
        "fetch_adapter",
        "drop_adapter",
    ]
)
"""Methods that only the engine calls: it has to know what state its workers are in."""


def open_methods(worker: Any) -> list[str]:
    """Those that anybody may name."""
    names = (name for name in dir(type(worker)) if not name.startswith("_"))
    return [name for name in names if name not in ENGINES_OWN and inspect.isfunction(_of(worker, name))]


def _of(worker: Any, name: str) -> Any:
    return inspect.getattr_static(type(worker), name, None)


def check_open(method: str) -> None:
    """That it is none that only the engine calls."""
    if method in ENGINES_OWN:
        raise RequestError(
            f"the worker's method {method!r} is called by the engine alone: /sleep, /wake_up and their like "
            "have it called",
            param="method",
        )


def read_adapter(worker: Any, lora: LoRARequest) -> AdapterFacts:
    """What a worker says of an adapter once it has read it. Where there is none, the caller is wrong."""
    try:
        found: AdapterFacts = worker.fetch_adapter(lora)
        return found
    except OSError as error:
        raise RequestError(str(error), param="lora_request") from error


def invoke(worker: Any, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a public method. A call that cannot be made is a RequestError."""
    if method.startswith("_") or not inspect.isfunction(_of(worker, method)):
        known = open_methods(worker)
        raise RequestError(
            f"the worker has no method {method!r:.80}; known: {', '.join(known)}{nearest(method, known)}",
            param="method",
        )
    bound = getattr(worker, method)
    try:
        inspect.signature(bound).bind(*args, **kwargs)
    except TypeError as error:
        raise RequestError(f"{method}: {error}", param="args") from None
    return bound(*args, **kwargs)
