"""Request and reply bodies of the token, render and derender routes."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from quire.data.params import INT64_MAX
from quire.server.openai.replies import ChatLogprobs, FinishReason, PromptLogprobs, RoutedExperts, UsageReply
from quire.server.openai.requests import (
    ChatBody,
    CompletionBody,
    EngineBody,
    Many,
    Message,
    SentOptions,
    Some,
    StreamOptions,
    TokenId,
    Unsupported,
    doc,
)

# ---- requests


class TokensBody(EngineBody):
    """The body of /inference/v1/generate."""

    token_ids: Some[TokenId] = Field(examples=[[1, 2, 3]])
    sampling_params: dict[str, JsonValue] = Field(
        description="The fields of SamplingParams. Default of max_tokens: as many as fit the context.",
        examples=[{"max_tokens": 8}],
    )
    stream: bool | None = False
    stream_options: SentOptions = None
    prompt: str | None = doc("The text of the tokens; has no effect.")
    features: Unsupported | None = doc("Not supported yet.")
    kv_transfer_params: dict[str, JsonValue] | None = doc(
        "For prefill and decode in different engines (docs/disaggregation.md): the field of vLLM's proxies."
    )
    ec_transfer_params: dict[str, Unsupported] | None = doc("Not supported yet.")


class DerenderPart(BaseModel):
    """Base of the parts of an earlier /inference/v1/generate reply, which a client sends back to have its
    tokens converted to text."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)


class DerenderTopLogprob(DerenderPart):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: Many[Annotated[int, Field(ge=0, le=255)]] | None


class DerenderLogprob(DerenderTopLogprob):
    """Logprob of the sampled token at a position, with the most likely tokens there."""

    top_logprobs: Many[DerenderTopLogprob]


class DerenderLogprobs(DerenderPart):
    """Logprobs of a choice, one entry per generated token."""

    content: Many[DerenderLogprob]


class DerenderChoice(DerenderPart):
    """A choice of the earlier reply: its token ids and logprobs."""

    index: int = Field(ge=0, le=INT64_MAX)
    logprobs: DerenderLogprobs | None = None
    finish_reason: FinishReason | None = "stop"
    token_ids: Many[TokenId] | None = None


class DerenderTokens(DerenderPart):
    """Reply of /inference/v1/generate that is sent back to have its tokens converted to text."""

    choices: Many[DerenderChoice]


NumTokens = Annotated[int, Field(ge=0, le=INT64_MAX)]


class DerenderChatBody(EngineBody):
    """The body of /v1/chat/completions/derender."""

    stream: bool | None = doc("Only whole replies can be derendered.", False)
    generate_response: DerenderTokens
    prompt_tokens: NumTokens | None = doc("For the usage. Default: 0.")
    chat_request: ChatBody | None = doc(
        "The rendered request, which selects the parsers. Without it the output is plain text."
    )


class DerenderCompletionBody(EngineBody):
    """The body of /v1/completions/derender."""

    stream: bool | None = doc("Only whole replies can be derendered.", False)
    generate_responses: Some[DerenderTokens] = Field(description="One for each prompt.")
    prompt_tokens: Many[NumTokens] | None = doc("Tokens of each prompt. Default: 0.")
    completion_request: CompletionBody | None = doc("The rendered request.")


class ChatBatchBody(ChatBody):
    """The body of /v1/chat/completions/batch: whole replies of one choice each."""

    messages: Some[Some[Message]] = Field(  # type: ignore[assignment]
        description="Conversations.",
        examples=[[[{"role": "user", "content": "Hello!"}], [{"role": "user", "content": "Bye!"}]]],
    )


# ---- replies


class TokensChoice(BaseModel):
    """A choice of the reply: its token ids and logprobs."""

    index: int
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int]
    routed_experts: RoutedExperts | None = None
    sampling_mask: list[list[int]] | None = doc(
        "With --return-sampling-mask: the ids that each token could have been."
    )


class TokensReply(BaseModel):
    """The whole reply of /inference/v1/generate."""

    request_id: str = Field(examples=["generate-tokens-1f3b"])
    model: str
    created: int
    choices: list[TokensChoice]
    usage: UsageReply
    prompt_logprobs: PromptLogprobs | None
    kv_transfer_params: dict[str, Any] | None = None


class RenderedReply(BaseModel):
    """A prompt and its parameters, as /inference/v1/generate takes them."""

    request_id: str
    token_ids: list[int]
    token_offsets: list[tuple[int, int]] | None = Field(
        description="With return_token_offsets: first and last character of each token in `prompt`; "
        "null if the prompt was sent as tokens, was truncated, or has media."
    )
    prompt: str | None
    sampling_params: dict[str, Any]
    model: str
    stream: bool
    stream_options: StreamOptions | None
    cache_salt: str | None
    priority: int
    features: dict[str, Any] | None = Field(description="Placeholder positions and hashes of the media.")
    kv_transfer_params: None
