"""Cache hints of a request: session id, `prompt_cache_key`, `prompt_cache_retention`, `cache_control`."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from quire.data.cache_hints import DEFAULT_RETENTION_S, MAX_NAME_CHARS, RETENTION_S, CacheHints
from quire.data.cache_scope import CACHE_SCOPE
from quire.errors import RequestError
from quire.server.openai.requests import CacheControl, ConversationBody, GenerateBody

SESSION_HEADER = "x-session-id"


def cache_hints(body: Any, headers: Mapping[str, str]) -> CacheHints | None:
    """Return the cache hints of a request, or None if there are none. A body that is not a `GenerateBody`
    has only the hint of a session id."""
    session = _session(body, headers)
    if not isinstance(body, GenerateBody):
        return None if session is None else CacheHints(DEFAULT_RETENTION_S, session, CACHE_SCOPE.get())
    key = _name(body.prompt_cache_key, "prompt_cache_key")
    controls = [] if body.cache_control is None else [body.cache_control]
    if isinstance(body, ConversationBody):
        controls += _controls_of_parts(body)
    periods = [body.prompt_cache_retention, *(control.ttl or "5m" for control in controls)]
    seconds = [RETENTION_S[period] for period in periods if period is not None]
    name = session or key or ""
    if not name and not seconds:
        return None
    return CacheHints(max(seconds, default=DEFAULT_RETENTION_S), name, CACHE_SCOPE.get())


def _controls_of_parts(body: ConversationBody) -> Iterator[CacheControl]:
    """Yield the `cache_control` of each part of a message that has one."""
    for at, message in enumerate(body.messages):
        for place, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if (control := part.get("cache_control")) is not None:
                try:
                    yield CacheControl.model_validate(control)
                except ValidationError as error:
                    param = f"messages[{at}].content[{place}].cache_control"
                    detail = error.errors()[0]["msg"]
                    raise RequestError(f"{param}={control!r:.80} is invalid: {detail}", param=param) from None


def _session(body: Any, headers: Mapping[str, str]) -> str | None:
    """Return the session id of the body, the header or `vllm_xargs`, in this order."""
    session = getattr(body, "session_id", None)
    if session is None:
        session = headers.get(SESSION_HEADER)
    if session is None:
        session = (getattr(body, "vllm_xargs", None) or {}).get("session_id")
    return _name(session, "session_id")


def _name(value: Any, param: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise RequestError(f"{param} must be a string, got {value!r:.80}", param=param)
    if len(value) > MAX_NAME_CHARS:
        raise RequestError(
            f"{param} has {len(value)} characters, and may have {MAX_NAME_CHARS}; send a shorter one, "
            "such as a hash of it",
            param=param,
        )
    if not value or not value.isprintable():
        raise RequestError(
            f"{param} must be 1 to {MAX_NAME_CHARS} printable characters, got {value!r:.80}", param=param
        )
    return value
