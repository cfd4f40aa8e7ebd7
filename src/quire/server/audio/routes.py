"""The routes that hear."""

from typing import Annotated, Any

from fastapi import FastAPI, Form, Request
from starlette.responses import Response

from quire.server.audio.answer import answer_speech
from quire.server.audio.bodies import SpeechReply, TranscriptionForm, TranslationForm
from quire.server.http.document import CODES, replies_of
from quire.server.openai.service import GenerationService

PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")
MAX_FIELDS_BYTES = 1 << 20
"""Of a form, beside its file."""


def add_speech_routes(app: FastAPI, api: GenerationService) -> None:
    told: dict[str, Any] = replies_of(SpeechReply, *CODES, stream=True)
    text = {"schema": {"type": "string"}, "example": "Hello.\n"}
    told["responses"][200]["content"]["text/plain"] = text

    @app.post(PATHS[0], **told)
    async def create_transcription(form: Annotated[TranscriptionForm, Form()], request: Request) -> Response:
        """Write down what is said in a sound, in its own language."""
        return await answer_speech(api, "transcribe", form, request)

    @app.post(PATHS[1], **told)
    async def create_translation(form: Annotated[TranslationForm, Form()], request: Request) -> Response:
        """Write down what is said in a sound, in English."""
        return await answer_speech(api, "translate", form, request)
