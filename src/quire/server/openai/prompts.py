"""Conversion of request bodies to prompts: texts, token ids and conversations, truncated on request."""

import asyncio
import copy
import itertools
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import GeneratorType
from typing import Any, TypeVar

from quire.config.server_sections import ApiSection
from quire.data.lora import LoRARequest
from quire.errors import RequestError
from quire.frontend.chat import chat_prompt, pair_prompt
from quire.frontend.engine import AsyncEngine
from quire.frontend.inputs import InputProcessor, Prompt
from quire.frontend.message_parts import part_media
from quire.frontend.score_inputs import ScoreInputs, sides_prompt
from quire.multimodal.processing import PreparedItem
from quire.server.http.errors import InvalidBody
from quire.server.openai.requests import (
    MAX_PROMPTS,
    CompletionBody,
    ConversationBody,
    EngineBody,
    Message,
    Prompts,
)
from quire.text.chat_template import choose_template

T = TypeVar("T")
Wait = Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]]
PoolingInput = str | list[int] | tuple[str, str] | ScoreInputs
"""A text, token ids, a pair of texts that form one prompt, or one or two lists of content parts."""

_LONG = 8192
"""Characters or token ids from which work runs in a thread, as it would block the event loop for
milliseconds: tokenization of 8,000 characters takes about 5 ms."""
_PROMPT_CHARS = 32
"""Characters that are added to the size of each prompt of a call, for the fixed cost of a prompt."""
_VALUE_CHARS = 16
"""Number of characters that a value other than a text counts as, since it takes as long to handle."""
_EMBEDS = "_embeds"
"""Suffix of the types of content parts that are embeddings."""
_END = object()
_RENDER_S = 1.0
_EMBEDS_CONFLICTS = {
    "echo": "Echo is unsupported with prompt embeds.",
    "truncate_prompt_tokens": "truncate_prompt_tokens is unsupported with prompt embeds.",
    "use_beam_search": "Beam search is unsupported with prompt embeds.",
}
"""Errors by field, for fields that need prompt tokens, which prompt embeddings do not have."""


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run long work in a thread, and short work directly."""
    return work() if size < _LONG else await asyncio.to_thread(work)


@dataclass(frozen=True, slots=True)
class _ParsedChat:
    """A conversation with its media items processed."""

    body: ConversationBody
    messages: list[Mapping[str, Any]]
    prepared: list[PreparedItem]
    size: int
    """Approximate number of characters, plus placeholder tokens of media."""
    text_size: int
    """Approximate number of characters that the chat template handles."""


class PromptReader:
    """Converter of request bodies to prompts. Long bodies are converted in a thread."""

    def __init__(
        self,
        engine: AsyncEngine,
        settings: ApiSection,
        adapter_of: Callable[[str | None], LoRARequest | None] = lambda name: None,
    ) -> None:
        """Create a reader. `adapter_of` returns the adapter of a model name; an adapter may have its own
        tokenizer."""
        self._inputs = engine.inputs
        self._adapter_of = adapter_of
        self._template = engine.facts.chat_template
        self._settings = settings
        self._without_limits = copy.copy(engine.inputs)
        """Input processor without a length limit, for prompts that will be truncated."""
        self._without_limits.max_model_len = sys.maxsize >> 16
        self._without_limits.max_prompt_len = None
        self._without_limits.max_chars = sys.maxsize
        self._without_token_limit = copy.copy(self._without_limits)
        """Input processor with a limit on characters but none on tokens, to count tokens."""
        self._without_token_limit.max_chars = engine.inputs.max_chars

    async def read_completion(self, body: CompletionBody, *, max_sequences: int) -> list[Prompt]:
        prompts = [*_embeds_of(body), *([] if body.prompt in (None, "") else list_prompts(body.prompt))]
        if not prompts:
            raise InvalidBody(
                "Either prompt or prompt_embeds must be provided and non-empty.", param="prompt"
            )
        if len(prompts) > MAX_PROMPTS:
            raise RequestError(
                f"prompt list length {len(prompts)} exceeds the maximum allowed count of {MAX_PROMPTS}",
                param="prompt",
            )
        if len(prompts) * (body.n or 1) > max_sequences:
            raise RequestError(
                f"{len(prompts)} prompts with n={body.n} are {len(prompts) * (body.n or 1)} sequences, and "
                f"one call may ask for at most {max_sequences} (VLLM_MAX_N_SEQUENCES); send fewer at once",
                param="n",
            )

        def read() -> list[Prompt]:
            inputs = self._inputs_for(body)
            parsed = [inputs.parse(prompt, add_special_tokens=body.add_special_tokens) for prompt in prompts]
            return [self._truncate(prompt, body, body.max_tokens or 16) for prompt in parsed]

        return await off_loop(sum(map(_prompt_size, prompts)), read)

    async def read_chat(
        self,
        body: Any,
        num_output: int,
        wait: Wait | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Return the prompt of a chat, with room for `num_output` tokens if it is truncated. `wait` awaits
        slow work and may cancel it; `variables` are those of the chat template, if they are known."""
        chat = await self._parse_chat(body, wait)

        def read() -> Prompt:
            return self._truncate(self._render(chat, self._inputs_for(body), variables), body, num_output)

        return await off_loop(chat.size, read)

    async def read_inputs(
        self,
        named_inputs: Sequence[tuple[str, PoolingInput]],
        body: EngineBody,
        *,
        add_special_tokens: bool = True,
        wait: Wait | None = None,
    ) -> list[Prompt]:
        """Return the prompts of a pooling model. `named_inputs` are pairs of an input's name, which errors
        mention, and the input."""
        with_parts = [(name, value) for name, value in named_inputs if isinstance(value, ScoreInputs)]
        if any(value.items for _, value in with_parts):
            work = self._prepare(with_parts, body)
            await (work if wait is None else wait(work))

        def read() -> list[Prompt]:
            prompts = []
            for name, value in named_inputs:
                with _naming_input(name):
                    prompts.append(self._pooling_prompt(value, body, add_special_tokens))
            return prompts

        size = sum(
            _LONG if isinstance(value, ScoreInputs) else _prompt_size(value) for _, value in named_inputs
        )
        return await off_loop(size, read)

    async def _prepare(self, named_inputs: Sequence[tuple[str, ScoreInputs]], body: Any) -> None:
        """Process the media of the inputs. A query or document that is part of several inputs is processed
        once."""
        for name, value in named_inputs:
            with _naming_input(name):
                self._inputs.media.check(value.items)
        unique = [*{id(side): side for _, value in named_inputs for side in value.sides}.values()]
        prepared_sides = await self._inputs.media.prepare_each(
            [side.items for side in unique],
            getattr(body, "media_io_kwargs", None),
            getattr(body, "mm_processor_kwargs", None),
        )
        for side, prepared in zip(unique, prepared_sides, strict=True):
            side.prepared = prepared

    async def read_unlimited(self, body: ConversationBody) -> Prompt:
        """Return the prompt of a conversation without a limit on its tokens, to count or show them."""
        chat = await self._parse_chat(body)
        return await off_loop(
            chat.size, lambda: self._render(chat, self._with_adapter(self._without_token_limit, body))
        )

    async def _parse_chat(self, body: ConversationBody, wait: Wait | None = None) -> "_ParsedChat":
        """Split the messages into text and media, and process the media."""
        size = _template_size(body)
        salt = getattr(body, "cache_salt", None)
        messages, items = await off_loop(
            size if size < _LONG else _count(_fields(body.messages), _part_size),
            lambda: part_media([*map(as_dict, body.messages)], salt),
        )
        if not items:
            return _ParsedChat(body, messages, [], size, size)
        work = self._inputs.media.prepare(items, body.mm_processor_kwargs, body.media_io_kwargs)
        prepared = await (work if wait is None else wait(work))
        rest = [messages, body.tools, body.documents, body.chat_template_kwargs]
        text_size = num_chars(rest) if body.chat_template is None else _LONG
        num_tokens = sum(len(item.processed.token_ids) for item in prepared)
        return _ParsedChat(body, messages, prepared, text_size + num_tokens, text_size)

    def variables(self, body: ConversationBody) -> dict[str, Any]:
        """Return the chat template variables of server and body. The reasoning effort `none` disables
        thinking."""
        effort = getattr(body, "reasoning_effort", None)
        return {
            **self._settings.default_chat_template_kwargs,
            **({"enable_thinking": False} if effort == "none" else {}),
            **(body.chat_template_kwargs or {}),
            **({} if body.documents is None else {"documents": body.documents}),
            **({} if effort is None else {"reasoning_effort": effort}),
        }

    def _render(
        self, chat: "_ParsedChat", inputs: InputProcessor, variables: Mapping[str, Any] | None = None
    ) -> Prompt:
        body = chat.body
        hidden = self._settings.exclude_tools_when_tool_choice_none
        tools = None if hidden and getattr(body, "tool_choice", None) == "none" else body.tools
        return chat_prompt(
            inputs,
            chat.messages,
            chat_template=body.chat_template or self._template,
            chat_template_content_format=self._settings.chat_template_content_format,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            tools=tools,
            chat_template_kwargs=self.variables(body) if variables is None else variables,
            add_special_tokens=body.add_special_tokens,
            prepared=chat.prepared,
            render_s=_RENDER_S if chat.text_size >= _LONG else None,
        )

    def _pooling_prompt(self, value: PoolingInput, body: EngineBody, add_special_tokens: bool) -> Prompt:
        inputs, size = self._inputs_for(body), self._truncated_len(body, 0)
        if isinstance(value, ScoreInputs):
            return self._truncate(self._prompt_of_parts(value, inputs), body, 0)
        if isinstance(value, tuple) and (size is None or self._template is not None):
            prompt = pair_prompt(inputs, *value, self._template)
        elif size is None or isinstance(value, list) or not add_special_tokens:
            prompt = inputs.parse(value, add_special_tokens=add_special_tokens)
        else:
            texts = (value,) if isinstance(value, str) else value
            prompt = inputs.parse_truncated(*texts, max_len=size, side=self._truncation_side(body))
        return self._truncate(prompt, body, 0)

    def _prompt_of_parts(self, value: ScoreInputs, inputs: InputProcessor) -> Prompt:
        """Return the prompt of content parts. A message is formatted with the chat template, a pair of query
        and document only with --chat-template, a query or document alone with no template."""
        if not value.is_chat:
            return sides_prompt(inputs, value.sides, self._template if len(value.sides) > 1 else None)
        return sides_prompt(
            inputs,
            value.sides,
            choose_template(self._model_template, self._template),
            chat_template_content_format=self._settings.chat_template_content_format,
            chat_template_kwargs=self._settings.default_chat_template_kwargs,
            add_generation_prompt=False,
        )

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template to render messages."""
        return self._template is not None or self._model_template is not None

    @property
    def _model_template(self) -> str | dict[str, str] | None:
        return None if self._inputs.tokenizer is None else self._inputs.tokenizer.chat_template

    def _inputs_for(self, body: EngineBody) -> InputProcessor:
        return self._with_adapter(
            self._inputs if body.truncate_prompt_tokens is None else self._without_limits, body
        )

    def _with_adapter(self, inputs: InputProcessor, body: Any) -> InputProcessor:
        return inputs.of(self._adapter_of(body.model))

    def _truncation_side(self, body: EngineBody) -> str:
        return body.truncation_side or ("left" if self._inputs.pooling is None else "right")

    def _truncated_len(self, body: EngineBody, num_output: int) -> int | None:
        """Return the number of tokens to truncate the prompt to, with room for `num_output` tokens; None if
        the request does not truncate it."""
        size, limit = body.truncate_prompt_tokens, self._inputs.max_model_len
        if size is not None and size > limit:
            raise RequestError(
                f"truncate_prompt_tokens value ({size}) is greater than max_model_len ({limit}). Please "
                "request a smaller truncation size.",
                param="truncate_prompt_tokens",
            )
        return limit - num_output if size == -1 else size

    def _truncate(self, prompt: Prompt, body: EngineBody, num_output: int) -> Prompt:
        prompt.cache_salt = body.cache_salt
        size = self._truncated_len(body, num_output)
        if size is None:
            return prompt
        if len(prompt.token_ids) > size:
            if prompt.media is not None:
                raise RequestError(
                    f"the prompt has {len(prompt.token_ids)} tokens, and as it has media it cannot be cut to "
                    f"{size}",
                    param="truncate_prompt_tokens",
                )
            start = 0 if self._truncation_side(body) == "right" else len(prompt.token_ids) - size
            prompt.token_ids = prompt.token_ids[start : start + size]
            prompt.text = None
        checked = self._with_adapter(self._inputs, body).parse(
            {"prompt_token_ids": prompt.token_ids, "prompt": prompt.text}
        )
        checked.cache_salt, checked.second_start = body.cache_salt, prompt.second_start
        checked.media, checked.prepared = prompt.media, prompt.prepared
        return checked


@contextmanager
def _naming_input(name: str) -> Iterator[None]:
    """Add the name of an input to RequestErrors raised inside."""
    try:
        yield
    except RequestError as error:
        field = name.partition("[")[0] if error.param == "prompt" else error.param
        raise type(error)(f"{name}: {error}", param=field) from None


def _embeds_of(body: CompletionBody) -> list[dict[str, str]]:
    """Return the prompts of a body that are given as embeddings."""
    if not body.prompt_embeds:
        return []
    for name, message in _EMBEDS_CONFLICTS.items():
        if getattr(body, name):
            raise RequestError(message, param=name)
    embeds = [body.prompt_embeds] if isinstance(body.prompt_embeds, str) else body.prompt_embeds
    return [{"prompt_embeds": item} for item in embeds]


def list_prompts(prompts: Prompts) -> list[Any]:
    """Return the prompts of a body as a list; a single text or list of token ids becomes one prompt."""
    several = isinstance(prompts, list) and not isinstance(prompts[0], int)
    return prompts if several else [prompts]  # type: ignore[return-value]


def as_dict(message: Message) -> dict[str, Any]:
    """Return a message as chat templates expect it, with its reasoning also under the older name
    `reasoning_content`, which most of them use."""
    dumped = message.model_dump(exclude_unset=True)
    fields = {name: value for name, value in dumped.items() if value is not None}
    reasoning = fields.get("reasoning", fields.get("reasoning_content"))
    if reasoning is not None:
        fields["reasoning"] = fields["reasoning_content"] = reasoning
    return fields


def _template_size(body: ConversationBody) -> int:
    """Return the approximate number of characters that the chat template handles. A template from the request
    counts as long, since its cost is unknown."""
    if body.chat_template is not None:
        return _LONG
    return num_chars([body.tools, body.documents, body.chat_template_kwargs, _fields(body.messages)])


def _fields(messages: Sequence[Message]) -> Iterator[Any]:
    return (fields for message in messages for fields in (vars(message), message.model_extra))


def _part_size(text: str) -> int:
    """Return the cost of a text, in characters, when messages are searched for media: only the types of
    content parts are read. The type of an embedding costs `_LONG`, since embeddings are decoded."""
    return _LONG if text.endswith(_EMBEDS) else _VALUE_CHARS


def _prompt_size(prompt: Any) -> int:
    """Return the number of characters or token ids of a prompt, plus its fixed cost `_PROMPT_CHARS`."""
    return _PROMPT_CHARS + (len(prompt) if isinstance(prompt, str | list) else num_chars(prompt))


def num_chars(value: Any) -> int:
    """Count the characters of all nested values, up to about `_LONG`."""
    return _count(value, len)


def _count(value: Any, size_of: Callable[[str], int]) -> int:
    """Add up the sizes of nested values, until the sum reaches `_LONG`."""
    count, pending = 0, [iter((value,))]
    while pending and count < _LONG:
        item = next(pending[-1], _END)
        if item is _END:
            pending.pop()
            continue
        count += size_of(item) if isinstance(item, str) else _VALUE_CHARS
        if isinstance(item, dict):
            pending.append(itertools.chain(item, item.values()))
        elif isinstance(item, list | tuple | GeneratorType):
            pending.append(iter(item))
    return count
