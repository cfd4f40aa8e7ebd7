"""Sides: inputs of pooling models that come in parts, media among them, alone or as the two of a score."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.errors import RequestError
from quire.frontend.chat import chat_prompt, pair_prompt
from quire.frontend.inputs import InputProcessor, Prompt
from quire.frontend.message_parts import parted_message
from quire.frontend.multimodal import items_of
from quire.frontend.pooling import pairs
from quire.multimodal.inputs import MediaInput
from quire.multimodal.processing import PreparedItem
from quire.text.chat_template import MediaMarkers, normalise

ROLES = ("query", "document")
"""Of the messages that templates for cross-encoders read."""


@dataclass(slots=True)
class Side:
    """One input: a text, or parts as messages have them."""

    message: Mapping[str, Any]
    items: list[MediaInput]
    """Its media,"""
    prepared: list[PreparedItem] = field(default_factory=list)
    """and what was made of them."""
    arguments: Mapping[str, Any] | None = None
    """Those of its own for the processor."""

    @classmethod
    def of(cls, role: str, content: Any, name: str, salt: str | None = None) -> "Side":
        """An error calls it by its name."""
        items: list[MediaInput] = []
        message = parted_message({"role": role, "content": content}, f"{name}.content", items)
        for item in items:
            item.salt = salt
        return cls(message, items)


class Sides(NamedTuple):
    """One that is read alone, or two that are read as one prompt."""

    sides: tuple[Side, ...]
    is_talk: bool = False
    """Whether it is a message, which the model's chat template makes a prompt of."""

    @property
    def items(self) -> list[MediaInput]:
        return [item for side in self.sides for item in side.items]


def sides_prompt(
    inputs: InputProcessor, sides: Sequence[Side], template: str | None, **options: Any
) -> Prompt:
    """As a template joins them; without one their texts, in which marks stand for media, one behind the
    other. `options` are those of a chat."""
    messages = [side.message for side in sides]
    prepared = [item for side in sides for item in side.prepared]
    if template is not None:
        return chat_prompt(inputs, messages, chat_template=template, prepared=prepared, **options)
    marks = MediaMarkers(inputs.media.mark, inputs.media.interleaves) if prepared else None
    texts = [str(message["content"]) for message in normalise(messages, "string", marks)]
    if len(texts) == 2 and not prepared:
        return pair_prompt(inputs, texts[0], texts[1], None)
    return inputs.parse("".join(texts), prepared=prepared)


# ---- for callers who wait


def called(firsts: list[Any], seconds: list[Any]) -> list[tuple[str, Any]]:
    """The sides of a score, one behind the other, each with the name that an error calls it by."""
    pairs(firsts, seconds)
    return [
        (f"data_{which}[{at}]" if len(side) > 1 else f"data_{which}", each)
        for which, side in enumerate((firsts, seconds), 1)
        for at, each in enumerate(side)
    ]


def embedded(inputs: InputProcessor, name: str, item: Any, tokenization: Mapping[str, Any] | None) -> Prompt:
    """One that is embedded: parts in a dict, or any prompt."""
    if isinstance(item, Mapping) and item.get("content") is not None:
        return sides_prompt(inputs, [_ready(inputs, item, "user", name)], None)
    special = bool((tokenization or {}).get("add_special_tokens", True))
    return inputs.parse(item, add_special_tokens=special)


def compared(
    inputs: InputProcessor, firsts: list[Any], seconds: list[Any], template: str | None
) -> list[Prompt]:
    """Those of a cross-encoder, which reads both sides of a pair at once."""
    roles = [ROLES[0]] * len(firsts) + [ROLES[1]] * len(seconds)
    sides = [
        _ready(inputs, item, role, name)
        for (name, item), role in zip(called(firsts, seconds), roles, strict=True)
    ]
    both = pairs(sides[: len(firsts)], sides[len(firsts) :])
    return [sides_prompt(inputs, pair, template) for pair in both]


def _ready(inputs: InputProcessor, item: Any, role: str, name: str) -> Side:
    side = _side(item, role, name)
    side.prepared = inputs.media.prepare_now(side.items, side.arguments)
    return side


def _side(item: Any, role: str, name: str) -> Side:
    if isinstance(item, str):
        return Side.of(role, item, name)
    content, text = (item.get("content"), item.get("prompt")) if isinstance(item, Mapping) else (None, None)
    if isinstance(content, list | tuple):
        return Side.of(role, content, name)
    if isinstance(text, str):
        own = item.get("mm_processor_kwargs")
        return Side({"role": role, "content": text}, items_of(item), arguments=own)
    raise RequestError(
        f"{name}: a cross-encoder scores pairs of texts, or dicts of `content` in parts; got "
        f"{type(item).__name__}"
    )
