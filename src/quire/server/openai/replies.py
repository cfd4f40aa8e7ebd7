"""Response bodies, for the OpenAPI document. The routes build them as plain dicts."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, create_model

from quire.data.prefix_miss import MISS_REASONS
from quire.server.openai.requests import doc

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error", "repetition"]


def reply_model(name: str, text: str, **fields: Any) -> type[BaseModel]:
    """Return a pydantic model class for a small response body. `text` is its description, and `fields` are
    the types of its required fields by name."""
    definitions: dict[str, Any] = {field: (kind, ...) for field, kind in fields.items()}
    return create_model(name, __doc__=text, **definitions)


class ErrorInfo(BaseModel):
    """Description of an error."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorReply(BaseModel):
    """The body of every error."""

    error: ErrorInfo


class CachedTokens(BaseModel):
    """Numbers of prompt tokens that were found in the prefix cache, and that belong to media."""

    cached_tokens: int | None = None
    created_cache_tokens: int | None = doc("Prompt tokens computed and added to the prefix cache.")
    cached_tokens_by_tier: dict[str, int] | None = doc(
        "Number of the cached tokens that came from host memory (`host`), `disk` and another engine"
        " (`remote`), if any did."
    )
    multimodal_tokens: dict[str, int] | None = doc("Tokens of media, by modality.")


class ReasoningTokens(BaseModel):
    """Number of completion tokens that are reasoning."""

    reasoning_tokens: int


class CacheMissReply(BaseModel):
    """Reason why a part of the prompt was not found in the prefix cache."""

    reason: str = Field(json_schema_extra={"enum": [*MISS_REASONS]})
    from_token: int = doc("Prompt token from which on the reason holds.", 0)
    evicted_s: float | None = doc("Seconds since the eviction.")
    tier: str | None = doc("Last tier that had the blocks: device, host or disk.")
    why: str | None = doc("Why prefix caching is off.")
    text: str | None = doc("Text of the prompt around from_token, if an earlier prompt differs there.")


class TimelineReply(BaseModel):
    """Timings in milliseconds and token counts of a request, returned if it has the header
    `x-request-timeline: 1`. `step_share_ms` is its share of the engine steps that it was part of."""

    total_ms: float
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    preempted_ms: float
    num_preemptions: int
    cached_tokens: int
    step_share_ms: float
    draft_tokens: int
    accepted_tokens: int
    cached_tokens_from_host: int
    cached_tokens_from_disk: int
    cache_miss: CacheMissReply | None = doc(
        "Why a part of the prompt was not in the prefix cache; null if all of it was that could be."
    )


class UsageReply(BaseModel):
    """Numbers of prompt and completion tokens."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens_details: ReasoningTokens | None = None
    timeline: TimelineReply | None = None


class PromptLogprob(BaseModel):
    """Logprob of a token at one position of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class TopLogprob(BaseModel):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """Logprob of the token at a position of the output, with the most likely tokens there."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Logprobs of a chat choice, one entry per output token."""

    content: list[TokenLogprob]


class CalledFunction(BaseModel):
    """Name of a called function, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A tool call of the model."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(BaseModel):
    """The message that the model generated."""

    role: str
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None


RoutedExperts = Annotated[
    str, Field(description="With --enable-return-routed-experts: an array in numpy's format, in base64.")
]


class ChatChoice(BaseModel):
    """One choice of a chat completion."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | None
    routed_experts: RoutedExperts | None = None


class RequestMetrics(BaseModel):
    """Timings of a request, in milliseconds; only with --enable-per-request-metrics."""

    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    queue_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None


class ChatReply(BaseModel):
    """Response of /v1/chat/completions, not streamed."""

    id: str = Field(examples=["chatcmpl-1f3b"])
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: None = None
    system_fingerprint: str | None
    usage: UsageReply
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    prompt_text: str | None
    kv_transfer_params: dict[str, Any] | None = None
    metrics: RequestMetrics | None


class CompletionLogprobs(BaseModel):
    """Logprobs of a completion: lists with one entry per token; `text_offset` is in characters."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(BaseModel):
    """One choice of a completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None
    routed_experts: RoutedExperts | None = None


class CompletionReply(BaseModel):
    """Response of /v1/completions, not streamed."""

    id: str = Field(examples=["cmpl-1f3b"])
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: None = None
    system_fingerprint: str | None
    usage: UsageReply
    kv_transfer_params: dict[str, Any] | None = None
    metrics: RequestMetrics | None


class ModelCardReply(BaseModel):
    """A served model or LoRA adapter, under one of its names."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str | None
    parent: str | None
    max_model_len: int
    permission: list[dict[str, Any]]


class ModelList(BaseModel):
    """All served models and LoRA adapters, by name."""

    object: Literal["list"]
    data: list[ModelCardReply]


class TokenizeReply(BaseModel):
    """Response of /tokenize: the token ids (`tokens`) and their number."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


DetokenizeReply = reply_model("DetokenizeReply", "Response of /detokenize.", prompt=str)
LoadReply = reply_model("LoadReply", "Number of running requests.", server_load=int)
VersionReply = reply_model("VersionReply", "The version.", version=str)
ResetReply = reply_model("ResetReply", "Whether the prefix cache is empty now.", success=bool)
