"""The bodies that clients send. Types are strict here, but that 5.0 is an integer, as JSON schemas have it;
ranges are told here and checked by SamplingParams."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, WithJsonSchema

from quire.data.params import (
    INT64_MAX,
    INT64_MIN,
    MAX_PATTERN_SIZE,
    MAX_SALT_CHARS,
    MAX_STOP_TOKEN_IDS,
)

MAX_STOP_STRINGS = 4
MAX_PROMPTS = 1024


def _told(low: float | None = None, high: float | None = None, text: str = "") -> Any:
    """A field whose range is in the document here and enforced by SamplingParams."""
    bounds = {"minimum": low, "maximum": high}
    extra: dict[str, JsonValue] = {name: bound for name, bound in bounds.items() if bound is not None}
    return Field(default=None, description=text or None, json_schema_extra=extra)


def _doc(text: str, default: Any = None, **rules: Any) -> Any:
    return Field(default=default, description=text, **rules)


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_whole)]
T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]
"""Of many wrong items one is told: an error costs hundreds of times the bytes that it came in."""
Some = Annotated[Many[T], Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0, le=INT64_MAX)]
Biases = Annotated[
    dict[str, Any], WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}})
]
"""Checked by SamplingParams, which stops at the first that is wrong."""
Unbuilt = JsonValue
"""A field of a feature that does not exist here: any value but null is answered with 400."""


class Body(BaseModel):
    """Fields that a model does not name are accepted and have no effect."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(Body):
    """What a stream tells beside its text."""

    include_usage: bool | None = _doc("End the stream with a chunk that counts tokens.", False)
    continuous_usage_stats: bool | None = _doc("With include_usage: count in every chunk.", False)


class RepetitionDetection(BaseModel):
    """When a sequence that repeats itself is ended."""

    model_config = ConfigDict(strict=True, extra="forbid")

    max_pattern_size: int = Field(0, ge=0, json_schema_extra={"maximum": MAX_PATTERN_SIZE})
    min_pattern_size: int = Field(0, ge=0, json_schema_extra={"maximum": MAX_PATTERN_SIZE})
    min_count: int = Field(0, ge=0, le=INT64_MAX)


class CallBody(Body):
    """What every call of the engine may say."""

    model: str | None = _doc("One of the served names. Default: the first of them.")
    priority: Int = _doc(
        "Lower goes first, with --scheduling-policy priority.", 0, ge=INT64_MIN, le=INT64_MAX
    )
    request_id: str | None = _doc(
        "At most 256 printable characters, a part of the id; the header X-Request-Id wins."
    )
    user: str | None = _doc("Has no effect.")


class EngineBody(CallBody):
    """What every request with a prompt of its own may say."""

    truncate_prompt_tokens: Int | None = _doc(
        "Cut the prompt to this many tokens; -1: to what fits.", ge=-1, le=INT64_MAX
    )
    truncation_side: Literal["left", "right"] | None = _doc(
        "The side to cut from. Default: left; of a pooling model right."
    )
    cache_salt: str | None = _doc(
        f"At most {MAX_SALT_CHARS} characters. Shares cached prefixes only with requests of the same salt.",
        min_length=1,
        max_length=MAX_SALT_CHARS,
    )


class GenerateBody(EngineBody):
    """What chat and plain completions have in common."""

    n: Int | None = _told(1, None, "Answers per prompt; with use_beam_search the number of beams.")
    temperature: float | None = _told(0, 2, "0 is greedy.")
    top_p: float | None = _told(0, 1)
    top_k: Int | None = _told(-1, None, "0 and -1 are off.")
    min_p: float | None = _told(0, 1)
    presence_penalty: float | None = _told(-2, 2)
    frequency_penalty: float | None = _told(-2, 2)
    repetition_penalty: float | None = _told(0)
    length_penalty: float | None = _doc("How beam search weighs the length of beams.")
    logit_bias: Biases | None = _doc("Token id to bias, from -100 to 100.")
    seed: Int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)
    stop: str | Many[str] | None = _doc(f"At most {MAX_STOP_STRINGS} strings.")
    stop_token_ids: Many[TokenId] | None = _doc(
        f"At most {MAX_STOP_TOKEN_IDS} ids, all of the model's vocabulary."
    )
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = False
    min_tokens: Int | None = _told(0)
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    allowed_token_ids: Many[TokenId] | None = None
    bad_words: Many[str] | None = None
    prompt_logprobs: Int | None = _told(-1, None, "Best tokens at each position of the prompt.")
    logprob_token_ids: Many[TokenId] | None = None
    repetition_detection: RepetitionDetection | None = None
    response_format: dict[str, JsonValue] | None = _doc(
        "What the answer must look like: type text, json_object, json_schema or structural_tag."
    )
    structured_outputs: dict[str, JsonValue] | None = _doc(
        "The same, with one of: json, regex, choice, grammar, json_object, structural_tag."
    )
    stream_interval: Int | None = _told(1, None, "Tokens between two chunks of a stream.")
    use_beam_search: bool | None = False
    echo: bool | None = _doc("Begin the answer with the prompt (chat: with the last message).", False)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    return_token_offsets: bool | None = _doc(
        "Of the routes that end in /render: where in the prompt's text each token begins and ends.", False
    )
    return_tokens_as_token_ids: bool | None = _doc("Spell tokens in logprobs as `token_id:ID`.")
    session_id: str | None = _doc("Has no effect with one engine.")

    thinking_token_budget: Int | None = _told(
        -1, None, "Most tokens of reasoning; needs --reasoning-parser. -1: as many as it takes."
    )
    kv_transfer_params: dict[str, JsonValue] | None = _doc("Has no effect: nothing is transferred.")
    vllm_xargs: dict[str, str | float | Many[str | float]] | None = _doc(
        "For extensions, of which there are none: has no effect."
    )


class Message(Body):
    """One turn of a conversation."""

    role: str
    content: str | Many[dict[str, JsonValue]] | None = _doc(
        "Text, or parts: of type text, and for models that take them image_url, video_url, audio_url,"
        " input_audio and the like."
    )
    name: str | None = None
    tool_calls: Many[dict[str, JsonValue]] | None = None
    tool_call_id: str | None = None


class MediaBody(Body):
    """How images, videos and sounds are read."""

    mm_processor_kwargs: dict[str, JsonValue] | None = _doc("Arguments of the model's processor of media.")
    media_io_kwargs: dict[str, JsonValue] | None = _doc(
        'How media are read, by modality, such as {"video": {"num_frames": 16}}.'
    )


class ConversationBody(MediaBody):
    """How messages become a prompt."""

    messages: Some[Message] = Field(examples=[[{"role": "user", "content": "Hello!"}]])
    add_generation_prompt: bool = True
    continue_final_message: bool = _doc("Go on with the last message instead of answering it.", False)
    add_special_tokens: bool = _doc("Add the tokenizer's own tokens to those of the template.", False)
    documents: Many[dict[str, JsonValue]] | None = _doc("For templates that show documents.")
    chat_template: str | None = _doc("Needs --trust-request-chat-template.")
    chat_template_kwargs: dict[str, JsonValue] | None = _doc("Variables of the chat template.")
    tools: Many[dict[str, JsonValue]] | None = _doc("Functions that the model is shown, and may call.")


class ChatBody(GenerateBody, ConversationBody):
    """The body of /v1/chat/completions."""

    max_tokens: Int | None = _told(1)
    max_completion_tokens: Int | None = _told(1, None, "Wins over max_tokens. Default: what fits.")
    logprobs: bool | None = False
    top_logprobs: Int | None = _told(-1, None, "Needs logprobs; -1: the whole vocabulary.")
    tool_choice: Literal["none", "auto", "required"] | dict[str, JsonValue] | None = _doc(
        "`auto`, which needs --enable-auto-tool-choice, is the default with tools; else `none`."
    )
    parallel_tool_calls: bool | None = _doc("Off: at most one call in an answer.", True)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = _doc(
        "Passed to the chat template."
    )
    include_reasoning: bool | None = _doc("Off: reasoning is left out of the answer.", True)
    return_prompt_text: bool | None = False


Prompts = str | Some[TokenId] | Some[str] | Some[Many[TokenId]]


class CompletionBody(GenerateBody):
    """The body of /v1/completions."""

    prompt: Prompts | None = _doc(
        f"A text, token ids, or up to {MAX_PROMPTS} of either.", examples=["Once upon a time"]
    )
    max_tokens: Int | None = _told(0, None, "Default: 16. 0 is allowed with echo.")
    logprobs: Int | None = _told(-1, None, "Best tokens at each position; -1: the whole vocabulary.")
    add_special_tokens: bool = True
    suffix: str | None = _doc("Not supported.")
    prompt_embeds: str | Some[str] | None = _doc(
        "Prompts as vectors: base64 of a tensor [tokens, hidden size] that torch.save has written, or"
        " several. Needs --enable-prompt-embeds. Their choices stand before those of `prompt`."
    )


class TokenizeText(Body):
    """The body of /tokenize for a text."""

    model: str | None = None
    prompt: str = Field(examples=["Hello!"])
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChat(ConversationBody):
    """The body of /tokenize for a conversation."""

    model: str | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, JsonValue] | None = _doc(
        "`none`: the tools may not be shown, as in a chat."
    )
    reasoning_effort: str | None = _doc("Passed to the chat template.")
    return_token_strs: bool | None = False


class DetokenizeBody(Body):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Many[TokenId] = Field(examples=[[1, 2, 3]])
