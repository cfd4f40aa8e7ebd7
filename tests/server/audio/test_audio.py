"""Tests of audio over HTTP: forms, chunks, languages and timestamps."""

import asyncio
import math
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from ask import client_of, events, fetch, refused
from fake_engine import FakeEngine, byte_tokenizer
from fake_inputs import wav
from fake_speech import BEFORE, DE, EN, START, TIME, TRANSCRIBE, TRANSLATE, UNTIMED, Writer
from numpy.typing import NDArray
from tokenizers import AddedToken

from quire.config.env import Env
from quire.frontend.speech import RATE, VoxtralTranscriber, WhisperTranscriber, split_audio
from quire.server.app import Application
from quire.server.settings import make_settings
from quire.text.tokenizer import Tokenizer

PATH = "/v1/audio/transcriptions"
TRANSLATIONS = "/v1/audio/translations"
VOXTRAL = ("<s>", "[INST]", "[BEGIN_AUDIO]", "[AUDIO]", "[/INST]", "[TRANSCRIBE]")


def noise(seconds: float, rate: int = RATE) -> NDArray[np.float32]:
    return np.random.default_rng(0).normal(0, 0.1, round(seconds * rate)).astype(np.float32)


def sound(seconds: float = 1.0, rate: int = RATE) -> bytes:
    return wav((noise(seconds, rate)[:, None] * 30000).astype(np.int16), rate)


ENGINE = Writer()
APPLICATION = Application(ENGINE, make_settings({}))
"""One application for all tests: building it takes longer than a request."""
SOUND = sound()


def post(path: str, application: Application = APPLICATION, **kwargs: Any) -> httpx.Response:
    return fetch(application.asgi, "POST", path, **kwargs)


def send(
    path: str = PATH, file: bytes = SOUND, script: list[int] | None = None, **form: Any
) -> httpx.Response:
    ENGINE.begin(script)
    return post(path, data=form, files={"file": ("a.wav", file)})


def test_audio_is_transcribed() -> None:
    reply = send(model="fake", language="en", temperature="0.5", seed="3", top_k="7")
    assert reply.json() == {"text": "Hallo.", "usage": {"type": "duration", "seconds": 1}}
    ((id, prompt, params, _),) = ENGINE.seen
    assert id.startswith("trsc-")
    assert prompt.token_ids == [START, EN, TRANSCRIBE, UNTIMED]
    assert prompt.media is not None and prompt.media.items[0].modality == "audio"
    assert (params.temperature, params.seed, params.top_k) == (0.5, 3, 7)
    assert ENGINE.num_in_flight == 0


def test_prompt_and_task_tokens_are_in_the_prompt() -> None:
    long = {"prompt": "x" * 300, "response_format": "text"}
    reply = send(TRANSLATIONS, language="DE", **long)
    assert reply.text == "Hallo.\n" and reply.headers["content-type"].startswith("text/plain")
    ids = ENGINE.seen[0][1].token_ids
    assert ids[0] == BEFORE and ids[-4:] == [START, DE, TRANSLATE, UNTIMED]
    assert len(ids) == 1 + 223 + 4
    assert send(TRANSLATIONS, language="de").json() == {"text": "Hallo."}
    assert send(language="en", hotwords="Quire", prompt="So").json()["text"] == "Hallo."
    spelled = ENGINE.tokenizer.encode(" Quire So", False)
    assert ENGINE.seen[0][1].token_ids == [BEFORE, *spelled, START, EN, TRANSCRIBE, UNTIMED]


def test_language_is_detected() -> None:
    assert send(response_format="verbose_json").json()["language"] == "de"
    detection, transcription = ENGINE.seen
    assert detection[1].token_ids == [START] and detection[2].allowed_token_ids == [EN, DE]
    assert transcription[1].token_ids == [START, DE, TRANSCRIBE]


def test_english_models_have_no_language_token() -> None:
    speech = WhisperTranscriber(ENGINE.tokenizer, max_len=448, max_samples=30 * RATE, is_english=True)
    assert [*speech.languages] == ["en"] and speech.prompt("transcribe", "en") == [START, UNTIMED]
    usual, ENGINE.inputs.media.speech = ENGINE.inputs.media.speech, speech
    try:
        assert send().status_code == 200
        assert [prompt.token_ids for _, prompt, _, _ in ENGINE.seen] == [[START, UNTIMED]]
        assert "Must be one of: en" in refused(send(language="de"))["message"]
    finally:
        ENGINE.inputs.media.speech = usual


def test_voxtral_prompt_holds_the_audio() -> None:
    """Voxtral needs no language detection, joins the texts of chunks with spaces and has no timestamps."""
    backend = byte_tokenizer().backend
    backend.add_special_tokens([AddedToken(name, special=True) for name in VOXTRAL])
    speech = VoxtralTranscriber.of(
        Tokenizer(backend, special_tokens={}), max_len=1000, max_samples=90 * RATE, num_vectors=1500
    )
    assert speech is not None and speech.max_samples == 30 * RATE
    start, inst, begin, place, end, write = (backend.token_to_id(name) for name in VOXTRAL)
    usual, ENGINE.inputs.media.speech = ENGINE.inputs.media.speech, speech
    try:
        assert send().json()["text"] == "Hallo." and len(ENGINE.seen) == 1
        assert ENGINE.seen[0][1].token_ids == [start, inst, begin, place, end, write]
        long = {"file": sound(40), "language": "FR"}
        assert send(**long).json()["text"] == "Hallo.  Hallo."
        named = backend.encode("lang:fr", add_special_tokens=False).ids
        assert ENGINE.seen[0][1].token_ids == [start, inst, begin, place, end, *named, write]
        chunks = events(send(**long, stream="true"))
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "Hallo.  Hallo."
        assert "Must be one of: ar, de, en" in refused(send(language="ja"))["message"]
        assert "supports timestamps" in refused(send(response_format="srt"))["message"]
        error = refused(send(TRANSLATIONS), 404)
        assert error["message"] == "The model does not support Translations API"
    finally:
        ENGINE.inputs.media.speech = usual


def test_other_sample_rates_and_channels_are_resampled() -> None:
    stereo = wav(np.zeros((8000, 2), np.int16), 8000)
    assert send(file=stereo, language="en").status_code == 200
    assert [len(audio.samples) for audio in ENGINE.ear.seen] == [RATE]


def test_long_audio_is_split_at_quiet_points() -> None:
    samples = noise(65)
    quiet = [29 * RATE + 4800, 58 * RATE + 8000]
    for place in quiet:
        samples[place : place + 1600] = 0
    pieces = split_audio(samples, 30 * RATE)
    assert [start for start, _ in pieces] == [0, *quiet]
    assert np.array_equal(np.concatenate([piece for _, piece in pieces]), samples)
    assert len(split_audio(samples[: 30 * RATE], 30 * RATE)) == 1
    reply = send(file=wav((samples[:, None] * 30000).astype(np.int16), RATE), language="en")
    assert reply.json() == {"text": "Hallo. Hallo. Hallo.", "usage": {"type": "duration", "seconds": 65}}
    assert len(ENGINE.seen) == 3 and len({id for id, *_ in ENGINE.seen}) == 3


def test_stream_of_several_audio_chunks() -> None:
    options = {"stream": "true", "stream_include_usage": "1", "stream_continuous_usage_stats": "1"}
    reply = send(file=sound(40), language="en", **options)
    chunks = events(reply)
    assert {chunk["object"] for chunk in chunks} == {"transcription.chunk"}
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert "".join(choice["delta"]["content"] for choice in choices) == "Hallo. Hallo."
    assert [choice.get("finish_reason") for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {"prompt_tokens": 8, "total_tokens": 24, "completion_tokens": 16}
    assert chunks[0]["usage"]["completion_tokens"] < 16


def timed_tokens(*parts: float | str) -> list[int]:
    """Return the token ids of timestamps and texts."""
    encode = byte_tokenizer().encode
    return [
        id
        for part in parts
        for id in (encode(part, False) if isinstance(part, str) else [TIME + round(part / 0.02)])
    ]


def test_timestamps_split_the_text_into_segments() -> None:
    script = timed_tokens(0.0, " Ja.", 0.5, 0.5, " Nein --> doch.", 0.9, " Nun")
    reply = send(script=script, language="en", response_format="verbose_json").json()
    assert (reply["text"], reply["duration"], reply["task"]) == ("Ja. Nein --> doch. Nun", 1.0, "transcribe")
    parts = [(segment["start"], segment["end"], segment["text"]) for segment in reply["segments"]]
    assert parts == [(0, 0.5, " Ja."), (0.5, 0.9, " Nein --> doch."), (0.9, 1.0, " Nun")]
    first = reply["segments"][0]
    assert first["tokens"] == timed_tokens(" Ja.") and first["avg_logprob"] == -1.0 and first["id"] == 0
    assert math.isclose(first["compression_ratio"], 4 / 12)
    assert ENGINE.seen[0][1].token_ids == [START, EN, TRANSCRIBE]
    srt = send(script=script, language="en", response_format="srt").text
    assert srt.startswith("1\n00:00:00,000 --> 00:00:00,500\nJa.\n\n2\n00:00:00,500 --> 00:00:00,900\n")
    vtt = send(script=script, language="en", response_format="vtt").text
    assert vtt.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:00.500\nJa.\n\n") and "Nein -> doch." in vtt


def test_words_have_timestamps() -> None:
    """Words cover all segments and chunks; segments are left out unless requested."""
    script = timed_tokens(0.0, " Ja, so", 2.0, 2.0, " ist", 2.8)
    form = {"script": script, "language": "en", "response_format": "verbose_json"}
    reply = send(file=sound(40), **form, **{"timestamp_granularities[]": ["word", "segment"]}).json()
    first, seek = reply["words"], reply["segments"][2]["seek"]
    assert [word["word"] for word in first] == ["Ja,", "so", "ist"] * 2 and 29 <= seek <= 30
    assert [(word["start"], word["end"]) for word in first[:3]] == [(0.0, 0.8), (0.8, 1.4), (2.0, 2.6)]
    assert math.isclose(first[4]["start"], seek + 0.8)
    *_, last_request = ENGINE.seen
    assert (
        last_request[1].token_ids[:3] == [START, EN, TRANSCRIBE] and last_request[1].token_ids[3:-1] == script
    )
    assert last_request[2].aligning.first == 3 and last_request[2].skip_reading_prefix_cache
    alone = send(**form, **{"timestamp_granularities[]": ["word"]}).json()
    assert "segments" not in alone and len(alone["words"]) == 3
    assert "words" not in send(**form).json()


def test_timestamps_of_later_chunks_count_from_the_start() -> None:
    script = timed_tokens(1.0, " Ja.", 2.0)
    reply = send(file=sound(40), script=script, language="en", response_format="verbose_json").json()
    first, second = reply["segments"]
    assert 29 <= second["seek"] <= 30
    assert math.isclose(second["start"], second["seek"] + 1) and math.isclose(
        second["end"], second["seek"] + 2
    )
    assert (first["start"], second["id"]) == (1.0, 1)


@pytest.mark.parametrize(
    ("form", "status", "param", "words"),
    [
        ({"language": "xx"}, 400, "language", "Must be one of: en, de"),
        ({"model": "other"}, 404, "model", "does not exist"),
        ({"response_format": "diarized_json"}, 400, "body.response_format", "literal_error"),
        ({"response_format": "srt", "stream": "true"}, 400, "response_format", "doesn't support streaming"),
        ({"stream_include_usage": "true"}, 400, "stream", "only be defined when `stream=True`"),
        (
            {"timestamp_granularities[]": "word"},
            400,
            "timestamp_granularities[]",
            "need response_format=verbose",
        ),
        ({"temperature": "9"}, 400, "temperature", "temperature"),
        ({"temperature": "nan"}, 400, "body.temperature", "finite"),
        ({"top_p": "x"}, 400, "body.top_p", "float_parsing"),
        ({"prompt": "<|en|>"}, 400, "prompt", "special tokens"),
        ({"max_completion_tokens": "9999"}, 400, "max_tokens", "max_model_len"),
        ({"file": b"RIFF0000WAVEfmt "}, 400, "file", "file: the WAV file is broken"),
        ({"file": b"no sound"}, 400, "file", "file: it is not audio"),
        ({"file": b""}, 400, "file", "file: it is not audio"),
    ],
)
def test_invalid_form_fields_are_refused(form: Any, status: int, param: str, words: str) -> None:
    error = refused(send(**{"language": "en"} | form), status)
    assert error["param"] == param and words in error["message"], error


def test_models_without_transcription_are_404() -> None:
    mute = Application(FakeEngine(), make_settings({}))
    for path, name in ((PATH, "Transcriptions"), (TRANSLATIONS, "Translations")):
        error = refused(post(path, mute, files={"file": SOUND}), 404)
        assert error["message"] == f"The model does not support {name} API"
    assert send(TRANSLATIONS, to_language="fr").status_code == 400


def test_bodies_that_are_not_forms_are_refused() -> None:
    utf7 = {"content-type": "multipart/form-data; charset=utf-7; boundary=x"}
    multipart = {"content-type": "multipart/form-data; boundary=x"}
    for body in (
        {"json": {"file": "x"}},
        {"data": {"file": "x"}},
        {"content": b"--x\r\n", "headers": multipart},
        {"content": b"\x00garbage", "headers": multipart},
        {"content": b"--x\r\n", "headers": {"content-type": "multipart/form-data"}},
        {"files": {"language": (None, b"en")}},
        {"files": {"file": SOUND, "request_id": (None, b"+2AA-")}, "headers": utf7},
        {"files": {"file": (None, b"a text")}},
        {},
    ):
        refused(post(PATH, **body))


def test_oversized_audio_file_is_413() -> None:
    settings = make_settings({}, env=Env.read({"VLLM_MAX_AUDIO_CLIP_FILESIZE_MB": "0.01"}))
    strict = Application(ENGINE, settings)
    for seconds in (1.0, 60.0):  # slightly too large, and larger than any form
        error = refused(post(PATH, strict, files={"file": sound(seconds)}), 413)
        assert "Maximum file size exceeded" in error["message"]
    assert post(PATH, strict, files={"file": sound(0.2)}).status_code == 200


def test_oversized_upload_is_413_after_it_was_sent() -> None:
    """A client sends its whole body before it reads; a body far above the limit is not read at all."""

    async def go(length: int) -> tuple[int, int]:
        pieces, sent = [b"x" * 1000] * 5, list[Any]()

        async def receive() -> Any:
            return {"type": "http.request", "body": pieces.pop(), "more_body": bool(pieces)}

        async def sending(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", b"multipart/form-data; boundary=x"), (b"content-length", b"%d" % length)]
        scope = {"type": "http", "method": "POST", "path": PATH, "raw_path": PATH.encode()}
        scope |= {"query_string": b"", "headers": headers, "root_path": "", "scheme": "http"}
        await APPLICATION.asgi(scope, receive, sending)
        return sent[0]["status"], len(pieces)

    assert asyncio.run(go(30 << 20)) == (413, 0) and asyncio.run(go(1 << 40)) == (413, 5)


async def test_client_disconnect_aborts_all_audio_chunks() -> None:
    ENGINE.begin([97] * 400)
    request = httpx.Request(
        "POST",
        f"http://test{PATH}",
        data={"language": "en", "stream": "true"},
        files={"file": ("a", sound(70))},
    )
    body, disconnect = request.read(), asyncio.Event()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await disconnect.wait()
        return {"type": "http.disconnect"}

    async def sending(message: Any) -> None:
        if message.get("body"):
            disconnect.set()

    headers = [(name.lower(), value) for name, value in request.headers.raw]
    scope = {"type": "http", "method": "POST", "path": PATH, "raw_path": PATH.encode()}
    scope |= {"query_string": b"", "headers": headers, "root_path": "", "scheme": "http"}
    async with asyncio.timeout(60):
        await APPLICATION.asgi(scope, receive, sending)
    assert ENGINE.num_in_flight == 0 and len(ENGINE.seen) == len(ENGINE.aborted) == 3


async def test_openai_client_transcribes() -> None:
    ENGINE.begin()
    http = client_of(APPLICATION.asgi)
    client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="x", http_client=http, max_retries=0)
    file = ("a.wav", SOUND)
    transcription = await client.audio.transcriptions.create(model="fake", file=file, language="en")
    assert transcription.text == "Hallo."
    text = await client.audio.transcriptions.create(model="fake", file=file, response_format="text")
    assert text == "Hallo.\n"
    verbose = await client.audio.transcriptions.create(
        model="fake", file=file, response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert (verbose.duration, verbose.language) == (1.0, "de")
    assert verbose.segments and verbose.segments[0].text == " Hallo."
    assert (await client.audio.translations.create(model="fake", file=file)).text == "Hallo."
    stream: Any = await client.audio.transcriptions.create(model="fake", file=file, stream=True)
    texts = [chunk.choices[0]["delta"]["content"] async for chunk in stream]
    assert "".join(texts) == "Hallo." and len(texts) > 1
    with pytest.raises(openai.BadRequestError, match="Unsupported language"):
        await client.audio.transcriptions.create(model="fake", file=file, language="xx")
    await http.aclose()
