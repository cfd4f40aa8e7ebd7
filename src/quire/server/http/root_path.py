"""Requests of a proxy that keeps the path prefix `--root-path`, beside those of a proxy that removes it."""

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """ASGI middleware for proxies of which some keep the path prefix and some remove it: afterwards every
    path has the prefix exactly once. uvicorn adds the prefix to each path, also to paths that have it
    already."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path
        self._twice = root_path + root_path.rstrip("/") + "/"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(self._twice):
            length = len(self._root_path.rstrip("/"))
            scope["path"] = scope["path"][length:]
            scope["raw_path"] = scope["raw_path"][length:]
        await self._app(scope, receive, send)
