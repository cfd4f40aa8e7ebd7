"""Conversion of request bodies to prompts: texts, token ids and conversations, truncated on request."""

import copy
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from quire.config.server_sections import ApiSection
from quire.errors import RequestError
from quire.frontend.chat import chat_prompt, pair_prompt
from quire.frontend.inputs import InputProcessor, Prompt
from quire.frontend.message_parts import part_media
from quire.frontend.multimodal import MediaInputReader
from quire.frontend.score_inputs import ScoreInputs, sides_prompt
from quire.multimodal.processing import PreparedItem
from quire.server.http.errors import InvalidBody
from quire.server.openai.requested_model import RequestedModel
from quire.server.openai.requests import (
    MAX_PROMPTS,
    CompletionBody,
    ConversationBody,
    EngineBody,
    Message,
    Prompts,
)
from quire.server.openai.work_size import LONG, VALUE_CHARS, add_sizes, num_chars, off_loop
from quire.text.chat_template import choose_template

Wait = Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]]
PoolingInput = str | list[int] | tuple[str, str] | ScoreInputs
"""A text, token ids, a pair of texts that form one prompt, or one or two lists of content parts."""

_PROMPT_CHARS = 32
"""Characters that are added to the size of each prompt of a call, for the fixed cost of a prompt."""
_EMBEDS = "_embeds"
"""Suffix of the types of content parts that are embeddings."""
_RENDER_S = 1.0
_EMBEDS_CONFLICTS = {
    "echo": "Echo is unsupported with prompt embeds.",
    "truncate_prompt_tokens": "truncate_prompt_tokens is unsupported with prompt embeds.",
    "use_beam_search": "Beam search is unsupported with prompt embeds.",
}
"""Errors by field, for fields that need prompt tokens, which prompt embeddings do not have."""


class PromptReader:
    """Converter of request bodies to prompts. Long bodies are converted in a thread."""

    def __init__(self, template: str | None, settings: ApiSection) -> None:
        """Create a reader. `template`: the chat template of the command line."""
        self._template = template
        self._settings = settings

    async def read_completion(
        self, body: CompletionBody, model: RequestedModel, *, max_sequences: int
    ) -> list[Prompt]:
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
            inputs = _inputs_for(body, model)
            parsed = [inputs.parse(prompt, add_special_tokens=body.add_special_tokens) for prompt in prompts]
            return [_truncate(prompt, body, model, body.max_tokens or 16) for prompt in parsed]

        return await off_loop(sum(map(_prompt_size, prompts)), read)

    async def read_chat(
        self,
        body: Any,
        model: RequestedModel,
        num_output: int = 0,
        wait: Wait | None = None,
        *,
        variables: Mapping[str, Any] | None = None,
        limited: bool = True,
    ) -> Prompt:
        """Return the prompt of a conversation, with room for `num_output` tokens if it is truncated. `wait`
        is a function that awaits slow work and may cancel it. `variables` are those of the chat template;
        None: `self.variables(body)`. `limited=False`: the prompt may be of any length, since it is only
        counted or shown."""
        truncates = limited and body.truncate_prompt_tokens is not None
        inputs = model.inputs
        if truncates or not limited:
            inputs = _without_limits(inputs, keeps_max_chars=not limited)
        size = text_size = _template_size(body)
        salt = getattr(body, "cache_salt", None)
        messages, items = await off_loop(
            size if size < LONG else add_sizes(_fields(body.messages), _part_size),
            lambda: part_media([*map(as_dict, body.messages)], salt),
        )
        prepared: list[PreparedItem] = []
        if items:
            work = inputs.media.prepare(items, body.mm_processor_kwargs, body.media_io_kwargs)
            prepared = await (work if wait is None else wait(work))
            rest = [messages, body.tools, body.documents, body.chat_template_kwargs]
            text_size = num_chars(rest) if body.chat_template is None else LONG
            size = text_size + sum(len(item.processed.token_ids) for item in prepared)

        def render() -> Prompt:
            hidden = self._settings.exclude_tools_when_tool_choice_none
            prompt = chat_prompt(
                inputs,
                messages,
                chat_template=body.chat_template or self._template,
                chat_template_content_format=self._settings.chat_template_content_format,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                tools=None if hidden and getattr(body, "tool_choice", None) == "none" else body.tools,
                chat_template_kwargs=self.variables(body) if variables is None else variables,
                add_special_tokens=body.add_special_tokens,
                prepared=prepared,
                render_s=_RENDER_S if text_size >= LONG else None,
            )
            prompt.cache_salt = salt
            return _truncate(prompt, body, model, num_output) if truncates else prompt

        return await off_loop(size, render)

    async def read_inputs(
        self,
        named_inputs: Sequence[tuple[str, PoolingInput]],
        body: EngineBody,
        model: RequestedModel,
        *,
        add_special_tokens: bool = True,
        wait: Wait | None = None,
    ) -> list[Prompt]:
        """Return the prompts of a pooling model. `named_inputs` are pairs of an input's name, which errors
        mention, and the input."""
        with_parts = [(name, value) for name, value in named_inputs if isinstance(value, ScoreInputs)]
        if any(value.items for _, value in with_parts):
            work = _prepare(with_parts, body, model.inputs.media)
            await (work if wait is None else wait(work))

        def read() -> list[Prompt]:
            prompts = []
            for name, value in named_inputs:
                with _naming_input(name):
                    prompts.append(self._pooling_prompt(value, body, model, add_special_tokens))
            return prompts

        size = sum(
            LONG if isinstance(value, ScoreInputs) else _prompt_size(value) for _, value in named_inputs
        )
        return await off_loop(size, read)

    def variables(self, body: ConversationBody) -> dict[str, Any]:
        """Return the chat template variables by name: the server's defaults, overridden by those of the body.
        The reasoning effort `none` disables thinking."""
        effort = getattr(body, "reasoning_effort", None)
        return {
            **self._settings.default_chat_template_kwargs,
            **({"enable_thinking": False} if effort == "none" else {}),
            **(body.chat_template_kwargs or {}),
            **({} if body.documents is None else {"documents": body.documents}),
            **({} if effort is None else {"reasoning_effort": effort}),
        }

    def _pooling_prompt(
        self, value: PoolingInput, body: EngineBody, model: RequestedModel, add_special_tokens: bool
    ) -> Prompt:
        inputs, size = _inputs_for(body, model), _truncated_len(body, model.inputs, 0)
        if isinstance(value, ScoreInputs):
            prompt = self._prompt_of_parts(value, inputs)
        elif isinstance(value, tuple) and (size is None or self._template is not None):
            prompt = pair_prompt(inputs, *value, self._template)
        elif size is None or isinstance(value, list) or not add_special_tokens:
            prompt = inputs.parse(value, add_special_tokens=add_special_tokens)
        else:
            texts = (value,) if isinstance(value, str) else value
            prompt = inputs.parse_truncated(*texts, max_len=size, side=_truncation_side(body, inputs))
        return _truncate(prompt, body, model, 0)

    def _prompt_of_parts(self, value: ScoreInputs, inputs: InputProcessor) -> Prompt:
        """Return the prompt of content parts. A message is formatted with the chat template, a pair of query
        and document only with --chat-template, a query or document alone with no template."""
        if not value.is_chat:
            return sides_prompt(inputs, value.sides, self._template if len(value.sides) > 1 else None)
        return sides_prompt(
            inputs,
            value.sides,
            choose_template(_model_template(inputs), self._template),
            chat_template_content_format=self._settings.chat_template_content_format,
            chat_template_kwargs=self._settings.default_chat_template_kwargs,
            add_generation_prompt=False,
        )

    def has_template(self, model: RequestedModel) -> bool:
        """Whether there is a chat template to render messages."""
        return self._template is not None or _model_template(model.inputs) is not None


def _model_template(inputs: InputProcessor) -> str | dict[str, str] | None:
    return None if inputs.tokenizer is None else inputs.tokenizer.chat_template


async def _prepare(
    named_inputs: Sequence[tuple[str, ScoreInputs]], body: Any, media: MediaInputReader
) -> None:
    """Process the media of the inputs. A query or document that is part of several inputs is processed
    once."""
    for name, value in named_inputs:
        with _naming_input(name):
            media.check(value.items)
    unique = [*{id(side): side for _, value in named_inputs for side in value.sides}.values()]
    prepared_sides = await media.prepare_each(
        [side.items for side in unique],
        getattr(body, "media_io_kwargs", None),
        getattr(body, "mm_processor_kwargs", None),
    )
    for side, prepared in zip(unique, prepared_sides, strict=True):
        side.prepared = prepared


def _inputs_for(body: EngineBody, model: RequestedModel) -> InputProcessor:
    """Return the input processor of the model, without its limit of the prompt length if the body requests
    truncation: the prompt is then truncated after tokenization."""
    return model.inputs if body.truncate_prompt_tokens is None else _without_limits(model.inputs)


def _without_limits(inputs: InputProcessor, *, keeps_max_chars: bool = False) -> InputProcessor:
    unlimited = copy.copy(inputs)
    unlimited.max_model_len, unlimited.max_prompt_len = sys.maxsize >> 16, None
    unlimited.max_chars = inputs.max_chars if keeps_max_chars else sys.maxsize
    return unlimited


def _truncation_side(body: EngineBody, inputs: InputProcessor) -> str:
    return body.truncation_side or ("left" if inputs.pooling is None else "right")


def _truncated_len(body: EngineBody, inputs: InputProcessor, num_output: int) -> int | None:
    """Return the number of tokens to truncate the prompt to, with room for `num_output` tokens; None if the
    request does not truncate it."""
    size, limit = body.truncate_prompt_tokens, inputs.max_model_len
    if size is not None and size > limit:
        raise RequestError(
            f"truncate_prompt_tokens value ({size}) is greater than max_model_len ({limit}). Please "
            "request a smaller truncation size.",
            param="truncate_prompt_tokens",
        )
    return limit - num_output if size == -1 else size


def _truncate(prompt: Prompt, body: EngineBody, model: RequestedModel, num_output: int) -> Prompt:
    """Set the cache salt of a prompt, and truncate it if the body requests that."""
    prompt.cache_salt = body.cache_salt
    size = _truncated_len(body, model.inputs, num_output)
    if size is None:
        return prompt
    if len(prompt.token_ids) > size:
        if prompt.media is not None:
            raise RequestError(
                f"the prompt has {len(prompt.token_ids)} tokens, and as it has media it cannot be cut to "
                f"{size}",
                param="truncate_prompt_tokens",
            )
        start = 0 if _truncation_side(body, model.inputs) == "right" else len(prompt.token_ids) - size
        prompt.token_ids = prompt.token_ids[start : start + size]
        prompt.text = None
    checked = model.inputs.parse({"prompt_token_ids": prompt.token_ids, "prompt": prompt.text})
    checked.cache_salt, checked.second_start = body.cache_salt, prompt.second_start
    checked.media, checked.prepared = prompt.media, prompt.prepared
    return checked


@contextmanager
def _naming_input(name: str) -> Iterator[None]:
    """Put the name of an input in front of the messages of RequestErrors that are raised within this
    context."""
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
        return LONG
    return num_chars([body.tools, body.documents, body.chat_template_kwargs, _fields(body.messages)])


def _fields(messages: Sequence[Message]) -> Iterator[Any]:
    return (fields for message in messages for fields in (vars(message), message.model_extra))


def _part_size(text: str) -> int:
    """Return the cost of a text, in characters, when messages are searched for media: only the types of
    content parts are read. The type of an embedding costs `LONG`, since embeddings are decoded."""
    return LONG if text.endswith(_EMBEDS) else VALUE_CHARS


def _prompt_size(prompt: Any) -> int:
    """Return the number of characters or token ids of a prompt, plus its fixed cost `_PROMPT_CHARS`."""
    return _PROMPT_CHARS + (len(prompt) if isinstance(prompt, str | list) else num_chars(prompt))
