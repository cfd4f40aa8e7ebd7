"""The routes of speech models: /v1/audio/transcriptions and /v1/audio/translations."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Form, Request
from starlette.responses import Response

from quire.data.outputs import RequestOutput
from quire.data.params import RequestOutputKind, SamplingParams
from quire.errors import RequestError
from quire.frontend.inputs import Prompt
from quire.frontend.speech import MAX_SECONDS, RATE, Samples, Transcriber, split_audio
from quire.multimodal.inputs import MediaInput
from quire.multimodal.processing import PreparedItem
from quire.multimodal.processors import Audio
from quire.server.audio.bodies import SpeechForm, SpeechReply, TranscriptionForm, TranslationForm
from quire.server.audio.encoder import NAMES, SpeechEncoder, SpeechRequest, respond
from quire.server.http.errors import NotFound, TooLarge
from quire.server.http.openapi_document import CODES, replies_of
from quire.server.openai.api_call import new_call
from quire.server.openai.requested_model import RequestedModel
from quire.server.openai.run_call import answer_call, final_outputs
from quire.server.openai.sampling_params import check_fields, output_limit
from quire.server.openai.service import GenerationService
from quire.server.openai.streams import gather_all

PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
MAX_FIELDS_BYTES = 1 << 20
"""Maximum bytes of a form without its file."""
_ID_PREFIXES = {"transcribe": "trsc", "translate": "trsl"}
"""Prefixes of the request ids, by task."""
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("frequency_penalty", "repetition_penalty", "presence_penalty"),
)
_TIMED_FORMATS = ("verbose_json", "srt", "vtt")
"""Formats with timestamps."""
_STREAMED_FORMATS = ("json", "text")
_MAX_PROMPT = 1 << 14
"""Maximum number of characters of `prompt` that are tokenized: many more than the model uses."""


def add_speech_routes(app: FastAPI, api: GenerationService) -> None:
    options: dict[str, Any] = replies_of(SpeechReply, *CODES, stream=True)
    text = {"schema": {"type": "string"}, "example": "Hello.\n"}
    options["responses"][200]["content"]["text/plain"] = text

    @app.post(PATHS[0], **options)
    async def create_transcription(form: Annotated[TranscriptionForm, Form()], request: Request) -> Response:
        """Return the transcription of audio in its own language."""
        return await answer_speech(api, "transcribe", form, request)

    @app.post(PATHS[1], **options)
    async def create_translation(form: Annotated[TranslationForm, Form()], request: Request) -> Response:
        """Return the translation of audio to English."""
        return await answer_speech(api, "translate", form, request)


async def answer_speech(api: GenerationService, task: str, form: SpeechForm, request: Request) -> Response:
    transcriber = api.engine.inputs.media.speech
    model = await api.names.find(form.model, request, pools=False)
    if transcriber is None or task not in transcriber.tasks:
        raise NotFound(f"The model does not support {NAMES[task].capitalize()}s API")
    _check(form, transcriber)
    known = [*transcriber.languages]
    language = known[0] if len(known) == 1 else None
    if form.language is not None:
        language = transcriber.check_language(form.language)
    wait = partial(api.running_requests.until_disconnect, request.receive)
    samples, pieces = await wait(_read_audio(api, form, transcriber.max_samples))
    runs = _SpeechRuns(api, task, transcriber, form, request, model)
    if language is None and transcriber.detects_language_first:
        language = await wait(runs.detect_language(pieces[0][1]))
    is_timed, no_speech = form.response_format in _TIMED_FORMATS, list[float | None]()
    if form.response_format == "verbose_json" and transcriber.no_speech is not None:
        no_speech = await wait(runs.no_speech_probs(pieces))
    ids = transcriber.prompt(task, language, timed=is_timed, before=_previous_text(form))
    prompts = [runs.prompt(ids, piece) for _, piece in pieces]
    longest = max(len(prompt.token_ids) for prompt in prompts)
    params = _params(api, form, output_limit(model, form.max_completion_tokens, longest), timed=is_timed)
    call = new_call(api, _ID_PREFIXES[task], form, request, model, prompts, [params] * len(prompts))
    speech = SpeechRequest(
        task,
        form,
        call,
        transcriber,
        language,
        [start for start, _ in pieces],
        len(samples),
        _granularities(form),
        no_speech,
    )
    return await answer_call(
        api,
        call,
        SpeechEncoder(api, speech),
        request,
        stream=form.stream,
        respond=respond(form),
        in_order=True,
        before_encoding=partial(runs.align, speech, pieces) if "word" in speech.granularities else None,
    )


def _check(form: SpeechForm, transcriber: Transcriber) -> None:
    check_fields(form)
    if form.response_format in _TIMED_FORMATS and transcriber.timestamp_tokens is None:
        raise RequestError(
            f"{form.response_format} needs a model that supports timestamps; for this one use json or text",
            param="response_format",
        )
    if (form.stream_include_usage or form.stream_continuous_usage_stats) and not form.stream:
        raise RequestError("Stream options can only be defined when `stream=True`.", param="stream")
    if form.stream and form.response_format not in _STREAMED_FORMATS:
        raise RequestError(
            f"{form.response_format} format doesn't support streaming case", param="response_format"
        )
    if "word" in _granularities(form) and form.response_format != "verbose_json":
        raise RequestError(
            "word timestamps need response_format=verbose_json", param="timestamp_granularities[]"
        )
    if isinstance(form, TranslationForm) and form.to_language not in (None, "en"):
        raise RequestError(
            f"to_language {form.to_language!r:.40} is not supported: this model translates to `en`",
            "to_language",
        )


def _previous_text(form: SpeechForm) -> str:
    return f"{form.hotwords.strip()} {form.prompt}".strip()[-_MAX_PROMPT:]


def _granularities(form: SpeechForm) -> frozenset[str]:
    """Return the units that timestamps are computed for: `segment`, `word` or both."""
    requested = form.timestamp_granularities if isinstance(form, TranscriptionForm) else []
    return frozenset(requested or ["segment"])


async def _read_audio(
    api: GenerationService, form: SpeechForm, max_samples: int
) -> tuple[Samples, list[tuple[int, PreparedItem]]]:
    """Return the audio samples, and for each chunk of at most `max_samples` the index of its first sample and
    the preprocessed chunk. Raise RequestError if the file is too large or cannot be decoded."""
    data, limit = await form.file.read(), api.settings.max_audio_bytes
    if len(data) > limit:
        raise TooLarge(f"Maximum file size exceeded: the limit is {limit} bytes", param="file")
    media, item = api.engine.inputs.media, MediaInput("audio", None, "file", "file")
    try:
        samples = await media.decode_audio(data, RATE, MAX_SECONDS)
    except RequestError as error:
        raise item.wrong(error) from None
    chunks = split_audio(samples, max_samples)
    coroutines = [media.prepare([replace(item, source=Audio(piece, RATE))]) for _, piece in chunks]
    prepared = await gather_all(coroutines)
    return samples, [(start, piece) for (start, _), (piece,) in zip(chunks, prepared, strict=True)]


@dataclass(frozen=True, slots=True)
class _SpeechRuns:
    """Additional runs of the model for a speech request: to detect the language and speech, and to align
    words."""

    api: GenerationService
    task: str
    transcriber: Transcriber
    form: SpeechForm
    request: Request
    model: RequestedModel

    def prompt(self, ids: list[int], piece: PreparedItem) -> Prompt:
        return self.api.engine.inputs.parse({"prompt_token_ids": ids}, prepared=[piece])

    async def _run(
        self, name: str, prompts: list[Prompt], params: list[SamplingParams]
    ) -> list[RequestOutput]:
        id_prefix = f"{_ID_PREFIXES[self.task]}-{name}"
        return await final_outputs(
            self.api, new_call(self.api, id_prefix, self.form, self.request, self.model, prompts, params)
        )

    async def detect_language(self, piece: PreparedItem) -> str:
        """Run the model for one token on a chunk of audio, and return the code of the language it detects."""
        prompt = self.prompt(self.transcriber.prompt(self.task, None), piece)
        codes = {id: code for code, id in self.transcriber.languages.items()}
        params = SamplingParams(max_tokens=1, temperature=0.0, allowed_token_ids=list(codes))
        (output,) = await self._run("lang", [prompt], [params])
        return codes[output.outputs[0].token_ids[0]]

    async def no_speech_probs(self, pieces: list[tuple[int, PreparedItem]]) -> list[float | None]:
        """Return for each chunk the probability that it has no speech, None if unknown. It is the probability
        of the no-speech token where a language token is expected."""
        assert (token_id := self.transcriber.no_speech) is not None
        ids = self.transcriber.prompt(self.task, None, before=_previous_text(self.form))
        prompts = [self.prompt(ids, piece) for _, piece in pieces]
        params = SamplingParams(max_tokens=1, temperature=0.0, logprob_token_ids=[token_id])
        outputs = await self._run("mute", prompts, [params] * len(prompts))
        logprobs = [output.outputs[0].logprobs for output in outputs]
        entries = [row[0].get(token_id) if row and row[0] else None for row in logprobs]
        # With processed logprobs a suppressed token has a logprob of -inf: its probability is unknown.
        return [None if x is None or math.isinf(x.logprob) else math.exp(x.logprob) for x in entries]

    async def align(
        self, speech: SpeechRequest, pieces: list[tuple[int, PreparedItem]], outputs: list[RequestOutput]
    ) -> None:
        """Run the model on the transcribed chunks, and add the start of the text after each token to
        `speech.token_starts`."""
        inputs = [
            self.transcriber.aligning(prompt.token_ids, output.outputs[0].token_ids, end - start)
            for prompt, output, start, end in zip(
                speech.call.prompts, outputs, speech.starts, speech.ends, strict=True
            )
        ]
        prompts = [self.prompt(ids, piece) for (ids, _), (_, piece) in zip(inputs, pieces, strict=True)]
        once = partial(SamplingParams, max_tokens=1, temperature=0.0, skip_reading_prefix_cache=True)
        aligned = await self._run("words", prompts, [once(aligning=aligning) for _, aligning in inputs])
        speech.token_starts.extend([output.aligned or [] for output in aligned])


def _params(api: GenerationService, form: SpeechForm, max_tokens: int, *, timed: bool) -> SamplingParams:
    default = api.engine.facts.default_sampling
    values = {name: getattr(form, name) for name in _SAMPLING}
    values |= {name: default.get(name) for name in values if values[name] is None}
    return SamplingParams.from_optional(
        **values,
        max_tokens=max_tokens,
        logprobs=0 if form.response_format == "verbose_json" else None,
        skip_special_tokens=True,
        timestamps=timed,
        output_kind=RequestOutputKind.DELTA if form.stream else RequestOutputKind.FINAL_ONLY,
    )
