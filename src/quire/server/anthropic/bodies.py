"""Request and reply bodies of /v1/messages."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, JsonValue, Tag

from quire.data.params import INT64_MAX, INT64_MIN
from quire.server.openai.replies import reply_model
from quire.server.openai.requests import (
    EXTRA_ARGS,
    SESSION_ID,
    Body,
    CacheControl,
    EngineBody,
    ExtraArgs,
    Many,
    Some,
    TokenId,
    doc,
)

# ---- requests


class CachedBlock(Body):
    """A part of a prompt that may carry a `cache_control`."""

    cache_control: CacheControl | None = doc("Hint that the prompt will be used again.")


class TextBlock(CachedBlock):
    """A content block with text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    """A content block with reasoning that the model generated before an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = doc("Has no effect.")


class RedactedBlock(Body):
    """A content block with encrypted reasoning, which is ignored."""

    type: Literal["redacted_thinking"]
    data: str | None = None


class ToolUseBlock(CachedBlock):
    """A content block with an earlier tool call of the model."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, JsonValue]


class ImageSource(Body):
    """The data or the URL of an image."""

    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str | None = doc("The file, with type `base64`.")
    url: str | None = doc("The address, with type `url`.")


class ImageBlock(CachedBlock):
    """An image, for multimodal models."""

    type: Literal["image"]
    source: ImageSource


_KINDS = frozenset({"text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result"})


class OtherBlock(Body):
    """A content block of an unsupported type; requests with one are refused."""

    type: str = Field(json_schema_extra={"not": {"enum": [*sorted(_KINDS)]}})


def _kind(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return kind if isinstance(kind, str) and kind in _KINDS else "other"


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[OtherBlock, Tag("other")],
    Discriminator(lambda block: kind if (kind := _kind(block)) in ("text", "image") else "other"),
]


class ToolResultBlock(CachedBlock):
    """A content block with the result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Many[ResultBlock] | None = None
    is_error: bool | None = doc("Passed to the chat template with the message.")


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[OtherBlock, Tag("other")],
    Discriminator(_kind),
]


class MessageBody(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Many[Block]


class MessageTool(CachedBlock):
    """A tool that the model may call."""

    type: str | None = doc("`custom`; server-side tools are rejected.")
    name: str
    description: str | None = None
    input_schema: dict[str, JsonValue] | None = doc("JSON schema of the input.")
    strict: bool | None = None


class MessageToolChoice(Body):
    """The tools that the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = doc("Name of the tool, with type `tool`.")
    disable_parallel_tool_use: bool | None = False


class Thinking(Body):
    """Whether the model thinks before it answers, and how long."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = doc("Needs --reasoning-parser.", ge=0, le=INT64_MAX)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    """A JSON schema for the output."""

    type: Literal["json_schema"]
    schema_: dict[str, JsonValue] = Field(alias="schema")


class OutputConfig(Body):
    """Settings of the output: the reasoning effort, and a JSON schema."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = doc(
        "Passed to the chat template as `reasoning_effort`."
    )
    format: OutputFormat | None = None


class CountBody(EngineBody):
    """The body of /v1/messages/count_tokens."""

    messages: Some[MessageBody] = Field(examples=[[{"role": "user", "content": "Hello!"}]])
    system: str | Many[TextBlock] | None = None
    tools: Many[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = doc("Older name of output_config.format.")
    cache_control: CacheControl | None = doc("Hint that the whole prompt will be used again.")
    chat_template: str | None = doc("Needs --trust-request-chat-template.")
    chat_template_kwargs: dict[str, JsonValue] | None = doc("Variables of the chat template.")


class MessagesBody(CountBody):
    """The body of /v1/messages."""

    max_tokens: int = Field(gt=0, le=INT64_MAX)
    stop_sequences: Many[str] | None = doc("At most 64 strings.")
    stream: bool | None = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, JsonValue] | None = doc("Has no effect.")
    service_tier: str | None = doc("Has no effect.")

    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)
    min_tokens: int | None = None
    ignore_eos: bool | None = False
    stop_token_ids: Many[TokenId] | None = None
    structured_outputs: dict[str, JsonValue] | None = None
    session_id: str | None = doc(SESSION_ID)
    vllm_xargs: ExtraArgs | None = doc(EXTRA_ARGS)
    kv_transfer_params: dict[str, JsonValue] | None = doc(
        "For prefill and decode in different engines (docs/disaggregation.md): the field of vLLM's proxies."
    )


# ---- replies


class MessageErrorInfo(BaseModel):
    """Type and message of an error."""

    type: str = Field(examples=["invalid_request_error"])
    message: str


class MessageErrorReply(BaseModel):
    """The body of every error."""

    type: Literal["error"]
    error: MessageErrorInfo


class CreatedTokens(BaseModel):
    """Numbers of prompt tokens added to the prefix cache, by the `ttl` (5m or 1h) of `cache_control`."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(BaseModel):
    """Token counts. The length of the prompt is the sum of `input_tokens`, `cache_read_input_tokens` and
    `cache_creation_input_tokens`."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    cache_creation: CreatedTokens | None = doc("Only with `cache_control` in the request.")


class ReplyText(BaseModel):
    """Text of an answer."""

    type: Literal["text"]
    text: str
    citations: None = None


class ReplyThinking(BaseModel):
    """Reasoning of the model."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ReplyToolUse(BaseModel):
    """A tool that the model calls."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageReply(BaseModel):
    """A whole answer of /v1/messages."""

    id: str = Field(examples=["msg_1f3b"])
    type: Literal["message"]
    role: str
    model: str
    content: list[ReplyText | ReplyThinking | ReplyToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage
    kv_transfer_params: dict[str, Any] | None = doc("Only if the engine keeps the prefix for another one.")


CountReply = reply_model("CountReply", "The answer of /v1/messages/count_tokens.", input_tokens=int)
