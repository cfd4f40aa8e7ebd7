"""The state that the route handlers of one model share, and the usage and metrics of responses."""

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from quire.config.server_sections import ApiSection
from quire.data.cache_hints import CacheHints
from quire.data.outputs import RequestStateStats
from quire.errors import QuireError, RequestError
from quire.frontend.engine import AsyncEngine
from quire.frontend.engine_facts import EngineFacts
from quire.frontend.kv_transfer import readable_prefix
from quire.server.http.in_flight import LONG_BYTES, MAX_LONG_BODIES, RunningRequests, num_body_bytes
from quire.server.lora.registry import LoRARegistry
from quire.server.lora.service import LoRAService, open_lora_service
from quire.server.openai.prompts import PromptReader
from quire.server.openai.requested_model import ServedNames
from quire.server.openai.streams import Pauses
from quire.server.openai.timeline import CallTimeline, request_metrics
from quire.server.settings import ServerSettings, parsers_of

S = TypeVar("S")
B = TypeVar("B")
Answer = Callable[["GenerationService", Any, Request], Coroutine[Any, Any, Response]]
"""Handler of a route: (service, body, request) -> response."""


class GenerationService:
    """State that the route handlers of one model share: the engine, the settings, the names of the model and
    its adapters, the parsers and the running requests."""

    def __init__(
        self, engine: AsyncEngine, settings: ServerSettings, registry: LoRARegistry | None = None
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.adapters: LoRAService = open_lora_service(engine, settings, registry)
        self.names = ServedNames(engine, self.adapters, tokens_as_ids=settings.api.return_tokens_as_token_ids)
        self.reader = PromptReader(engine.facts.chat_template, settings.api)
        self.parsers = parsers_of(settings.api)
        if (tokenizer := engine.inputs.tokenizer) is not None and engine.inputs.pooling is None:
            self.parsers.detect(tokenizer.chat_template, engine.facts.chat_template)
        self.running_requests = RunningRequests()
        self.long_bodies = asyncio.Semaphore(MAX_LONG_BODIES)
        self._lock = asyncio.Lock()
        """Lock that all `Pauses` share: of the large calls that have yielded to the event loop, one at a time
        resumes."""
        facts = engine.facts
        self.fingerprint = _fingerprint(settings.api, facts)

    def check_count(self, count: int, what: str, *, param: str) -> None:
        if count > (limit := self.settings.max_sequences):
            raise RequestError(
                f"{count} {what} exceed the maximum of {limit} per request (VLLM_MAX_N_SEQUENCES); send "
                "fewer at once",
                param=param,
            )

    async def release_prefix(self, transfer_params: Any) -> None:
        """Let another engine release the prefix that it keeps for a refused request."""
        prefix = readable_prefix(self.engine.inputs.validators, transfer_params)
        if prefix is not None:
            with contextlib.suppress(QuireError, TimeoutError):  # the client gets the error of its request
                await self.engine.operation.release_prefix(prefix)

    def pauses(self) -> Pauses:
        return Pauses(lock=self._lock)

    def reports_cache(self, hints: CacheHints | None) -> bool:
        """Whether the usage in a response reports the cached tokens, for a request with these cache hints."""
        return self.settings.api.enable_prompt_tokens_details or hints is not None

    def usage(
        self,
        num_prompt: int,
        num_output: int,
        num_cached: int | None = None,
        timeline: CallTimeline | None = None,
        *,
        stats: RequestStateStats | None = None,
        num_created: int | None = None,
        hints: CacheHints | None = None,
    ) -> dict[str, Any]:
        """Return the usage in OpenAI's format. `num_created` counts the prompt tokens that were added to the
        prefix cache. Cached tokens are reported with --enable-prompt-tokens-details, or if the request has
        cache hints."""
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "total_tokens": num_prompt + num_output,
            "completion_tokens": num_output,
        }
        if num_cached is not None and self.reports_cache(hints):
            details: dict[str, Any] = {"cached_tokens": num_cached}
            usage["prompt_tokens_details"] = details
            if stats is not None and (stats.num_from_host or stats.num_from_disk or stats.num_from_remote):
                by_tier = details["cached_tokens_by_tier"] = {
                    "host": stats.num_from_host,
                    "disk": stats.num_from_disk,
                }
                if stats.num_from_remote:
                    by_tier["remote"] = stats.num_from_remote
            if num_created is not None:
                details["created_cache_tokens"] = num_created
        if timeline is not None and timeline.timings is not None:
            usage["timeline"] = timeline.timings
        return usage

    def metrics(self, stats: RequestStateStats | None, num_sequences: int) -> dict[str, Any] | None:
        """Return the timings of a request in milliseconds by name; None if they are disabled or unknown, or
        if the request has several sequences."""
        if not self.settings.api.enable_per_request_metrics or stats is None or num_sequences != 1:
            return None
        return request_metrics(stats)

    def shorten(self, text: str | None) -> str:
        """Return the first `max_log_len` characters of a text, for a log line."""
        return (text or "")[: self.settings.log.max_log_len]


def releases_prefix(
    answer: Callable[[S, B, Request], Coroutine[Any, Any, Response]],
) -> Callable[[S, B, Request], Coroutine[Any, Any, Response]]:
    """Return the route handler `answer` with an addition: if it refuses a request, the engine that keeps the
    prefix in the request's `kv_transfer_params` is told to release it."""

    @wraps(answer)
    async def releasing(service: S, body: B, request: Request) -> Response:
        try:
            return await answer(service, body, request)
        except RequestError:
            transfer_params = getattr(body, "kv_transfer_params", None)
            if transfer_params is not None:
                api: Any = getattr(service, "api", service)
                await api.release_prefix(transfer_params)
            raise

    return releasing


def limit_long_bodies(answer: Answer) -> Answer:
    """Return the route handler `answer` with a limit: a request with a long body waits while
    `MAX_LONG_BODIES` requests with long bodies are processed."""

    @wraps(answer)
    async def limited(api: GenerationService, body: Any, request: Request) -> Response:
        if num_body_bytes(request) < LONG_BYTES:
            return await answer(api, body, request)
        async with api.long_bodies:
            return await answer(api, body, request)

    return limited


def _fingerprint(api: ApiSection, facts: EngineFacts) -> str | None:
    served = repr((facts.model_names, facts.root, facts.vocab))
    digest = hashlib.sha256(served.encode()).hexdigest()[:8]
    match api.fingerprint_mode:
        case "full":
            return f"quire-{facts.version}-{digest}"
        case "hash":
            return digest
        case "custom":
            return api.fingerprint_value
    return None
