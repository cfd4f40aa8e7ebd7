"""Chat templates: formatting of a conversation as the prompt that the model was trained on."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from quire.errors import RequestError

if TYPE_CHECKING:
    from jinja2 import Environment, Template, nodes

ContentFormat = Literal["string", "openai"]

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of text parts, with the names of their fields that contain the text."""
_MEDIA_PARTS = ("image", "video", "audio")
_NO_TEMPLATE = "this model has no chat template; start with `--chat-template FILE` to give it one"
_TAIL_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


def render_chat(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    bos_token: str | None = None,
    eos_token: str | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    documents: list[dict[str, Any]] | None = None,
    **kwargs: Any,
) -> str:
    """Return the conversation as one prompt. `kwargs` are further variables of the template."""
    if template is None:
        raise RequestError(_NO_TEMPLATE)
    if continue_final_message and add_generation_prompt:
        raise RequestError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    if not messages:
        raise RequestError("the conversation is empty; send at least one message", param="messages")
    conversation = _merge_developer_messages([dict(message) for message in messages], template)
    if continue_final_message:
        final_text = _tag_final_message(conversation)
    named = {"bos_token": bos_token, "eos_token": eos_token}
    text = _render(
        template,
        {name: token for name, token in named.items() if token is not None}
        | kwargs
        | {
            "messages": conversation,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        },
    )
    return _cut_at_tag(text, final_text) if continue_final_message else text


def _merge_developer_messages(conversation: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """Merge developer and system messages into one leading system message, for templates without a
    developer role."""
    has_developer = any(message["role"] == "developer" for message in conversation)
    if not has_developer or "'developer'" in template or '"developer"' in template:
        return conversation
    system = [message for message in conversation if message["role"] in ("system", "developer")]
    rest = [message for message in conversation if message["role"] not in ("system", "developer")]
    contents = [message["content"] for message in system if message.get("content")]
    is_text = all(isinstance(content, str) for content in contents)
    parts = [[{"type": "text", "text": item}] if isinstance(item, str) else item for item in contents]
    content = "\n\n".join(contents) if is_text else list(chain.from_iterable(parts))
    return [{**system[0], "role": "system", "content": content}, *rest]


def shipped_templates() -> dict[str, Path]:
    """Return the template files of Quire by name; they are for models whose own template has no tools."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}


def choose_template(
    model_template: str | dict[str, str] | None, requested: str | None = None, *, with_tools: bool = False
) -> str:
    """Return the template of a request: the template that the request names or contains, else one of the
    model's templates."""
    named = model_template if isinstance(model_template, dict) else {}
    if requested is not None:
        return named.get(requested, requested)
    if isinstance(model_template, str):
        return model_template
    if with_tools and "tool_use" in named:
        return named["tool_use"]
    if "default" in named:
        return named["default"]
    if named:
        raise RequestError(
            f"this model has no default chat template; name one as `chat_template`: {', '.join(named)}",
            param="chat_template",
        )
    raise RequestError(_NO_TEMPLATE)


@dataclass(slots=True)
class MediaMarkers:
    """Placeholder texts of images, videos and audio, for templates that take only strings."""

    text: Callable[[str, int], str]
    """Function of the modality and the item's number, from 1, that returns the placeholder."""
    interleaved: bool = False
    """Whether placeholders keep their positions among the texts; else they precede all texts."""
    counts: Counter[str] = field(default_factory=Counter)
    """Number of items so far, by modality."""

    def next(self, modality: str) -> str:
        self.counts[modality] += 1
        return self.text(modality, self.counts[modality])

    def join(self, parts: Sequence["str | _MediaPart"]) -> str:
        """Join the parts of a message to one text. Placeholders that the texts already contain are not added
        again, unless they are interleaved."""
        entries = [(part, part if isinstance(part, str) else self.next(part.modality)) for part in parts]
        if self.interleaved:
            return "\n".join(text for _, text in entries)
        texts = "\n".join(text for part, text in entries if isinstance(part, str))
        needed = Counter(text for part, text in entries if not isinstance(part, str))
        missing = [mark for mark, count in needed.items() for _ in range(count - texts.count(mark))]
        return "\n".join([*missing, texts]) if texts else "\n".join(missing)


class _MediaPart(NamedTuple):
    """A media part of a message."""

    modality: str


def normalise(
    messages: Iterable[Mapping[str, Any]], content_format: ContentFormat, markers: MediaMarkers | None = None
) -> list[dict[str, Any]]:
    """Return messages as the template expects them: content as a string or as parts, tool arguments as
    objects. Media parts (image, video, audio) need `markers`."""
    return [_normalise_message(message, content_format, markers) for message in messages]


@lru_cache(maxsize=64)
def content_format(template: str) -> ContentFormat:
    """Return `openai` if the template iterates over the parts of a message's content, else `string`."""
    from jinja2 import nodes

    _compile(template)  # raises if the template is not valid
    tree = _environment().parse(template)
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    aliases: set[str] = set()
    while True:
        names = {
            assign.target.name
            for assign in tree.find_all(nodes.Assign)
            if isinstance(assign.target, nodes.Name) and _is_content(assign.node, aliases)
        }
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name in macros:
                parameters = macros[call.node.name].args
                passed = zip(parameters, call.args, strict=False)
                names |= {parameter.name for parameter, value in passed if _is_content(value, aliases)}
        if names <= aliases:
            break
        aliases |= names
    iterates = any(_is_content(loop.iter, aliases) for loop in tree.find_all(nodes.For))
    return "openai" if iterates else "string"


def _is_content(node: "nodes.Node", aliases: set[str]) -> bool:
    """Whether an expression is a message's content: `x.content`, `x['content']`, or an alias."""
    from jinja2 import nodes

    if isinstance(node, nodes.Name):
        return node.name in aliases
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _is_content(node.node, aliases)
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_content(node.node, aliases)
    if isinstance(node, nodes.CondExpr):
        return any(_is_content(side, aliases) for side in (node.expr1, node.expr2) if side is not None)
    return False


def _normalise_message(
    message: Mapping[str, Any], content_format: ContentFormat, markers: MediaMarkers | None
) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"a message must be an object with a role, not {message!r:.80}", param="messages")
    parts = _parts(message.get("content"), media=markers is not None)
    content: Any
    if content_format == "openai":
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": part.modality}
            for part in parts
        ]
    elif markers is None:
        content = "\n".join(part for part in parts if isinstance(part, str))
    else:
        content = markers.join(parts)
    normalised = {**message, "content": content}
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise RequestError(f"tool_calls must be a list, not {calls!r:.80}", param="messages")
        normalised["tool_calls"] = [_parse_arguments(call) for call in calls]
    return normalised


def _parts(content: Any, *, media: bool) -> list[str | _MediaPart]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, Iterable) or isinstance(content, Mapping):
        raise RequestError(
            f"message content must be a string or a list of parts, not {content!r:.80}", "messages"
        )
    return [part if isinstance(part, str) else _part(part, media=media) for part in content]


def _part(part: Any, *, media: bool) -> str | _MediaPart:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if media and kind in _MEDIA_PARTS:
        return _MediaPart(str(kind))
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise RequestError(
            f"content part of type {kind!r} is not supported; supported: {', '.join(_TEXT_PARTS)}",
            param="messages",
        )
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError(
            f"content part of type {kind!r} needs a string in {_TEXT_PARTS[kind]!r}", param="messages"
        )
    return text


def _parse_arguments(call: Any) -> dict[str, Any]:
    """Return a tool call with its arguments parsed: the API has JSON text, templates expect an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise RequestError(
            f"a tool call needs a function with a name and arguments, not {call!r:.80}", param="messages"
        )
    arguments = function.get("arguments") or {}
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"the arguments of tool call {name!r:.80} are not valid JSON: {error}", param="messages"
        ) from error
    if not isinstance(arguments, Mapping):
        raise RequestError(
            f"the arguments of tool call {name!r:.80} must be a JSON object, not {arguments!r:.80}",
            param="messages",
        )
    return {**call, "function": {**function, "arguments": arguments}}


def _tag_final_message(conversation: list[dict[str, Any]]) -> str:
    """Append a tag to the text of the last message, in place, to find the end of the message in the rendered
    prompt; return the text without the tag."""
    content = conversation[-1].get("content")
    if isinstance(content, str):
        conversation[-1]["content"] = content + _TAIL_TAG
        return content
    parts = [dict(part) for part in content] if isinstance(content, list) else []
    for part in reversed(parts):
        if isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + _TAIL_TAG
            conversation[-1]["content"] = parts
            return text
    raise RequestError(
        "`continue_final_message` needs a final message with text to continue", param="continue_final_message"
    )


def _cut_at_tag(text: str, final_text: str) -> str:
    """Return a rendered prompt (`text`) up to the tag after the final message, without what the template
    wrote behind the tag."""
    tag = _TAIL_TAG.strip()
    end = text.rfind(tag)
    if end < 0 or final_text.strip() not in text:
        raise RequestError(
            "`continue_final_message` is set, but the chat template does not contain the whole final message",
            param="continue_final_message",
        )
    # If the template stripped the space of the tag, it strips trailing spaces of messages as well.
    return text[:end] if text.startswith(_TAIL_TAG, end) else text[:end].rstrip()


def _render(template: str, variables: Mapping[str, Any]) -> str:
    from jinja2 import TemplateError

    compiled = _compile(template)
    try:
        return compiled.render(variables)
    except TemplateError as error:
        raise RequestError(f"the chat template rejected the conversation: {error.message}") from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # Exceptions of Python in the template's expressions.
        raise RequestError(f"the chat template failed on the conversation: {error}") from error


@lru_cache(maxsize=64)
def _compile(template: str) -> "Template":
    from jinja2 import TemplateSyntaxError

    try:
        return _environment().from_string(template)
    except (TemplateSyntaxError, RecursionError) as error:
        raise RequestError(f"the chat template is not valid Jinja: {error}", param="chat_template") from error


@cache
def _environment() -> "Environment":
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Renders the body of `{% generation %}`, which marks the model's output for training."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
