"""Middleware that the deployer names by its import path: ASGI classes, or functions of a request."""

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp

from quire.errors import ConfigError

Wrap = Callable[[ASGIApp], ASGIApp]


def surrounded(app: ASGIApp, paths: Sequence[str]) -> ASGIApp:
    """The application with all of them around it, the last one outermost."""
    for path in paths:
        app = found(path)(app)
    return app


def found(path: str) -> Wrap:
    """What is put around an application; a ConfigError if there is no such thing."""
    module, _, name = path.rpartition(".")
    if not module:
        raise ConfigError(f"middleware={path!r} is no import path, such as my_module.MyMiddleware")
    try:
        named: Any = getattr(importlib.import_module(module), name)
    except Exception as error:  # the module's own code runs here
        raise ConfigError(
            f"middleware={path!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if inspect.isclass(named):
        return cast(Wrap, named)
    if inspect.iscoroutinefunction(named):
        return lambda app: BaseHTTPMiddleware(app, dispatch=named)
    raise ConfigError(
        f"middleware={path!r} must be a class, or an async function of a request and `call_next`"
    )
