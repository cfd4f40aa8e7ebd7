"""Checks before the routes: the API key and its limits, the size and the type of the body. They run once per
request; responses pass through unchanged."""

import functools
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.data.cache_scope import CACHE_SCOPE
from quire.frontend.tracing import PARENT
from quire.metrics.api_keys import KeyAccount
from quire.server.api_keys import Key
from quire.server.http.errors import error_info, error_response, response_to
from quire.server.key_limits import Ledger

DIRECT_SEND = "quire.send"
"""ASGI scope key of the `send` that event streams use. It bypasses FastAPI's error handling, since streams
report their errors themselves."""
NEW_REQUEST_ID = "quire.request_id"
"""ASGI scope key of the request id that is made for a client that sent none, if the response shows it."""
_ACCOUNT = "quire.account"
_OPERATOR = "quire.operator"
_OPEN_REQUEST = "quire.open_request"
_NO_KEY = "Unauthorized: the API key is missing or wrong; send it in the header `Authorization: Bearer KEY`"
WEIGHT_PATHS = (
    *("/init_weight_transfer_engine", "/start_weight_update", "/start_draft_weight_update"),
    *("/update_weights", "/finish_weight_update", "/update_weight_version"),
)
"""Routes of weight updates."""
OPERATOR_PATHS = frozenset(
    {
        *("/sleep", "/wake_up", "/pause", "/resume", "/collective_rpc", "/abort_requests"),
        *("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"),
        *("/start_profile", "/stop_profile", *WEIGHT_PATHS),
    }
)
"""Routes that change the engine for all clients. They exist only in developer mode, with a profiler, or
(/abort_requests) with --tokens-only. No limit of a key applies to them."""
UNLIMITED_PATHS: dict[str, str] = {
    "/ping": "reads one number, for health checks that can only send POST",
    **dict.fromkeys(OPERATOR_PATHS, "for operators, and enabled only by the operator"),
}
"""Paths whose POST requests are exempt from the limits of API keys, with the reason. Only paths whose
requests take little time may be exempt."""
CANCEL_SUFFIX = "/cancel"
"""Suffix of the paths that cancel work; the limits of API keys do not apply to them."""
TOKENLESS_PATHS = frozenset(
    {
        *("/tokenize", "/detokenize", "/v1/messages/count_tokens"),
        *("/v1/chat/completions/render", "/v1/completions/render"),
        *("/v1/chat/completions/derender", "/v1/completions/derender"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        *("/v1/models/load", "/v1/models/unload"),
    }
)
"""Paths whose POST requests do not run the model: a key's `max_concurrency` applies to them, its
`tokens_per_minute` does not."""


class AdmissionMiddleware:
    """ASGI middleware that admits requests with a valid key and an acceptable body."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        ledger: Ledger,
        open_paths: frozenset[str],
        max_body_bytes: int,
        echo_request_id: bool,
        form_paths: frozenset[str] = frozenset(),
        max_form_bytes: int = 0,
        weight_version: Callable[[], str] = str,
    ) -> None:
        """Create the middleware. `open_paths` need no key. Bodies of POSTs to `form_paths` are forms of at
        most `max_form_bytes`. `weight_version` returns the value of the header x-weight-version; if it is
        empty, the header is omitted."""
        self._app = app
        self._ledger = ledger
        self._open_paths = open_paths
        self._json = _BodyKind(
            b"application/json",
            max_body_bytes,
            f"the body is larger than {max_body_bytes} bytes; send less or raise --max-request-body-bytes",
        )
        self._form = _BodyKind(
            b"multipart/form-data",
            max_form_bytes,
            f"Maximum file size exceeded: the body is larger than {max_form_bytes} bytes; send less or raise "
            "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB",
        )
        self._form_paths = form_paths
        self._echo_request_id = echo_request_id
        self._weight_version = weight_version

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        if b"traceparent" in headers:
            PARENT.set(headers[b"traceparent"].decode("latin-1"))
        if self._echo_request_id:
            id = headers.get(b"x-request-id") or uuid.uuid4().hex.encode()
            scope[NEW_REQUEST_ID] = id.decode("latin-1")
            send = _HeaderSend(send, (b"x-request-id", id))
        key = None
        is_guarded = route_path(scope) not in self._open_paths and scope.get("method") != "OPTIONS"
        if self._ledger.keys and is_guarded and (key := self._find_key(headers)) is None:
            # The server closes a WebSocket that is never accepted with 403.
            refused = error_response(error_info(_NO_KEY, 401, "AuthenticationError"))
            return await refused(scope, receive, send) if scope["type"] == "http" else None
        if scope["type"] == "http" and scope["method"] == "POST":
            length, chunked = headers.get(b"content-length", b"0"), b"transfer-encoding" in headers
            kind = self._form if route_path(scope) in self._form_paths else self._json
            if not kind.fits(length):
                if self._json.fits(length):
                    await _discard_body(receive)
                response = error_response(error_info(kind.too_large, 413, "Content Too Large"))
                response.headers["connection"] = "close"
                return await response(scope, receive, send)
            if (chunked or length != b"0") and not kind.matches(headers.get(b"content-type", b"")):
                response = error_response(error_info(kind.wrong_type, 400, "Bad Request"))
                return await response(scope, receive, send)
            if chunked:
                receive = kind.limit_body(receive)
        if route_path(scope) in OPERATOR_PATHS:
            send = _VersionSend(send, self._weight_version)
        elif version := self._weight_version():
            send = _HeaderSend(send, (b"x-weight-version", version.encode()))
        # Set for every request, since the next request of the connection may run in a copy of this context.
        CACHE_SCOPE.set("" if key is None else key.cache_scope)
        scope[DIRECT_SEND] = send
        if key is not None and key.operator:
            scope[_OPERATOR] = True
        try:
            if key is None or not key.name:
                await self._app(scope, receive, send)
            else:
                await self._run_limited(key, scope, receive, send)
        finally:
            del scope[DIRECT_SEND]  # without the reference cycle, the scope is freed at once

    async def _run_limited(self, key: Key, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request within the limits of its key. The body of a refused request is not read."""
        scope[_ACCOUNT] = self._ledger.account(key)
        path = route_path(scope)
        if scope.get("method") != "POST" or path in UNLIMITED_PATHS or path.endswith(CANCEL_SUFFIX):
            return await self._app(scope, receive, send)
        if (refusal := self._ledger.enter(key, tokenless=path in TOKENLESS_PATHS)) is not None:
            return await response_to(refusal)(scope, receive, send)
        open_request = scope[_OPEN_REQUEST] = _OpenRequest(functools.partial(self._ledger.leave, key))
        try:
            await self._app(scope, receive, send)
        finally:
            open_request.release()

    def _find_key(self, headers: dict[bytes, bytes]) -> Key | None:
        """Return the key of a request; Anthropic clients send it as x-api-key."""
        kind, _, sent = headers.get(b"authorization", b"").partition(b" ")
        if not kind and b"x-api-key" in headers:
            kind, sent = b"bearer", headers[b"x-api-key"]
        key = self._ledger.find(sent)
        return key if kind.lower() == b"bearer" else None


@dataclass(frozen=True, slots=True)
class _BodyKind:
    """Media type and maximum size of the bodies of a route."""

    media_type: bytes
    max_bytes: int
    too_large: str

    @property
    def wrong_type(self) -> str:
        return f"Unsupported Media Type: Only '{self.media_type.decode()}' is allowed"

    def matches(self, content_type: bytes) -> bool:
        return content_type.partition(b";")[0].strip().lower() == self.media_type

    def fits(self, length: bytes) -> bool:
        return length.isdigit() and len(length) < 20 and int(length) <= self.max_bytes

    def limit_body(self, receive: Receive) -> Receive:
        """Return a `receive` that raises status 413 as soon as a body of unknown length exceeds the limit."""
        num_bytes = 0

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_bytes:
                raise HTTPException(413, self.too_large)
            return message

        return receive_limited


class _OpenRequest:
    """A request that counts as open for the limits of its API key. It ends when its response is complete and
    all callers of `keep_open` have released it."""

    def __init__(self, on_released: Callable[[], None]) -> None:
        self._on_released = on_released
        self._num_users = 1

    def keep_open(self) -> None:
        self._num_users += 1

    def release(self) -> None:
        self._num_users -= 1
        if not self._num_users:
            self._on_released()


def keep_open(scope: Scope) -> Callable[[], None]:
    """Let the request count as running after its response, until the returned function is called."""
    open_request: _OpenRequest | None = scope.get(_OPEN_REQUEST)
    if open_request is None:
        return lambda: None
    open_request.keep_open()
    return open_request.release


def account_of(scope: Scope) -> KeyAccount | None:
    """Return the account to which the request's tokens are charged: that of its API key; None for a key
    without a name."""
    account: KeyAccount | None = scope.get(_ACCOUNT)
    return account


def is_operator(scope: Scope) -> bool:
    return _OPERATOR in scope


def without_account(request: Request) -> Request:
    """Return the request without the account of its API key, so that no tokens are charged to the key. This
    is for requests that do not use the engine."""
    return Request({**request.scope, _ACCOUNT: None}, request.receive)


async def _discard_body(receive: Receive) -> None:
    """Read and discard the body: a client that is still sending would not receive the error."""
    while (await receive()).get("more_body"):
        pass


def route_path(scope: Scope) -> str:
    """Return the path of a request below `root_path`."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path


class SendWrapper:
    """Base class of ASGI `send` callables that wrap another `send`, to record or change the response."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.direct: Send = getattr(send, "direct", send)
        """The innermost `send`, for the chunks of a stream, which no wrapper changes."""


class _HeaderSend(SendWrapper):
    """A `send` that adds a header to the response."""

    def __init__(self, send: Send, header: tuple[bytes, bytes]) -> None:
        super().__init__(send)
        self._header = header

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), self._header]
        await self._send(message)


class _VersionSend(SendWrapper):
    """A `send` that adds the version of the weights after the request, which may have changed it."""

    def __init__(self, send: Send, weight_version: Callable[[], str]) -> None:
        super().__init__(send)
        self._weight_version = weight_version

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and (version := self._weight_version()):
            message["headers"] = [*message.get("headers", ()), (b"x-weight-version", version.encode())]
        await self._send(message)
