"""Calls of functions that are sent to workers in other processes as pickles, if that is allowed."""

import importlib
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.config.env import Env
from quire.errors import RequestError, one_line


def are_pickles_allowed() -> bool:
    return Env.read(os.environ).allow_insecure_serialization


def _check_pickles() -> None:
    if not are_pickles_allowed():
        raise RequestError(
            "a function reaches workers in other processes as a pickle, which can run any code: set"
            " VLLM_ALLOW_INSECURE_SERIALIZATION=1, or pass the name of a method",
            param="method",
        )


def pack_function(
    function: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> bytes:
    """Return a function with its arguments as a pickle, which `run_packed` calls; lambdas need the package
    cloudpickle."""
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


def call_method(worker: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the worker by its name; a function for `pack_function`."""
    return getattr(worker, name)(*args, **kwargs)


def run_packed(worker: Any, packed: bytes) -> bytes:
    """Call a function packed by `pack_function` with the worker as its first argument; return its result
    as a pickle."""
    _check_pickles()
    function, args, kwargs = pickle.loads(packed)
    return pickle.dumps(function(worker, *args, **kwargs))


def unpack_results(results: list[bytes]) -> list[Any]:
    """Unpickle the results of a packed function, which come from workers of this engine."""
    return [pickle.loads(result) for result in results]
