"""CORS: the origins of web pages that may use the server."""

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.config.server_sections import AccessSection
from quire.server.http.errors import error_info, error_response

_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_OTHER_SITES = (b"cross-site", b"same-site")
"""Values of `Sec-Fetch-Site` in requests from pages of another origin."""


class CorsMiddleware:
    """CORS middleware for requests with an Origin header. Other requests skip it: those of clients that are
    not browsers, and most of the server's own page."""

    def __init__(self, app: ASGIApp, access: AccessSection) -> None:
        self._app = app
        self._cors = CORSMiddleware(
            app,
            allow_origins=access.allowed_origins,
            allow_credentials=access.allow_credentials,
            allow_methods=access.allowed_methods,
            allow_headers=access.allowed_headers,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = next((value for name, value in scope.get("headers", ()) if name == b"origin"), None)
        if origin is None:
            return await self._app(scope, receive, send)
        if self._is_refused(scope, origin.decode("latin-1")):
            page = repr(origin.decode("latin-1"))[:100]
            message = f"web pages of {page} may not use this server; --allowed-origins would allow them"
            return await error_response(error_info(message, 403, "Forbidden"))(scope, receive, send)
        await self._cors(scope, receive, send)

    def _is_refused(self, scope: Scope, origin: str) -> bool:
        """Whether to refuse a request of a page with another origin. Browsers hide the responses from such
        pages, but still send simple requests. Requests with methods that may change something are refused.
        Only `Sec-Fetch-Site` is reliable: behind a proxy, the server's own origin is unknown."""
        if (
            scope["type"] != "http"
            or scope["method"] in _SAFE_METHODS
            or self._cors.is_allowed_origin(origin)
        ):
            return False
        return any(name == b"sec-fetch-site" and value in _OTHER_SITES for name, value in scope["headers"])
