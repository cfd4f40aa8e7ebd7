"""Forms and reply bodies of the speech routes."""

from typing import Any, Literal

from fastapi import UploadFile
from pydantic import BaseModel, ConfigDict, Field, Json, JsonValue, field_validator

from quire.data.params import INT64_MAX, INT64_MIN
from quire.server.openai.replies import TimelineReply
from quire.server.openai.requests import CallBody, doc

Format = Literal["json", "text", "srt", "verbose_json", "vtt"]

# ---- requests


class SpeechForm(CallBody):
    """Fields that the forms of transcriptions and translations share."""

    model_config = ConfigDict(strict=False)

    file: UploadFile = Field(description="The audio file: WAV, or with PyAV installed any format of FFmpeg.")
    language: str | None = doc("Language of the audio: a code such as `en`. Default: detected by the model.")
    prompt: str = doc("The preceding text, or expected words. Only its end is used.", "")
    hotwords: str = doc("Expected words, which are prepended to `prompt`.", "")
    response_format: Format = "json"
    temperature: float = doc("0 is greedy.", 0.0, json_schema_extra={"minimum": 0, "maximum": 2})
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    max_completion_tokens: int | None = doc("Limit for each chunk of 30 seconds.")
    stream: bool = doc("Stream events, for json and text.", False)
    stream_include_usage: bool = doc("End the stream with a chunk that has the usage.", False)
    stream_continuous_usage_stats: bool = doc("In addition: usage in every chunk.", False)
    vllm_xargs: Json[dict[str, JsonValue]] | None = doc("Has no effect.")

    @field_validator("*")
    @classmethod
    def _check_text(cls, value: Any) -> Any:
        """Reject lone surrogates, which some form encodings can contain."""
        if isinstance(value, str):
            value.encode()
        return value


class TranscriptionForm(SpeechForm):
    """The form of /v1/audio/transcriptions."""

    timestamp_granularities: list[Literal["segment", "word"]] = Field(
        default_factory=list,
        alias="timestamp_granularities[]",
        description="For verbose_json: `segment` (the default), `word`, or both.",
    )


class TranslationForm(SpeechForm):
    """The form of /v1/audio/translations."""

    to_language: str | None = doc("Only `en` is supported.")


# ---- replies


class Duration(BaseModel):
    """Usage of a transcription: the duration of the audio in seconds, rounded up."""

    type: Literal["duration"]
    seconds: int
    timeline: TimelineReply | None = None


class SegmentReply(BaseModel):
    """A segment of the transcript, with its start and end in seconds from the start of the audio."""

    id: int
    seek: float = Field(description="Start of the chunk that contains the segment.")
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float | None
    compression_ratio: float
    no_speech_prob: float | None = doc("Probability that the whole chunk contains no speech.")


class WordReply(BaseModel):
    """A word of the transcript, with its start and end in seconds from the start of the audio."""

    word: str
    start: float
    end: float


class SpeechReply(BaseModel):
    """Reply with the text of the audio, and for a transcription the usage. The fields from `task` on are only
    in verbose_json; `duration` is in seconds."""

    text: str
    usage: Duration | None = None
    task: Literal["transcribe", "translate"] | None = None
    language: str | None = None
    duration: float | None = None
    segments: list[SegmentReply] | None = None
    words: list[WordReply] | None = None
