"""Routes of speech models."""

from typing import Annotated, Any

from fastapi import FastAPI, Form, Request
from starlette.responses import Response

from quire.server.audio.answer import answer_speech
from quire.server.audio.bodies import SpeechReply, TranscriptionForm, TranslationForm
from quire.server.http.document import CODES, replies_of
from quire.server.openai.service import GenerationService

PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
MAX_FIELDS_BYTES = 1 << 20
"""Maximum size of a form without its file."""


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
