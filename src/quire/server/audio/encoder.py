"""Encoding of transcriptions as JSON, text, subtitles or stream events."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import PlainTextResponse, Response

from quire.data.outputs import CompletionOutput, RequestOutput
from quire.frontend.speech import RATE, Segment, Transcriber
from quire.server.audio.bodies import SpeechForm
from quire.server.http.errors import json_response
from quire.server.http.sse import event
from quire.server.openai.api_call import ApiCall
from quire.server.openai.encoder import ChunkEncoder
from quire.server.openai.logprobs import finite_logprob
from quire.server.openai.requests import StreamOptions
from quire.server.openai.service import GenerationService

NAMES = {"transcribe": "transcription", "translate": "translation"}


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """A transcription or translation request: its form, its engine call, and the chunks that its audio was
    split into. Each chunk is one prompt of the call."""

    task: str
    form: SpeechForm
    call: ApiCall
    transcriber: Transcriber
    language: str | None
    """Language code of the audio; None if the request sets none and the model does not detect it."""
    starts: Sequence[int]
    """Index of the first sample of each chunk."""
    length: int
    """Number of samples of the audio."""
    granularities: frozenset[str] = frozenset({"segment"})
    """Units with timestamps in verbose_json: segments, words."""
    no_speech: Sequence[float | None] = ()
    """Probability per chunk that the chunk contains no speech, None if unknown; empty if not computed."""
    token_starts: list[list[int]] = field(default_factory=list)
    """For each chunk, the index of the encoder state at which the text after each token begins; empty unless
    word timestamps are computed."""

    @property
    def seconds(self) -> float:
        return self.length / RATE

    @property
    def ends(self) -> list[int]:
        """Return the index after the last sample of each chunk."""
        return [*self.starts[1:], self.length]


class SpeechEncoder(ChunkEncoder):
    """Encodes a transcription or translation. Each chunk of the audio is one prompt of the API call."""

    def __init__(self, api: GenerationService, speech: SpeechRequest) -> None:
        self._speech, form = speech, speech.form
        options = StreamOptions(
            include_usage=form.stream_include_usage, continuous_usage_stats=form.stream_continuous_usage_stats
        )
        kind = f"{NAMES[speech.task]}.chunk"
        super().__init__(api, speech.call, object=kind, options=options, num_choices=1)
        self._num_finished = 0
        self._has_text = self._is_new_chunk = False
        """Two flags: whether text was sent, and whether the next text starts a new chunk of the audio."""

    # ---- streaming

    def encode(self, output: RequestOutput) -> bytes:
        (completion,) = output.outputs
        self._num_output[0] += len(completion.token_ids)
        self._num_finished += output.finished
        is_last = self._num_finished == len(self._speech.starts)
        text = completion.text if self._has_text else completion.text.lstrip()
        if text and self._has_text and self._is_new_chunk:
            text = self._speech.transcriber.separator + text
        self._is_new_chunk = output.finished or (self._is_new_chunk and not text)
        if not text and not is_last:
            return b""
        self._has_text = True
        choice: dict[str, Any] = {"delta": {"content": text}}
        if is_last:
            choice |= {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
        return event(
            self._frame
            | {"choices": [choice]}
            | ({"usage": self._final_usage()} if self._usage_in_every_chunk else {})
        )

    def _final_fields(self) -> dict[str, Any]:
        return {"usage": self._final_usage()}

    # ---- whole reply

    def response_body(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        completions = [output.outputs[0] for output in outputs]
        response_format = self._speech.form.response_format
        return _ENCODERS[response_format](self._speech, completions)


def respond(form: SpeechForm) -> Callable[[Any], Response]:
    """Return the function that converts the encoded reply to an HTTP response, as JSON or plain text by the
    `response_format` of the form."""
    if form.response_format in ("json", "verbose_json"):
        return json_response
    return lambda answer: PlainTextResponse(answer["text"] + "\n")


def _json(speech: SpeechRequest, completions: list[CompletionOutput]) -> dict[str, Any]:
    text = speech.transcriber.separator.join(completion.text for completion in completions).strip()
    if speech.task == "translate":
        return {"text": text}
    return {"text": text, "usage": {"type": "duration", "seconds": math.ceil(speech.seconds)}}


def _verbose(speech: SpeechRequest, completions: list[CompletionOutput]) -> dict[str, Any]:
    segments, texts = list[dict[str, Any]](), list[str]()
    words = list[dict[str, Any]]()
    for piece, start, segment in _segments(speech, completions):
        texts.append(segment.text)
        if speech.token_starts:
            words += _words(speech, piece, start, segment)
        segments.append(
            {
                "id": len(segments),
                "seek": round(start, 3),
                "start": round(start + segment.start, 3),
                "end": round(start + segment.end, 3),
                "text": segment.text,
                "tokens": segment.token_ids,
                "temperature": speech.form.temperature,
                "avg_logprob": _mean_logprob(completions[piece], segment),
                "compression_ratio": segment.compression_ratio,
                "no_speech_prob": speech.no_speech[piece] if speech.no_speech else None,
            }
        )
    more: dict[str, Any] = {"task": speech.task, "language": speech.language, "duration": speech.seconds}
    times = {"segment": {"segments": segments}, "word": {"words": words}}
    for name in sorted(speech.granularities):
        more |= times[name]
    return _json(speech, completions) | {"text": "".join(texts).strip()} | more


def _words(speech: SpeechRequest, piece: int, start: float, segment: Segment) -> list[dict[str, Any]]:
    return [
        {"word": word.text, "start": round(start + word.start, 3), "end": round(start + word.end, 3)}
        for word in speech.transcriber.words(segment, speech.token_starts[piece], speech.language)
    ]


def _segments(speech: SpeechRequest, completions: list[CompletionOutput]) -> list[tuple[int, float, Segment]]:
    """Return (index, start, segment) for each transcript segment: the index and the start time in seconds of
    its audio chunk, and the segment, with times relative to that start."""
    return [
        (piece, start / RATE, segment)
        for piece, (start, end, output) in enumerate(
            zip(speech.starts, speech.ends, completions, strict=True)
        )
        for segment in speech.transcriber.segments(output.token_ids, (end - start) / RATE)
    ]


def _mean_logprob(output: CompletionOutput, segment: Segment) -> float | None:
    if output.logprobs is None:
        return None
    ids, rows = output.token_ids[segment.place], output.logprobs[segment.place]
    chosen = [logprobs[id].logprob for id, logprobs in zip(ids, rows, strict=True) if logprobs]
    return finite_logprob(sum(chosen) / len(chosen))


def _subtitles(
    head: str, comma: str, *, numbered: bool
) -> Callable[[SpeechRequest, list[CompletionOutput]], Any]:
    def encode(speech: SpeechRequest, completions: list[CompletionOutput]) -> dict[str, Any]:
        blocks = [head] if head else []
        for number, (_, start, segment) in enumerate(_segments(speech, completions), 1):
            times = f"{_clock(start + segment.start, comma)} --> {_clock(start + segment.end, comma)}"
            text = " ".join(segment.text.split()).replace("-->", "->")
            blocks.append((f"{number}\n" if numbered else "") + f"{times}\n{text}\n")
        return {"text": "\n".join(blocks)}

    return encode


def _clock(seconds: float, comma: str) -> str:
    minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds // 1000:02}{comma}{milliseconds % 1000:03}"


_ENCODERS: dict[str, Callable[[SpeechRequest, list[CompletionOutput]], dict[str, Any]]] = {
    "json": _json,
    "text": _json,
    "verbose_json": _verbose,
    "srt": _subtitles("", ",", numbered=True),
    "vtt": _subtitles("WEBVTT\n", ".", numbered=False),
}
"""Functions that encode a reply that is not streamed, by `response_format`."""
