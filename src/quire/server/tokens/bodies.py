"""The bodies of the routes that know tokens only, and of those that make them of chats and completions and
back: what clients send and, for the document, what they get."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from quire.data.params import INT64_MAX
from quire.server.openai.replies import ChatLogprobs, FinishReason, PromptLogprobs, UsageReply
from quire.server.openai.requests import (
    ChatBody,
    CompletionBody,
    EngineBody,
    Many,
    Message,
    Some,
    StreamOptions,
    TokenId,
    Unbuilt,
)

# ---- what clients send


class TokensBody(EngineBody):
    """The body of /inference/v1/generate."""

    token_ids: Some[TokenId] = Field(examples=[[1, 2, 3]])
    sampling_params: dict[str, JsonValue] = Field(
        description="The fields of SamplingParams. Default of max_tokens: what fits.",
        examples=[{"max_tokens": 8}],
    )
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    prompt: str | None = Field(None, description="The text of the tokens; has no effect.")
    features: Unbuilt | None = Field(None, description="Not supported yet.")
    kv_transfer_params: dict[str, JsonValue] | None = Field(
        None, description="Has no effect: nothing is transferred."
    )
    ec_transfer_params: dict[str, Unbuilt] | None = Field(None, description="Not supported yet.")


class DerenderPart(BaseModel):
    """A part of what the server sent, as it comes back."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)


class DerenderTopLogprob(DerenderPart):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float
    bytes: Many[Annotated[int, Field(ge=0, le=255)]] | None


class DerenderLogprob(DerenderTopLogprob):
    """The token that was chosen, and the likeliest beside it."""

    top_logprobs: Many[DerenderTopLogprob]


class DerenderLogprobs(DerenderPart):
    """Logprobs of an answer."""

    content: Many[DerenderLogprob]


class DerenderChoice(DerenderPart):
    """One answer, in tokens."""

    index: int = Field(ge=0, le=INT64_MAX)
    logprobs: DerenderLogprobs | None = None
    finish_reason: FinishReason | None = "stop"
    token_ids: Many[TokenId] | None = None


class DerenderTokens(DerenderPart):
    """An answer of /inference/v1/generate."""

    choices: Many[DerenderChoice]


NumTokens = Annotated[int, Field(ge=0, le=INT64_MAX)]


class DerenderChatBody(EngineBody):
    """The body of /v1/chat/completions/derender."""

    stream: bool | None = Field(False, description="Only whole answers can be derendered.")
    generate_response: DerenderTokens
    prompt_tokens: NumTokens | None = Field(None, description="For the usage. Default: 0.")
    chat_request: ChatBody | None = Field(
        None, description="What was rendered: says how the answer is read. Without it all is text."
    )


class DerenderCompletionBody(EngineBody):
    """The body of /v1/completions/derender."""

    stream: bool | None = Field(False, description="Only whole answers can be derendered.")
    generate_responses: Some[DerenderTokens] = Field(description="One for each prompt.")
    prompt_tokens: Many[NumTokens] | None = Field(None, description="Of each prompt. Default: 0.")
    completion_request: CompletionBody | None = Field(None, description="What was rendered.")


class ChatBatchBody(ChatBody):
    """The body of /v1/chat/completions/batch: whole answers of one choice each."""

    messages: Some[Some[Message]] = Field(  # type: ignore[assignment]
        description="Conversations.",
        examples=[[[{"role": "user", "content": "Hello!"}], [{"role": "user", "content": "Bye!"}]]],
    )


# ---- what they get


class TokensChoice(BaseModel):
    """One answer, in tokens."""

    index: int
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int]


class TokensReply(BaseModel):
    """A whole answer of /inference/v1/generate."""

    request_id: str = Field(examples=["generate-tokens-1f3b"])
    model: str
    created: int
    choices: list[TokensChoice]
    usage: UsageReply
    prompt_logprobs: PromptLogprobs | None
    kv_transfer_params: None = None


class RenderedReply(BaseModel):
    """A prompt and what is asked of it, as /inference/v1/generate takes them."""

    request_id: str
    token_ids: list[int]
    token_offsets: list[tuple[int, int]] | None = Field(
        description="With return_token_offsets: where in `prompt` each token begins and ends, in characters;"
        " null where the prompt came as tokens, was cut, or has media."
    )
    prompt: str | None
    sampling_params: dict[str, Any]
    model: str
    stream: bool
    stream_options: StreamOptions | None
    cache_salt: str | None
    priority: int
    features: dict[str, Any] | None = Field(description="Where media are, and what they are known by.")
    kv_transfer_params: None
