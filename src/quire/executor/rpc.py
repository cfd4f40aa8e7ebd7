"""Calls of worker methods by name, and the methods that clients may call."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from quire.data.lora import AdapterFacts, LoRARequest
from quire.errors import RequestError, nearest
from quire.system.pickled_calls import run_packed

ENGINE_METHODS = frozenset(
    [
        "start",
        "load",
        "measure",
        "allocate",
        "warm_up",
        "submit",
        "sample_tokens",
        "close",
        "sleep",
        "wake_up",
        "profile",
        "fetch_adapter",
        "drop_adapter",
        "describe_tiers",
        "open_tiers",
        "store_blocks",
        "load_blocks",
        "read_blocks",
        "update_weights",
    ]
)
"""Methods that only the engine calls, since it tracks the state of its workers."""


def open_methods(worker: Any) -> list[str]:
    names = (name for name in dir(type(worker)) if not name.startswith("_"))
    return [
        name for name in names if name not in ENGINE_METHODS and inspect.isfunction(_static(worker, name))
    ]


def _static(worker: Any, name: str) -> Any:
    return inspect.getattr_static(type(worker), name, None)


def check_open(method: str) -> None:
    """Raise if only the engine may call the method."""
    if method in ENGINE_METHODS:
        raise RequestError(
            f"the worker's method {method!r} is called by the engine alone: use /sleep, /wake_up or the like",
            param="method",
        )


def read_adapter(worker: Any, lora: LoRARequest) -> AdapterFacts:
    """Read an adapter on a worker; a missing file is a RequestError."""
    try:
        facts: AdapterFacts = worker.fetch_adapter(lora)
        return facts
    except OSError as error:
        raise RequestError(str(error), param="lora_request") from error


def invoke(worker: Any, method: str | bytes, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a public method or a packed function; raise RequestError for unknown names and wrong arguments."""
    if isinstance(method, bytes):
        return run_packed(worker, method)
    if method.startswith("_") or not inspect.isfunction(_static(worker, method)):
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
