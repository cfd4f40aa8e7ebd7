"""Conversion of a conversation to a prompt: chat template, content format, tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, RequestError
from quire.frontend.inputs import InputProcessor, Prompt
from quire.frontend.message_parts import part_media
from quire.frontend.time_limit import limited
from quire.multimodal.processing import PreparedItem
from quire.text.chat_template import (
    MediaMarkers,
    choose_template,
    content_format,
    normalise,
    shipped_templates,
)

_RESERVED = ("self", "messages", "tokenize", "chat_template")
"""Arguments that `chat_template_kwargs` may not override."""
CONTENT_FORMATS = ("auto", "string", "openai")


def read_template(argument: str | None) -> str | None:
    """Return the text of the chat template that `--chat-template` selects: the contents of a file, a template
    of Quire by its name, or the argument itself. None if the flag is not set."""
    if argument is None:
        return None
    if any(mark in argument for mark in "{}\n"):
        return argument
    path, shipped = Path(argument).expanduser(), shipped_templates()
    if argument in shipped and not path.is_file():
        path = shipped[argument]
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"chat_template {argument!r} is neither a readable file ({error.strerror}) nor a template (it "
            f"has no braces) nor one of {', '.join(shipped)}"
        ) from None


def chat_prompt(
    inputs: InputProcessor,
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: str | None = None,
    chat_template_content_format: str = "auto",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_special_tokens: bool = False,
    mm_processor_kwargs: Mapping[str, Any] | None = None,
    prepared: Sequence[PreparedItem] | None = None,
    render_s: float | None = None,
) -> Prompt:
    """Render a conversation with a chat template and tokenize it; raise a RequestError if rendering takes
    longer than `render_s` seconds (None: no limit). `prepared` has the processed media of the placeholder
    parts in `messages` (see `part_media`); None: the media in `messages` are processed here."""
    tokenizer = inputs.need_tokenizer("a chat")
    if chat_template_content_format not in CONTENT_FORMATS:
        raise RequestError(
            f"chat_template_content_format={chat_template_content_format!r}; known: "
            f"{', '.join(CONTENT_FORMATS)}"
        )
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise RequestError(f"a conversation is a list of messages; got {messages!r:.80}", param="messages")
    if reserved := [name for name in _RESERVED if name in (chat_template_kwargs or {})]:
        raise RequestError(
            f"chat_template_kwargs may not contain {', '.join(reserved)}", param="chat_template_kwargs"
        )
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"each message is a dict with a `role`; got {message!r:.80}", param="messages")
    if prepared is None:
        messages, items = part_media(messages)
        prepared = inputs.media.prepare_sync(items, mm_processor_kwargs)
    marks = MediaMarkers(inputs.media.mark, inputs.media.interleaves) if prepared else None
    template = choose_template(tokenizer.chat_template, chat_template, with_tools=tools is not None)
    chosen_format: Any = chat_template_content_format
    if chosen_format == "auto":
        chosen_format = content_format(template)
    with limited(render_s, "rendering the chat template"):
        text = tokenizer.apply_chat_template(
            normalise(messages, chosen_format, marks),
            tokenize=False,
            chat_template=template,
            **{
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                "tools": tools,
                **(chat_template_kwargs or {}),
            },
        )
    return inputs.parse(str(text), add_special_tokens=add_special_tokens, prepared=prepared)


def pair_prompt(inputs: InputProcessor, query: str, document: str, template: str | None) -> Prompt:
    """Build the prompt of a query and a document for a cross-encoder: by the chat `template`, or if it is
    None, by the tokenizer's encoding of text pairs."""
    if template is None:
        return inputs.parse_pair(query, document)
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    return chat_prompt(inputs, messages, chat_template=template)
