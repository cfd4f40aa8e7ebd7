"""The forms of the routes that hear and, for the document, what comes back."""

from typing import Any, Literal

from fastapi import UploadFile
from pydantic import BaseModel, ConfigDict, Field, Json, JsonValue, field_validator

from quire.data.params import INT64_MAX, INT64_MIN
from quire.server.openai.replies import FinishReason, TimelineReply, UsageReply
from quire.server.openai.requests import CallBody

Format = Literal["json", "text", "srt", "verbose_json", "vtt"]

# ---- what clients send


class SpeechForm(CallBody):
    """What both routes take."""

    model_config = ConfigDict(strict=False)

    file: UploadFile = Field(description="The sound: WAV, or with PyAV installed what FFmpeg knows.")
    language: str | None = Field(
        None, description="Of the sound: a code such as `en`. Default: the model finds out."
    )
    prompt: str = Field("", description="What was said before, or words that may come; its end counts.")
    hotwords: str = Field("", description="Words that may come: they are heard before `prompt`.")
    response_format: Format = "json"
    temperature: float = Field(
        0.0, description="0 is greedy.", json_schema_extra={"minimum": 0, "maximum": 2}
    )
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    max_completion_tokens: int | None = Field(None, description="Of each piece of 30 seconds.")
    stream: bool = Field(False, description="Events, for json and text.")
    stream_include_usage: bool = Field(False, description="End the stream with a chunk that counts tokens.")
    stream_continuous_usage_stats: bool = Field(False, description="With it: count in every chunk.")
    vllm_xargs: Json[dict[str, JsonValue]] | None = Field(None, description="Has no effect.")

    @field_validator("*")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        """A form may be in any encoding, some of which know half surrogates."""
        if isinstance(value, str):
            value.encode()
        return value


class TranscriptionForm(SpeechForm):
    """The form of /v1/audio/transcriptions."""

    timestamp_granularities: list[Literal["segment", "word"]] = Field(
        default_factory=list,
        alias="timestamp_granularities[]",
        description="With verbose_json: `segment`, as without it, or `word`, or both.",
    )


class TranslationForm(SpeechForm):
    """The form of /v1/audio/translations."""

    to_language: str | None = Field(None, description="`en`; no other is known.")


# ---- what they get


class Duration(BaseModel):
    """What was heard."""

    type: Literal["duration"]
    seconds: int
    timeline: TimelineReply | None = None


class SegmentReply(BaseModel):
    """What is said from one moment to another, in seconds."""

    id: int
    seek: float = Field(description="Where the piece of the sound begins that it is in.")
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float | None
    compression_ratio: float
    no_speech_prob: float | None = Field(None, description="How likely nobody speaks in the whole piece.")


class WordReply(BaseModel):
    """A word, and when it is said, in seconds."""

    word: str
    start: float
    end: float


class SpeechReply(BaseModel):
    """A sound as text; of a translation without usage. What is below it comes with verbose_json."""

    text: str
    usage: Duration | None = None
    task: Literal["transcribe", "translate"] | None = None
    language: str | None = None
    duration: float | None = None
    segments: list[SegmentReply] | None = None
    words: list[WordReply] | None = None


class SpeechDelta(BaseModel):
    """What is added."""

    content: str


class SpeechChoice(BaseModel):
    """The answer in a chunk."""

    delta: SpeechDelta
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class SpeechChunk(BaseModel):
    """An event of a stream."""

    id: str
    object: Literal["transcription.chunk", "translation.chunk"]
    created: int
    model: str
    choices: list[SpeechChoice]
    usage: UsageReply | None = None
