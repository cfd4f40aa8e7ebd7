"""What was heard, written down: as JSON, as text, as subtitles, or as events."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import PlainTextResponse, Response

from quire.data.outputs import CompletionOutput, RequestOutput
from quire.frontend.speech import RATE, Segment, Transcriber
from quire.server.audio.bodies import SpeechForm
from quire.server.http.errors import json_response
from quire.server.http.sse import DONE, event, failure
from quire.server.openai.service import ApiCall, GenerationService

_LEAST_LOGPROB = -9999.0
"""JSON knows no infinity."""
NAMES = {"transcribe": "transcription", "translate": "translation"}


@dataclass(frozen=True, slots=True)
class Heard:
    """A sound that the engine is about to write down."""

    task: str
    form: SpeechForm
    job: ApiCall
    speech: Transcriber
    language: str | None
    """None: nobody said it, and the model was not asked."""
    starts: Sequence[int]
    """Of its pieces, in samples."""
    length: int
    """Its samples."""
    wanted: frozenset[str] = frozenset({"segment"})
    """Of what the times are told with verbose_json: segments, words."""
    no_speech: Sequence[float | None] = ()
    """Of each piece how likely it is that nobody speaks."""
    begins: list[list[int]] = field(default_factory=list)
    """Of each piece, once it is known, the state at which what follows each of its tokens begins."""

    @property
    def seconds(self) -> float:
        return self.length / RATE


class SpeechEncoder:
    """A transcription or a translation: its pieces are the prompts of one job."""

    text_only = False

    def __init__(self, api: GenerationService, heard: Heard) -> None:
        self._api, self._heard = api, heard
        job, form = heard.job, heard.form
        forced = api.settings.api.enable_force_include_usage
        self._usage = forced or form.stream_include_usage or job.timeline is not None
        self._every = forced or (form.stream_include_usage and form.stream_continuous_usage_stats)
        self._frame = {
            "id": job.id,
            "object": f"{NAMES[heard.task]}.chunk",
            "created": job.created,
            "model": job.model,
        }
        self._num_prompt = sum(len(prompt.token_ids) for prompt in job.prompts)
        self._num_output = self._num_over = 0
        self._begun = self._is_next = False
        """Whether there is a text, and whether another piece begins."""

    # ---- a stream

    def encode(self, output: RequestOutput) -> bytes:
        (each,) = output.outputs
        self._num_output += len(each.token_ids)
        self._num_over += output.finished
        is_last = self._num_over == len(self._heard.starts)
        text = each.text if self._begun else each.text.lstrip()
        if text and self._begun and self._is_next:
            text = self._heard.speech.between + text
        self._is_next = output.finished or (self._is_next and not text)
        if not text and not is_last:
            return b""
        self._begun = True
        choice: dict[str, Any] = {"delta": {"content": text}}
        if is_last:
            choice |= {"finish_reason": each.finish_reason, "stop_reason": each.stop_reason}
        return event(
            self._frame | {"choices": [choice]} | ({"usage": self._counted()} if self._every else {})
        )

    def encode_text(self, text: str, num_tokens: int) -> bytes:
        raise AssertionError("it is not text only")

    def _counted(self) -> dict[str, Any]:
        return self._api.usage(self._num_prompt, self._num_output, timeline=self._heard.job.timeline)

    def finish(self) -> bytes:
        if not self._usage:
            return DONE
        return event(self._frame | {"choices": [], "usage": self._counted()}) + DONE

    def fail(self, error: Exception) -> bytes:
        return failure(error)

    # ---- a whole answer

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        found = [output.outputs[0] for output in outputs]
        form = self._heard.form.response_format
        return _WHOLE[form](self._heard, found)


def respond(form: SpeechForm) -> Callable[[Any], Response]:
    """What a whole answer becomes."""
    if form.response_format in ("json", "verbose_json"):
        return json_response
    return lambda answer: PlainTextResponse(answer["text"] + "\n")


def _json(heard: Heard, found: list[CompletionOutput]) -> dict[str, Any]:
    text = heard.speech.between.join(each.text for each in found).strip()
    if heard.task == "translate":
        return {"text": text}
    return {"text": text, "usage": {"type": "duration", "seconds": math.ceil(heard.seconds)}}


def _verbose(heard: Heard, found: list[CompletionOutput]) -> dict[str, Any]:
    told, texts = list[dict[str, Any]](), list[str]()
    words = list[dict[str, Any]]()
    for piece, start, segment in _segments(heard, found):
        texts.append(segment.text)
        if heard.begins:
            words += _words(heard, piece, start, segment)
        told.append(
            {
                "id": len(told),
                "seek": round(start, 3),
                "start": round(start + segment.start, 3),
                "end": round(start + segment.end, 3),
                "text": segment.text,
                "tokens": segment.token_ids,
                "temperature": heard.form.temperature,
                "avg_logprob": _mean_logprob(found[piece], segment),
                "compression_ratio": segment.compression_ratio,
                "no_speech_prob": heard.no_speech[piece] if heard.no_speech else None,
            }
        )
    more: dict[str, Any] = {"task": heard.task, "language": heard.language, "duration": heard.seconds}
    times = {"segment": {"segments": told}, "word": {"words": words}}
    for name in sorted(heard.wanted):
        more |= times[name]
    return _json(heard, found) | {"text": "".join(texts).strip()} | more


def _words(heard: Heard, piece: int, start: float, segment: Segment) -> list[dict[str, Any]]:
    return [
        {"word": word.text, "start": round(start + word.start, 3), "end": round(start + word.end, 3)}
        for word in heard.speech.words(segment, heard.begins[piece], heard.language)
    ]


def _segments(heard: Heard, found: list[CompletionOutput]) -> list[tuple[int, float, Segment]]:
    """Each with its piece, and the seconds before that."""
    ends = [*heard.starts[1:], heard.length]
    return [
        (piece, start / RATE, segment)
        for piece, (start, end, output) in enumerate(zip(heard.starts, ends, found, strict=True))
        for segment in heard.speech.segments(output.token_ids, (end - start) / RATE)
    ]


def _mean_logprob(output: CompletionOutput, segment: Segment) -> float | None:
    if output.logprobs is None:
        return None
    ids, each = output.token_ids[segment.place], output.logprobs[segment.place]
    chosen = [logprobs[id].logprob for id, logprobs in zip(ids, each, strict=True) if logprobs]
    return max(sum(chosen) / len(chosen), _LEAST_LOGPROB)


def _subtitles(head: str, comma: str, *, numbered: bool) -> Callable[[Heard, list[CompletionOutput]], Any]:
    def written(heard: Heard, found: list[CompletionOutput]) -> dict[str, Any]:
        blocks = [head] if head else []
        for number, (_, start, segment) in enumerate(_segments(heard, found), 1):
            moments = f"{_clock(start + segment.start, comma)} --> {_clock(start + segment.end, comma)}"
            text = " ".join(segment.text.split()).replace("-->", "->")
            blocks.append((f"{number}\n" if numbered else "") + f"{moments}\n{text}\n")
        return {"text": "\n".join(blocks)}

    return written


def _clock(seconds: float, comma: str) -> str:
    minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds // 1000:02}{comma}{milliseconds % 1000:03}"


_WHOLE: dict[str, Callable[[Heard, list[CompletionOutput]], dict[str, Any]]] = {
    "json": _json,
    "text": _json,
    "verbose_json": _verbose,
    "srt": _subtitles("", ",", numbered=True),
    "vtt": _subtitles("WEBVTT\n", ".", numbered=False),
}
"""By response_format."""
