"""Origins: which web pages may use the server from the browsers that show them."""

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.http.errors import error_info, error_response
from quire.server.settings import AccessSection

_READS = ("GET", "HEAD", "OPTIONS")
_OTHER_SITES = (b"cross-site", b"same-site")
"""What `Sec-Fetch-Site` says of requests from pages of another origin."""


class Origins:
    """CORS, for requests that come with an origin. Those of clients that are no browsers, and most of the
    server's own page, have none, and pay nothing."""

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
        """Browsers keep the answers to such pages back, but send simple requests all the same: those that
        change something are refused. What the page's own origin is only browsers know, for a proxy may stand
        between."""
        if scope["type"] != "http" or scope["method"] in _READS or self._cors.is_allowed_origin(origin):
            return False
        return any(name == b"sec-fetch-site" and value in _OTHER_SITES for name, value in scope["headers"])
