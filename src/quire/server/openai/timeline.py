"""Timings of a call, which the header `x-request-timeline: 1` requests."""

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request

from quire.data.outputs import RequestOutput, RequestStateStats
from quire.data.timeline import RequestTimeline
from quire.text.tokenizer import Tokenizer

TIMELINE_HEADER = "x-request-timeline"
TOKENS_BEFORE, TOKENS_AFTER = 8, 16
"""Tokens shown before and after the place where a prompt differs from an earlier prompt."""


def request_metrics(stats: RequestStateStats) -> dict[str, float | None]:
    """Return the timings of a request by vLLM's names, in milliseconds; unknown timings are None."""
    num_tokens, first, last = stats.num_generation_tokens, stats.first_token_ts, stats.last_token_ts
    generation, total = _ms(first, last), _ms(stats.scheduled_ts, last)
    return {
        "time_to_first_token_ms": _ms(stats.scheduled_ts, first),
        "generation_time_ms": generation,
        "queue_time_ms": _ms(stats.queued_ts, stats.scheduled_ts),
        "mean_itl_ms": None if generation is None or num_tokens < 2 else generation / (num_tokens - 1),
        "tokens_per_second": 1e3 * num_tokens / total if total else None,
    }


def _ms(begin: float, end: float) -> float | None:
    return 1e3 * (end - begin) if begin and end else None


class CallTimeline:
    """Timings of a call, complete when all its prompts are finished."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self._tokenizer = tokenizer
        self._timelines: dict[str, RequestTimeline] = {}

    @classmethod
    def of(cls, request: Request, tokenizer: Tokenizer | None) -> "CallTimeline | None":
        """Return a timeline if the request has the header, else None."""
        return cls(tokenizer) if request.headers.get(TIMELINE_HEADER, "0").lower() in ("1", "true") else None

    def add_output(self, output: RequestOutput) -> None:
        if output.finished and output.metrics is not None:
            timeline = RequestTimeline.of(output.metrics, output.num_cached_tokens or 0)
            if (miss := timeline.cache_miss) is not None and miss.reason == "differs":
                text = self._text_around(output.prompt_token_ids or [], miss.from_token)
                timeline.cache_miss = msgspec.structs.replace(miss, text=text)
            self._timelines[output.request_id] = timeline

    def _text_around(self, token_ids: Sequence[int], at: int) -> str | None:
        """Return the text around the token at index `at`, from which on the prompt differs from an earlier
        prompt. The text of the earlier prompt is not shown."""
        if self._tokenizer is None:
            return None
        around = token_ids[max(at - TOKENS_BEFORE, 0) : at + TOKENS_AFTER]
        return self._tokenizer.decode(list(around), skip_special_tokens=False)

    @property
    def timings(self) -> dict[str, Any] | None:
        """Return the fields of RequestTimeline, merged over all prompts, with times in milliseconds; None if
        the engine reported none, as for beam search."""
        if not self._timelines:
            return None
        timings: dict[str, Any] = msgspec.to_builtins(RequestTimeline.joined(self._timelines.values()))
        return timings

    def add_to(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Add the timings to the usage of a response that is not streamed."""
        if (timings := self.timings) is not None and answer.get("usage") is not None:
            answer["usage"]["timeline"] = timings
        return answer

    @property
    def header(self) -> str:
        timings = self.timings or {}
        if (miss := timings.pop("cache_miss", None)) is not None:
            timings["cache_miss"] = miss["reason"]
        return ", ".join(f"{name}={value}" for name, value in timings.items())
