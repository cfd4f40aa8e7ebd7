"""The request body and the replies of /v1/responses."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BaseModel, Field, JsonValue, WithJsonSchema

from quire.server.openai.replies import TimelineReply, TokenLogprob
from quire.server.openai.requests import Body, GenerateBody, Many, Unsupported, doc

LOGPROBS = "message.output_text.logprobs"
Included = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


def _check_texts(values: dict[str, Any]) -> dict[str, Any]:
    invalid_name = next((name for name, value in values.items() if not isinstance(value, str)), None)
    if invalid_name is not None:
        raise ValueError(f"{invalid_name!r:.80} should be a string")
    return values


Texts = Annotated[
    dict[str, Any],
    AfterValidator(_check_texts),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "string"}}),
]
"""Type of a field that maps names to strings. Only the first wrong value is reported."""


class TextConfig(Body):
    """Format of the response's text."""

    format: dict[str, JsonValue] | None = doc(
        "An object of type text, json_object or json_schema (`name`, `schema`, `strict`)."
    )
    verbosity: Literal["low", "medium", "high"] | None = doc("Has no effect.")


class ReasoningConfig(Body):
    """The field `reasoning` of a request: how much the model reasons before it answers."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = doc(
        "Passed to the chat template."
    )
    summary: Literal["auto", "concise", "detailed"] | None = doc(
        "Has no effect: reasoning is returned unabridged, in items of type reasoning."
    )


class ResponseBody(GenerateBody):
    """The body of /v1/responses. Fields shared with chat completions have the same meaning."""

    input: str | Many[dict[str, JsonValue]] = Field(
        description="A text, or items: messages, function calls and their outputs, reasoning, references.",
        examples=["Hello!"],
    )
    instructions: str | None = doc("The system message. It is not carried over to later responses.")
    previous_response_id: str | None = doc("Continue the conversation after this response. Needs the store.")
    store: bool | None = doc("Store the response. Has no effect if the server has no store.", True)
    background: bool | None = doc("Return at once and generate in the background. Needs the store.", False)
    max_output_tokens: int | None = doc(
        "Includes reasoning tokens. Default: as many as fit the model's context. Also as `max_tokens`.",
        validation_alias=AliasChoices("max_output_tokens", "max_tokens"),
        json_schema_extra={"minimum": 1},
    )
    max_tool_calls: int | None = doc("Has no effect: there are no built-in tools.")
    tools: Many[dict[str, JsonValue]] | None = doc("Functions: type, name, description, parameters.")
    tool_choice: Literal["none", "auto", "required"] | dict[str, JsonValue] | None = doc(
        "Or an object of type function (`name`) or allowed_tools (`mode`, `tools`)."
    )
    parallel_tool_calls: bool | None = True
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Many[Included] | None = doc(f"Only {LOGPROBS} has an effect.")
    top_logprobs: int | None = doc(
        f"Best tokens at each position; needs {LOGPROBS} in `include`.", json_schema_extra={"minimum": 0}
    )
    truncation: Literal["auto", "disabled"] | None = doc(
        "auto: a prompt that is too long is truncated from the left.", "disabled"
    )
    metadata: Texts | None = doc("Returned unchanged with the response.")
    service_tier: str | None = doc("Has no effect.")
    safety_identifier: str | None = doc("Has no effect.")
    chat_template: str | None = doc("Needs --trust-request-chat-template.")
    chat_template_kwargs: dict[str, JsonValue] | None = doc("Variables of the chat template.")

    conversation: Unsupported | None = doc("Not supported.")
    prompt: Unsupported | None = doc("Not supported.")
    context_management: Unsupported | None = doc("Not supported.")
    moderation: Unsupported | None = doc("Not supported.")

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())


Status = Literal["completed", "incomplete", "in_progress"]


class OutputText(BaseModel):
    """A content part of a message: its text."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(BaseModel):
    """An output item: a message of the model."""

    id: str = Field(examples=["msg_1f3b"])
    type: Literal["message"]
    status: Status
    role: str
    content: list[OutputText]


class ReasoningText(BaseModel):
    """A content part of a reasoning item: its text."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(BaseModel):
    """An output item: reasoning of the model."""

    id: str = Field(examples=["rs_1f3b"])
    type: Literal["reasoning"]
    status: Status
    summary: list[Any]
    encrypted_content: None
    content: list[ReasoningText]


class OutputCall(BaseModel):
    """An output item: a function call of the model."""

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
    """Numbers of input tokens that were found in the prefix cache and that were added to it."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(BaseModel):
    """Number of output tokens that are reasoning."""

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
    kv_transfer_params: dict[str, Any] | None = doc("Only if the engine keeps the prefix for another one.")


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
