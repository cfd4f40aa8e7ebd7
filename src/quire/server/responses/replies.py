"""Reply models of /v1/responses for the OpenAPI document."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from quire.server.openai.replies import TimelineReply, TokenLogprob

Status = Literal["completed", "incomplete", "in_progress"]


class OutputText(BaseModel):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(BaseModel):
    """A message of the model."""

    id: str = Field(examples=["msg_1f3b"])
    type: Literal["message"]
    status: Status
    role: str
    content: list[OutputText]


class ReasoningText(BaseModel):
    """Text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(BaseModel):
    """Reasoning of the model."""

    id: str = Field(examples=["rs_1f3b"])
    type: Literal["reasoning"]
    status: Status
    summary: list[Any]
    encrypted_content: None
    content: list[ReasoningText]


class OutputCall(BaseModel):
    """A function that the model calls."""

    id: str = Field(examples=["fc_1f3b"])
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str


class ResponseError(BaseModel):
    """The reason why a response failed."""

    code: str
    message: str


class InputDetails(BaseModel):
    """Details of the input tokens."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(BaseModel):
    """Details of the output tokens."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int
    timeline: TimelineReply | None = None


class ResponseReply(BaseModel):
    """A response. The fields that are not listed repeat the request."""

    id: str = Field(examples=["resp_1f3b"])
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    error: ResponseError | None
    incomplete_details: dict[str, str] | None
    usage: ResponseUsage | None
    previous_response_id: str | None
    store: bool
    background: bool


class DeletedReply(BaseModel):
    """Confirmation that a response was deleted."""

    id: str
    object: Literal["response"]
    deleted: bool


class ItemsReply(BaseModel):
    """A page of the input items of a response."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
