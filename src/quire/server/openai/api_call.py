"""The engine call of an HTTP request: its prompts and parameters, its id, and the options in its body and its
headers that apply to all of its prompts, such as priority, latency target and cache hints."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request

from quire.data.cache_hints import DEFAULT_RETENTION_S, MAX_NAME_CHARS, RETENTION_S, CacheHints
from quire.data.cache_scope import CACHE_SCOPE
from quire.data.latency_target import NO_TARGET, LatencyTarget
from quire.data.params import INT64_MAX, INT64_MIN, BeamSearchParams, SamplingParams
from quire.data.pooling import PoolingParams
from quire.errors import RequestError
from quire.frontend.inputs import Prompt
from quire.logs import get_logger
from quire.metrics.api_keys import KeyAccount
from quire.server.http.limits import NEW_REQUEST_ID, account_of
from quire.server.openai.requested_model import RequestedModel
from quire.server.openai.requests import CacheControl, CallBody, ConversationBody, GenerateBody
from quire.server.openai.service import GenerationService
from quire.server.openai.timeline import CallTimeline

logger = get_logger(__name__)

Params = SamplingParams | BeamSearchParams | PoolingParams
_SESSION_HEADER = "x-session-id"
_MAX_ID = 256
"""Maximum characters of a client's request id; a longer id is refused, since each sequence has a copy."""


@dataclass(frozen=True, slots=True)
class ApiCall:
    """Engine call of an HTTP request: its prompts with their parameters, and the fields that every part of
    the response has."""

    id: str
    created: int
    model: RequestedModel
    priority: int
    rank: int | None
    """Data-parallel rank of the engine core that must run the call; None: any engine core."""
    prompts: list[Prompt]
    params: list[Params]
    timeline: CallTimeline | None = None
    """Timings of the call; None if the client did not request them."""
    account: KeyAccount | None = None
    """Account of the call's API key; None without a named key."""
    target: LatencyTarget = NO_TARGET

    @property
    def hints(self) -> CacheHints | None:
        return self.prompts[0].hints

    @property
    def routing(self) -> dict[str, Any]:
        """Return the keyword arguments of the engine that all requests of the call share."""
        return {
            "priority": self.priority,
            "rank": self.rank,
            "account": self.account,
            "lora": self.model.lora,
            "target": self.target,
        }

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    def frame(self, object: str) -> dict[str, Any]:
        """Return the first fields of a response, or of a chunk of it. `object`: its type, such as
        `chat.completion`."""
        return {"id": self.id, "object": object, "created": self.created, "model": self.model.name}

    def engine_ids(self) -> list[str]:
        if len(self.prompts) == 1:
            return [self.id]
        return [f"{self.id}-{index}" for index in range(len(self.prompts))]


def new_call(
    api: GenerationService,
    id_prefix: str,
    body: CallBody,
    request: Request,
    model: RequestedModel,
    prompts: list[Prompt],
    params: Sequence[Params],
) -> ApiCall:
    """Return the engine call of an HTTP request. Charge the prompt tokens to the request's API key, and
    log the prompts if this is enabled."""
    new_id = request.scope.get(NEW_REQUEST_ID)
    base = request.headers.get("x-request-id") or body.request_id or new_id or uuid.uuid4().hex
    _check_id(base)
    priority = _header_int(request, "x-vllm-priority")
    rank = _header_int(request, "x-data-parallel-rank")
    hints = _cache_hints(body, request.headers)
    for prompt in prompts:
        prompt.hints = hints
    account = account_of(request.scope)
    target = (account and account.target) or api.engine.inputs.target
    call = ApiCall(
        id=f"{id_prefix}-{base}",
        created=int(time.time()),
        model=model,
        priority=body.priority if priority is None else priority,
        rank=rank,
        prompts=prompts,
        params=list(params),
        timeline=CallTimeline.of(request, api.engine.inputs.tokenizer),
        account=account,
        target=target.relaxed(body.slo_ttft_ms, body.slo_itl_ms),
    )
    if call.account is not None:
        call.account.add_prompt(call.num_prompt_tokens)
    if api.settings.log.enable_log_requests:
        for prompt in prompts:
            shown = api.shorten(prompt.text)
            logger.info("Received request %s: params: %s, prompt: %r", call.id, params[0], shown)
    return call


def _check_id(id: str) -> None:
    """Raise RequestError for an id that is too long or not printable in a log line."""
    if len(id) > _MAX_ID:
        raise RequestError(
            f"the request id has {len(id)} characters, and may have {_MAX_ID}; send a shorter one",
            param="request_id",
        )
    if not id.isprintable():
        raise RequestError(
            f"the request id {id!r:.80} has characters that cannot be printed; send one without them",
            param="request_id",
        )


def _header_int(request: Request, name: str) -> int | None:
    text = request.headers.get(name)
    if text is None:
        return None
    digits = text.removeprefix("-")
    value = int(text) if digits.isascii() and digits.isdigit() and len(digits) < 20 else None
    if value is None or not INT64_MIN <= value <= INT64_MAX:
        raise RequestError(f"the header {name} must be an integer of 64 bits, got {text!r:.80}")
    return value


def _cache_hints(body: Any, headers: Mapping[str, str]) -> CacheHints | None:
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
        session = headers.get(_SESSION_HEADER)
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
