"""User-defined middleware, loaded by import path: ASGI classes, or functions of a request."""

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

from starlette.types import ASGIApp

from quire.errors import ConfigError

Wrap = Callable[[ASGIApp], ASGIApp]


def wrap_in_middleware(app: ASGIApp, paths: Sequence[str]) -> ASGIApp:
    """Return `app` wrapped in the middleware of each import path; the last one is the outermost."""
    for path in paths:
        app = load_middleware(path)(app)
    return app


def load_middleware(path: str) -> Wrap:
    """Import a middleware and return the function that wraps an application in it. Raise ConfigError if
    `path` names no middleware."""
    module, _, name = path.rpartition(".")
    if not module:
        raise ConfigError(f"middleware={path!r} is not an import path, such as my_module.MyMiddleware")
    try:
        middleware: Any = getattr(importlib.import_module(module), name)
    except Exception as error:  # the module's own code runs here
        raise ConfigError(
            f"middleware={path!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if inspect.isclass(middleware):
        return cast(Wrap, middleware)
    if inspect.iscoroutinefunction(middleware):
        from starlette.middleware.base import BaseHTTPMiddleware  # slow to import

        return lambda app: BaseHTTPMiddleware(app, dispatch=middleware)
    raise ConfigError(
        f"middleware={path!r} must be a class, or an async function of a request and `call_next`"
    )
