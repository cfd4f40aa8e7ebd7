"""Request bodies. Types are strict, except that 5.0 is a valid integer, as in JSON schema. Ranges are only
documented here; SamplingParams checks them."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, WithJsonSchema

from quire.data.cache_hints import MAX_NAME_CHARS
from quire.data.params import INT64_MAX, INT64_MIN, MAX_PATTERN_SIZE, MAX_SALT_CHARS, MAX_STOP_TOKEN_IDS

MAX_STOP_STRINGS = 4
MAX_PROMPTS = 1024


def _ranged(low: float | None = None, high: float | None = None, text: str = "") -> Any:
    """Return a field with a documented range, which SamplingParams enforces."""
    bounds = {"minimum": low, "maximum": high}
    extra: dict[str, JsonValue] = {name: bound for name, bound in bounds.items() if bound is not None}
    return Field(default=None, description=text or None, json_schema_extra=extra)


def doc(text: str, default: Any = None, **rules: Any) -> Any:
    """Return an optional field with a description."""
    return Field(default=default, description=text, **rules)


Int = Annotated[int, BeforeValidator(lambda x: int(x) if isinstance(x, float) and x.is_integer() else x)]
T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]
"""A list for which only the first invalid item is reported, since an error takes hundreds of times the
item's memory."""
Some = Annotated[Many[T], Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0, le=INT64_MAX)]
Biases = Annotated[
    dict[str, Any], WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}})
]
"""Logit biases by token id. SamplingParams checks them, and stops at the first invalid one."""
Unsupported = JsonValue
"""Type of the field of an unsupported feature: any value but null is answered with 400."""


class Body(BaseModel):
    """Base of all bodies. Unknown fields are accepted and have no effect; the top-level ones are logged."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(Body):
    """Options of a streamed response."""

    include_usage: bool | None = doc("End the stream with a chunk that has the usage.", False)
    continuous_usage_stats: bool | None = doc("With include_usage: report usage in every chunk.", False)


SentOptions = Annotated[
    StreamOptions | None, AfterValidator(lambda sent: sent if sent and sent.model_fields_set else None)
]
"""Stream options of a body; an empty object counts as none."""


class RepetitionDetection(BaseModel):
    """Rule to end a sequence that repeats itself: when its last tokens are `min_count` copies of one pattern
    of `min_pattern_size` to `max_pattern_size` tokens. The rule is off if `max_pattern_size` is 0."""

    model_config = ConfigDict(strict=True, extra="forbid")

    max_pattern_size: int = Field(0, ge=0, json_schema_extra={"maximum": MAX_PATTERN_SIZE})
    min_pattern_size: int = Field(0, ge=0, json_schema_extra={"maximum": MAX_PATTERN_SIZE})
    min_count: int = Field(0, ge=0, le=INT64_MAX)


class CacheControl(Body):
    """Hint that the prompt will be used again within `ttl`, so that its prefix should stay in the cache; as
    in Anthropic's API."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = "5m"


class CallBody(Body):
    """Fields that the bodies of all routes that run the model share."""

    model: str | None = doc("One of the served names. Default: the first of them.")
    priority: Int = doc("Lower goes first, with --scheduling-policy priority.", 0, ge=INT64_MIN, le=INT64_MAX)
    request_id: str | None = doc(
        "Part of the id, at most 256 printable characters; the header X-Request-Id takes precedence."
    )
    slo_ttft_ms: float | None = doc(
        "A later target than that of the server or the key (docs/targets.md).", gt=0, le=1e9
    )
    slo_itl_ms: float | None = doc("A later target than that of the server or the key.", gt=0, le=1e9)
    user: str | None = doc("Has no effect.")


class EngineBody(CallBody):
    """Fields that the bodies of all routes with a prompt share: truncation and cache salt."""

    truncate_prompt_tokens: Int | None = doc(
        "Truncate the prompt to this many tokens; -1: to what fits in max_model_len.", ge=-1, le=INT64_MAX
    )
    truncation_side: Literal["left", "right"] | None = doc(
        "The side to truncate. Default: left; right for a pooling model."
    )
    cache_salt: str | None = doc(
        f"At most {MAX_SALT_CHARS} characters. Shares cached prefixes only with requests of the same salt.",
        min_length=1,
        max_length=MAX_SALT_CHARS,
    )


ExtraArgs = dict[str, str | int | float | Many[str | int | float]]
EXTRA_ARGS = "Arguments of custom logits processors, as `extra_args` of their sampling parameters."
SESSION_ID = (
    f"Name of the conversation, at most {MAX_NAME_CHARS} printable characters. Its cached blocks are evicted"
    " later, and all of its requests go to the same engine. Or the header X-Session-ID."
)
"""Descriptions of the fields `vllm_xargs` and `session_id`."""


class GenerateBody(EngineBody):
    """Fields that chat completions, completions and responses share, such as sampling parameters."""

    n: Int | None = _ranged(1, None, "Choices per prompt; with use_beam_search the number of beams.")
    temperature: float | None = _ranged(0, 2, "0 is greedy.")
    top_p: float | None = _ranged(0, 1)
    top_k: Int | None = _ranged(-1, None, "0 and -1 are off.")
    min_p: float | None = _ranged(0, 1)
    presence_penalty: float | None = _ranged(-2, 2)
    frequency_penalty: float | None = _ranged(-2, 2)
    repetition_penalty: float | None = _ranged(0)
    length_penalty: float | None = _ranged(-16, 16, "Exponent of the length in the scores of beam search.")
    logit_bias: Biases | None = doc("Token id to bias, from -100 to 100.")
    seed: Int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)
    stop: str | Many[str] | None = doc(f"At most {MAX_STOP_STRINGS} strings.")
    stop_token_ids: Many[TokenId] | None = doc(f"At most {MAX_STOP_TOKEN_IDS} ids of the model's vocabulary.")
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = False
    min_tokens: Int | None = _ranged(0)
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    allowed_token_ids: Many[TokenId] | None = None
    bad_words: Many[str] | None = None
    prompt_logprobs: Int | None = _ranged(-1, None, "Number of top logprobs per prompt position.")
    logprob_token_ids: Many[TokenId] | None = None
    repetition_detection: RepetitionDetection | None = None
    response_format: dict[str, JsonValue] | None = doc(
        "Format of the output: type text, json_object, json_schema or structural_tag."
    )
    structured_outputs: dict[str, JsonValue] | None = doc(
        "Constraint of the output, one of: json, regex, choice, grammar, json_object, structural_tag."
    )
    stream_interval: Int | None = _ranged(1, None, "Tokens between two chunks of a stream.")
    use_beam_search: bool | None = False
    echo: bool | None = doc("Begin the output with the prompt (chat: with the last message).", False)
    stream: bool | None = False
    stream_options: SentOptions = None
    return_token_ids: bool | None = False
    return_token_offsets: bool | None = doc(
        "For the routes that end in /render: the start and end of each token in the prompt's text.", False
    )
    return_tokens_as_token_ids: bool | None = doc("Show tokens in logprobs as `token_id:ID`.")
    session_id: str | None = doc(SESSION_ID)
    prompt_cache_key: str | None = doc("Has the effect of session_id, which takes precedence.")
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = doc(
        "How long the cached blocks are evicted later: in_memory stands for 10 minutes, the default with a"
        " prompt_cache_key or session_id."
    )
    cache_control: CacheControl | None = doc("Time for which the cached blocks are evicted later.")

    thinking_token_budget: Int | None = _ranged(
        -1, None, "Maximum reasoning tokens; needs --reasoning-parser. -1: no limit."
    )
    routed_experts_prompt_start: Int | None = _ranged(
        0, None, "First prompt token in `routed_experts`, with --enable-return-routed-experts. Default: 0."
    )
    kv_transfer_params: dict[str, JsonValue] | None = doc(
        "For prefill and decode in different engines (docs/disaggregation.md): the field of vLLM's proxies."
    )
    vllm_xargs: ExtraArgs | None = doc(EXTRA_ARGS)


def _as_part(sent: Any) -> Any:
    return {"type": "text", "text": sent} if isinstance(sent, str) else sent


Part = Annotated[
    dict[str, JsonValue], BeforeValidator(_as_part, json_schema_input_type=dict[str, JsonValue] | str)
]
"""Part of the content of a message; a string is a text part."""


class Message(Body):
    """One message of a conversation."""

    role: str
    content: str | Many[Part] | None = doc(
        "Text, or parts: strings, or objects of type text and, for multimodal models, image_url,"
        " video_url, audio_url, input_audio and others."
    )
    name: str | None = None
    tool_calls: Many[dict[str, JsonValue]] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """Return the content if it is one text, else an empty string."""
        return self.content if isinstance(self.content, str) else ""


class MediaBody(Body):
    """Options for images, videos and audio."""

    mm_processor_kwargs: dict[str, JsonValue] | None = doc("Arguments of the model's multimodal processor.")
    media_io_kwargs: dict[str, JsonValue] | None = doc(
        'Options of decoding media, by modality, such as {"video": {"num_frames": 16}}.'
    )


class ConversationBody(MediaBody):
    """Messages, and options of the chat template."""

    messages: Some[Message] = Field(examples=[[{"role": "user", "content": "Hello!"}]])
    add_generation_prompt: bool = True
    continue_final_message: bool = doc("Continue the last message instead of answering it.", False)
    add_special_tokens: bool = doc("Add the tokenizer's special tokens to those of the template.", False)
    documents: Many[dict[str, JsonValue]] | None = doc("Documents for chat templates that use them.")
    chat_template: str | None = doc("Needs --trust-request-chat-template.")
    chat_template_kwargs: dict[str, JsonValue] | None = doc("Variables of the chat template.")
    tools: Many[dict[str, JsonValue]] | None = doc("Functions that the model may call.")


class ChatBody(GenerateBody, ConversationBody):
    """The body of /v1/chat/completions."""

    max_tokens: Int | None = _ranged(1)
    max_completion_tokens: Int | None = _ranged(
        1, None, "Takes precedence over max_tokens. Default: up to max_model_len."
    )
    logprobs: bool | None = False
    top_logprobs: Int | None = _ranged(-1, None, "Needs logprobs; -1: the whole vocabulary.")
    tool_choice: Literal["none", "auto", "required"] | dict[str, JsonValue] | None = doc(
        "`auto`, which needs a tool parser, is the default with tools; else `none`."
    )
    parallel_tool_calls: bool | None = doc("false: at most one tool call per choice.", True)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = doc(
        "Passed to the chat template."
    )
    include_reasoning: bool | None = doc("false: omit the reasoning from the response.", True)
    return_prompt_text: bool | None = False

    @property
    def num_requested(self) -> int | None:
        """Return the maximum number of output tokens, if the body sets it."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


Prompts = str | Some[TokenId] | Some[str] | Some[Many[TokenId]]


class CompletionBody(GenerateBody):
    """The body of /v1/completions."""

    prompt: Prompts | None = doc(
        f"A text, token ids, or up to {MAX_PROMPTS} of either.", examples=["Once upon a time"]
    )
    max_tokens: Int | None = _ranged(0, None, "Default: 16. 0 is allowed with echo.")
    logprobs: Int | None = _ranged(-1, None, "Number of top logprobs per position; -1: the whole vocabulary.")
    add_special_tokens: bool = True
    suffix: str | None = doc("Not supported.")
    prompt_embeds: str | Many[str] | None = doc(
        "Prompt embeddings: one or several tensors [tokens, hidden size] saved by torch.save, in base64."
        " Needs --enable-prompt-embeds. Their choices come before those of `prompt`."
    )

    @property
    def returns_prompt_only(self) -> bool:
        """Whether only the prompt is returned; the engine still generates one token, which is dropped."""
        return bool(self.echo) and self.max_tokens == 0


class TokenizeText(Body):
    """The body of /tokenize for a text."""

    model: str | None = None
    prompt: str = Field(examples=["Hello!"])
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChat(ConversationBody):
    """The body of /tokenize for a conversation."""

    model: str | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, JsonValue] | None = doc(
        "`none`: the tools may be omitted from the prompt, as in a chat."
    )
    reasoning_effort: str | None = doc("Passed to the chat template.")
    return_token_strs: bool | None = False


class DetokenizeBody(Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Many[TokenId] = Field(examples=[[1, 2, 3]])
