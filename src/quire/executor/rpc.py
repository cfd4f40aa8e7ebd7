"""Calls of worker methods by name, and of functions that are sent to workers."""

import importlib
import inspect
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.config.env import Env
from quire.data.lora import AdapterFacts, LoRARequest
from quire.errors import RequestError, nearest, one_line

ENGINE_METHODS = frozenset(
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
    """Return the methods that clients may call."""
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


def _check_pickles() -> None:
    if not Env.read(os.environ).allow_insecure_serialization:
        raise RequestError(
            "a function reaches workers in other processes as a pickle, which can run any code: set"
            " VLLM_ALLOW_INSECURE_SERIALIZATION=1, or pass the name of a method",
            param="method",
        )


def pack_function(
    function: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> bytes:
    """Return a call of a function as a pickle; with the package cloudpickle also that of a lambda."""
    _check_pickles()
    try:
        pickler: Any = importlib.import_module("cloudpickle")
    except ImportError:
        pickler = pickle
    try:
        packed: bytes = pickler.dumps((function, tuple(args), dict(kwargs or {})))
        return packed
    except Exception as error:  # any object may be among the arguments
        raise RequestError(
            f"the function or its arguments cannot be pickled: {one_line(error)}; use a function of a module,"
            " or install cloudpickle",
            param="method",
        ) from error


def run_packed(worker: Any, packed: bytes) -> bytes:
    """Call a packed function with the worker, and return its result as a pickle."""
    _check_pickles()
    function, args, kwargs = pickle.loads(packed)
    return pickle.dumps(function(worker, *args, **kwargs))


def unpack_results(results: list[bytes]) -> list[Any]:
    """Return the results of a packed function. They come from workers of this engine."""
    return [pickle.loads(result) for result in results]


def invoke(worker: Any, method: str | bytes, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a public method, or a packed function. An unknown method, or wrong arguments, is a
    RequestError."""
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
