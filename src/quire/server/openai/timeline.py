"""Why was this slow: what a call with the header `x-request-timeline: 1` is told of its time."""

from typing import Any

import msgspec
from starlette.requests import Request

from quire.data.outputs import RequestOutput, RequestStateStats
from quire.data.timeline import RequestTimeline
from quire.server.encoder import AnswerEncoder

HEADER = "x-request-timeline"


def request_metrics(stats: RequestStateStats) -> dict[str, float | None]:
    """The times of a request, as vLLM tells them; None where they are not known."""
    num_tokens, first, last = stats.num_generation_tokens, stats.first_token_ts, stats.last_token_ts
    generation, whole = _ms(first, last), _ms(stats.scheduled_ts, last)
    return {
        "time_to_first_token_ms": _ms(stats.scheduled_ts, first),
        "generation_time_ms": generation,
        "queue_time_ms": _ms(stats.queued_ts, stats.scheduled_ts),
        "mean_itl_ms": None if generation is None or num_tokens < 2 else generation / (num_tokens - 1),
        "tokens_per_second": 1e3 * num_tokens / whole if whole else None,
    }


def _ms(begin: float, end: float) -> float | None:
    return 1e3 * (end - begin) if begin and end else None


class JobTimeline:
    """The time of a call, known when all its prompts are done."""

    def __init__(self) -> None:
        self._found: dict[str, RequestTimeline] = {}

    @classmethod
    def of(cls, request: Request) -> "JobTimeline | None":
        """None unless the call asks for it."""
        return cls() if request.headers.get(HEADER, "0").lower() in ("1", "true") else None

    def note(self, output: RequestOutput) -> None:
        if output.finished and output.metrics is not None:
            found = RequestTimeline.of(output.metrics, output.num_cached_tokens or 0)
            self._found[output.request_id] = found

    @property
    def told(self) -> dict[str, Any] | None:
        """None where the engine told nothing: of a beam search, say."""
        if not self._found:
            return None
        told: dict[str, Any] = msgspec.to_builtins(RequestTimeline.joined(self._found.values()))
        return told

    @property
    def header(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in (self.told or {}).items())


class Timed:
    """An encoder whose outputs are looked at on their way. To a whole answer, whichever API's, it adds what
    they told; at the end of a stream the encoder itself does."""

    def __init__(self, encoder: AnswerEncoder, timeline: JobTimeline) -> None:
        self._timeline = timeline
        self._encoder = encoder
        self.encode_text = encoder.encode_text
        self.finish = encoder.finish
        self.fail = encoder.fail

    @property
    def text_only(self) -> bool:
        return self._encoder.text_only

    def encode(self, output: RequestOutput) -> bytes:
        self._timeline.note(output)
        return self._encoder.encode(output)

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        for output in outputs:
            self._timeline.note(output)
        answer, told = self._encoder.whole(outputs), self._timeline.told
        if told is not None and answer.get("usage") is not None:
            answer["usage"]["timeline"] = told
        return answer
