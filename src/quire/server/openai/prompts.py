"""Bodies become prompts: texts, token ids and conversations, cut to length where that is asked for."""

import asyncio
import copy
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.data.lora import LoRARequest
from quire.errors import RequestError
from quire.frontend.chat import chat_prompt, pair_prompt
from quire.frontend.inputs import InputProcessor, Prompt
from quire.frontend.message_parts import part_media
from quire.frontend.score_inputs import Sides, sides_prompt
from quire.multimodal.processing import PreparedItem
from quire.server.engine import Engine
from quire.server.http.errors import InvalidBody
from quire.server.openai.requests import (
    MAX_PROMPTS,
    CompletionBody,
    ConversationBody,
    EngineBody,
    Message,
    Prompts,
)
from quire.server.settings import ApiSection
from quire.text.chat_template import choose_template

T = TypeVar("T")
Wait = Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]]
PoolingInput = str | list[int] | tuple[str, str] | Sides
"""A text, token ids, a pair of texts to be read as one, or either in parts."""

_LONG = 16384
"""More characters, or token ids, would hold up the other requests of the event loop for milliseconds."""
_EMBEDS = "_embeds"
"""How the types of parts end that are vectors."""
_RENDER_S = 1.0
_NOT_OF_EMBEDS = {
    "echo": "Echo is unsupported with prompt embeds.",
    "truncate_prompt_tokens": "truncate_prompt_tokens is unsupported with prompt embeds.",
    "use_beam_search": "Beam search is unsupported with prompt embeds.",
}
"""Fields that need the tokens of a prompt."""


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Long work in a thread, short work at once."""
    return work() if size < _LONG else await asyncio.to_thread(work)


@dataclass(frozen=True, slots=True)
class _Talk:
    """A conversation whose media are ready."""

    body: ConversationBody
    messages: list[Mapping[str, Any]]
    prepared: list[PreparedItem]
    size: int
    """Characters, about, and tokens of media."""
    text_size: int
    """Those that the template has to deal with."""


class PromptReader:
    """Makes prompts of bodies, long ones off the event loop."""

    def __init__(
        self,
        engine: Engine,
        settings: ApiSection,
        adapter_of: Callable[[str | None], LoRARequest | None] = lambda name: None,
    ) -> None:
        """`adapter_of` a name that a body gives: it may have a tokenizer of its own."""
        self._inputs = engine.inputs
        self._adapter_of = adapter_of
        self._template = engine.facts.chat_template
        self._settings = settings
        self._unbounded = copy.copy(engine.inputs)
        """Reads prompts of any length, to cut them."""
        self._unbounded.max_model_len = sys.maxsize >> 16
        self._unbounded.max_prompt_len = None
        self._unbounded.max_chars = sys.maxsize
        self._counting = copy.copy(self._unbounded)
        """Reads prompts of any number of tokens, to count them; texts that cannot be prompts are refused."""
        self._counting.max_chars = engine.inputs.max_chars

    async def of_completion(self, body: CompletionBody, *, max_sequences: int) -> list[Prompt]:
        given = [*_embeds_of(body), *([] if body.prompt in (None, "") else each_of(body.prompt))]
        if not given:
            raise InvalidBody(
                "Either prompt or prompt_embeds must be provided and non-empty.", param="prompt"
            )
        if len(given) > MAX_PROMPTS:
            raise RequestError(
                f"prompt list length {len(given)} exceeds the maximum allowed count of {MAX_PROMPTS}",
                param="prompt",
            )
        if len(given) * (body.n or 1) > max_sequences:
            raise RequestError(
                f"{len(given)} prompts with n={body.n} are {len(given) * (body.n or 1)} sequences, and one "
                f"call may ask for at most {max_sequences} (VLLM_MAX_N_SEQUENCES); send fewer at once",
                param="n",
            )

        def read() -> list[Prompt]:
            inputs = self._reader(body)
            found = [inputs.parse(each, add_special_tokens=body.add_special_tokens) for each in given]
            return [self._fitted(prompt, body, body.max_tokens or 16) for prompt in found]

        return await off_loop(sum(map(_num_chars, given)), read)

    async def of_chat(self, body: Any, max_tokens: int | None, wait: Wait | None = None) -> Prompt:
        """`wait` is how what takes long is waited for: it may break it off."""
        talk = await self._begun(body, wait)

        def read() -> Prompt:
            prompt = self._conversation(talk, self._reader(body), body.reasoning_effort)
            return self._fitted(prompt, body, max_tokens or 1)

        return await off_loop(talk.size, read)

    async def of_inputs(
        self,
        named: Sequence[tuple[str, PoolingInput]],
        body: EngineBody,
        *,
        add_special_tokens: bool = True,
        wait: Wait | None = None,
    ) -> list[Prompt]:
        """Prompts of a pooling model. Each has a name, by which an error calls it."""
        parted = [(name, given) for name, given in named if isinstance(given, Sides)]
        if any(given.items for _, given in parted):
            work = self._prepare(parted, body)
            await (work if wait is None else wait(work))

        def read() -> list[Prompt]:
            found = []
            for name, given in named:
                with _called(name):
                    found.append(self._input(given, body, add_special_tokens))
            return found

        size = sum(_LONG if isinstance(given, Sides) else _num_chars(given) for _, given in named)
        return await off_loop(size, read)

    async def _prepare(self, named: Sequence[tuple[str, Sides]], body: Any) -> None:
        """The media of inputs; a side that several inputs have is made ready once."""
        for name, given in named:
            with _called(name):
                self._inputs.media.check(given.items)
        unique = [*{id(side): side for _, given in named for side in given.sides}.values()]
        found = await self._inputs.media.prepare_each(
            [side.items for side in unique],
            getattr(body, "media_io_kwargs", None),
            getattr(body, "mm_processor_kwargs", None),
        )
        for side, prepared in zip(unique, found, strict=True):
            side.prepared = prepared

    async def of_conversation(self, body: Any, wait: Wait | None = None) -> Prompt:
        """A conversation that nothing is to follow."""

        talk = await self._begun(body, wait)

        def read() -> Prompt:
            return self._fitted(self._conversation(talk, self._reader(body), None), body, 0)

        return await off_loop(talk.size, read)

    async def count(self, body: ConversationBody) -> Prompt:
        """A conversation of any number of tokens, for /tokenize."""
        effort, talk = getattr(body, "reasoning_effort", None), await self._begun(body)
        return await off_loop(
            talk.size, lambda: self._conversation(talk, self._of(self._counting, body), effort)
        )

    async def _begun(self, body: ConversationBody, wait: Wait | None = None) -> "_Talk":
        """What the messages bring beside text is made ready; only that takes time here."""
        size = _size(body)
        salt = getattr(body, "cache_salt", None)
        messages, items = await off_loop(
            size if size < _LONG else _num_values(_fields(body.messages)),
            lambda: part_media([*map(as_dict, body.messages)], salt),
        )
        if not items:
            return _Talk(body, messages, [], size, size)
        work = self._inputs.media.prepare(items, body.mm_processor_kwargs, body.media_io_kwargs)
        prepared = await (work if wait is None else wait(work))
        rest = [messages, body.tools, body.documents, body.chat_template_kwargs]
        text_size = _num_chars(rest) if body.chat_template is None else _LONG
        num_tokens = sum(len(each.processed.token_ids) for each in prepared)
        return _Talk(body, messages, prepared, text_size + num_tokens, text_size)

    def variables(self, body: ConversationBody, effort: str | None) -> dict[str, Any]:
        """Those of the chat template that server and body set. Who wants no effort wants no thinking."""
        return {
            **self._settings.default_chat_template_kwargs,
            **({"enable_thinking": False} if effort == "none" else {}),
            **(body.chat_template_kwargs or {}),
        }

    def _conversation(self, talk: "_Talk", inputs: InputProcessor, effort: str | None) -> Prompt:
        body = talk.body
        hidden = self._settings.exclude_tools_when_tool_choice_none
        tools = None if hidden and getattr(body, "tool_choice", None) == "none" else body.tools
        own = {"documents": body.documents, "reasoning_effort": effort}
        return chat_prompt(
            inputs,
            talk.messages,
            chat_template=body.chat_template or self._template,
            chat_template_content_format=self._settings.chat_template_content_format,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            tools=tools,
            chat_template_kwargs={
                **self.variables(body, effort),
                **{name: value for name, value in own.items() if value is not None},
            },
            add_special_tokens=body.add_special_tokens,
            prepared=talk.prepared,
            render_s=_RENDER_S if talk.text_size >= _LONG else None,
        )

    def _input(self, given: PoolingInput, body: EngineBody, add_special_tokens: bool) -> Prompt:
        inputs, size = self._reader(body), self._cut_len(body, 0)
        if isinstance(given, Sides):
            return self._fitted(self._in_parts(given, inputs), body, 0)
        if isinstance(given, tuple) and (size is None or self._template is not None):
            prompt = pair_prompt(inputs, *given, self._template)
        elif size is None or isinstance(given, list) or not add_special_tokens:
            prompt = inputs.parse(given, add_special_tokens=add_special_tokens)
        else:
            texts = (given,) if isinstance(given, str) else given
            prompt = inputs.parse_cut(*texts, max_len=size, side=self._side(body))
        return self._fitted(prompt, body, 0)

    def _in_parts(self, given: Sides, inputs: InputProcessor) -> Prompt:
        """A message by the chat template, of which there is one; a pair by that of the server, if it has one;
        what is embedded for a score by none."""
        if not given.is_talk:
            return sides_prompt(inputs, given.sides, self._template if len(given.sides) > 1 else None)
        return sides_prompt(
            inputs,
            given.sides,
            choose_template(self._own_template, self._template),
            chat_template_content_format=self._settings.chat_template_content_format,
            chat_template_kwargs=self._settings.default_chat_template_kwargs,
            add_generation_prompt=False,
        )

    @property
    def has_template(self) -> bool:
        """Whether messages can be made prompts at all."""
        return self._template is not None or self._own_template is not None

    @property
    def _own_template(self) -> str | dict[str, str] | None:
        return None if self._inputs.tokenizer is None else self._inputs.tokenizer.chat_template

    def _reader(self, body: EngineBody) -> InputProcessor:
        return self._of(self._inputs if body.truncate_prompt_tokens is None else self._unbounded, body)

    def _of(self, inputs: InputProcessor, body: Any) -> InputProcessor:
        return inputs.of(self._adapter_of(body.model))

    def _side(self, body: EngineBody) -> str:
        return body.truncation_side or ("left" if self._inputs.pooling is None else "right")

    def _cut_len(self, body: EngineBody, num_output: int) -> int | None:
        """The most tokens that a prompt is to have, if it is to be cut at all."""
        size, limit = body.truncate_prompt_tokens, self._inputs.max_model_len
        if size is not None and size > limit:
            raise RequestError(
                f"truncate_prompt_tokens value ({size}) is greater than max_model_len ({limit}). Please "
                "request a smaller truncation size.",
                param="truncate_prompt_tokens",
            )
        return limit - num_output if size == -1 else size

    def _fitted(self, prompt: Prompt, body: EngineBody, num_output: int) -> Prompt:
        prompt.cache_salt = body.cache_salt
        size = self._cut_len(body, num_output)
        if size is None:
            return prompt
        if len(prompt.token_ids) > size:
            if prompt.media is not None:
                raise RequestError(
                    f"the prompt has {len(prompt.token_ids)} tokens, and as it has media it cannot be cut to "
                    f"{size}",
                    param="truncate_prompt_tokens",
                )
            start = 0 if self._side(body) == "right" else len(prompt.token_ids) - size
            prompt.token_ids = prompt.token_ids[start : start + size]
            prompt.text = None
        checked = self._of(self._inputs, body).parse(
            {"prompt_token_ids": prompt.token_ids, "prompt": prompt.text}
        )
        checked.cache_salt, checked.second_start = body.cache_salt, prompt.second_start
        checked.media, checked.prepared = prompt.media, prompt.prepared
        return checked


@contextmanager
def _called(name: str) -> Iterator[None]:
    """An error in here is one of the input with this name."""
    try:
        yield
    except RequestError as error:
        field = name.partition("[")[0] if error.param == "prompt" else error.param
        raise type(error)(f"{name}: {error}", param=field) from None


def _embeds_of(body: CompletionBody) -> list[dict[str, str]]:
    """The prompts of a body that are vectors."""
    if not body.prompt_embeds:
        return []
    for name, why in _NOT_OF_EMBEDS.items():
        if getattr(body, name):
            raise RequestError(why, param=name)
    several = [body.prompt_embeds] if isinstance(body.prompt_embeds, str) else body.prompt_embeds
    return [{"prompt_embeds": each} for each in several]


def each_of(given: Prompts) -> list[Any]:
    """The prompts of a body, which may be a single one: a text, or token ids."""
    several = isinstance(given, list) and not isinstance(given[0], int)
    return given if several else [given]  # type: ignore[return-value]


def as_dict(message: Message) -> dict[str, Any]:
    """A message as templates read it; `reasoning_content` is an older name of `reasoning`, which most of them
    know."""
    given = message.model_dump(exclude_unset=True)
    found = {name: value for name, value in given.items() if value is not None}
    thoughts = found.get("reasoning", found.get("reasoning_content"))
    if thoughts is not None:
        found["reasoning"] = found["reasoning_content"] = thoughts
    return found


def _size(body: ConversationBody) -> int:
    """Characters that the template has to deal with, about. A template of the request's own counts as long:
    what it does with the rest nobody knows."""
    if body.chat_template is not None:
        return _LONG
    return _num_chars([body.tools, body.documents, body.chat_template_kwargs, _fields(body.messages)])


def _fields(messages: Sequence[Message]) -> list[Any]:
    return [fields for message in messages for fields in (vars(message), message.model_extra)]


def _num_values(value: Any) -> int:
    """In all that the value holds, up to `_LONG`. A text is one, however long: nobody reads it to find the
    media of a message, unless it is of vectors."""
    found, waiting = 0, [value]
    while waiting and found < _LONG:
        each = waiting.pop()
        found += 1
        if isinstance(each, dict):
            waiting += (*each, *each.values())
        elif isinstance(each, list):
            waiting += each
        elif isinstance(each, str) and each.endswith(_EMBEDS):
            return _LONG
    return found


def _num_chars(value: Any) -> int:
    """Of all that the value holds, however deep; nobody asks how much more than `_LONG` it is."""
    found, waiting = 0, [value]
    while waiting and found < _LONG:
        each = waiting.pop()
        found += len(each) if isinstance(each, str) else 1
        if isinstance(each, dict):
            waiting += (*each, *each.values())
        elif isinstance(each, list | tuple):
            waiting += each
    return found
