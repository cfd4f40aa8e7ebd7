"""Inputs of pooling models with content parts, single or as the two sides of a score."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from quire.errors import RequestError
from quire.frontend.chat import chat_prompt, pair_prompt
from quire.frontend.inputs import InputProcessor, Prompt
from quire.frontend.message_parts import parted_message
from quire.frontend.multimodal import media_inputs
from quire.frontend.pooling import pairs
from quire.multimodal.inputs import MediaInput
from quire.multimodal.processing import PreparedItem
from quire.text.chat_template import MediaMarkers, normalise

ROLES = ("query", "document")
"""Roles of the messages in chat templates of cross-encoders."""


@dataclass(slots=True)
class ScoreInput:
    """One input of a pooling model: a chat message with a text or content parts, and its media."""

    message: Mapping[str, Any]
    items: list[MediaInput]
    prepared: list[PreparedItem] = field(default_factory=list)
    """Processed media."""
    arguments: Mapping[str, Any] | None = None
    """mm_processor_kwargs of this input."""

    @classmethod
    def of(cls, role: str, content: Any, name: str, salt: str | None = None) -> "ScoreInput":
        """Build an input from its content; errors contain `name`."""
        items: list[MediaInput] = []
        message = parted_message({"role": role, "content": content}, f"{name}.content", items)
        for item in items:
            item.salt = salt
        return cls(message, items)


class ScoreInputs(NamedTuple):
    """The inputs of one prompt of a pooling model: a single input, or the two inputs that are compared for a
    score."""

    sides: tuple[ScoreInput, ...]
    is_chat: bool = False
    """Whether the input is a chat message, rendered with the model's chat template."""

    @property
    def items(self) -> list[MediaInput]:
        return [item for side in self.sides for item in side.items]


def sides_prompt(
    inputs: InputProcessor, sides: Sequence[ScoreInput], template: str | None, **options: Any
) -> Prompt:
    """Build the prompt of one or two inputs with a chat template; without a template the texts are
    concatenated, with placeholders for media. `options` are those of `chat_prompt`."""
    messages = [side.message for side in sides]
    prepared = [item for side in sides for item in side.prepared]
    if template is not None:
        return chat_prompt(inputs, messages, chat_template=template, prepared=prepared, **options)
    marks = MediaMarkers(inputs.media.mark, inputs.media.interleaves) if prepared else None
    texts = [str(message["content"]) for message in normalise(messages, "string", marks)]
    if len(texts) == 2 and not prepared:
        return pair_prompt(inputs, texts[0], texts[1], None)
    return inputs.parse("".join(texts), prepared=prepared)


# ---- offline calls


def named_inputs(firsts: list[Any], seconds: list[Any]) -> list[tuple[str, Any]]:
    """Return the inputs of both sides of a score, each after its name for errors, such as `data_1[0]`; raise
    a RequestError if the sides cannot be paired."""
    pairs(firsts, seconds)
    return [
        (f"data_{number}[{at}]" if len(side) > 1 else f"data_{number}", item)
        for number, side in enumerate((firsts, seconds), 1)
        for at, item in enumerate(side)
    ]


def embed_prompt(
    inputs: InputProcessor, name: str, item: Any, tokenization: Mapping[str, Any] | None
) -> Prompt:
    """Build the prompt of one input to embed: `item` is a dict with content parts, or any prompt that
    `InputProcessor.parse` accepts. Errors contain `name`."""
    if isinstance(item, Mapping) and item.get("content") is not None:
        return sides_prompt(inputs, [_prepare_side(inputs, item, "user", name)], None)
    special = bool((tokenization or {}).get("add_special_tokens", True))
    return inputs.parse(item, add_special_tokens=special)


def cross_encoder_prompts(
    inputs: InputProcessor, firsts: list[Any], seconds: list[Any], template: str | None
) -> list[Prompt]:
    """Build the prompts of a cross-encoder, one for each pair."""
    roles = [ROLES[0]] * len(firsts) + [ROLES[1]] * len(seconds)
    sides = [
        _prepare_side(inputs, item, role, name)
        for (name, item), role in zip(named_inputs(firsts, seconds), roles, strict=True)
    ]
    both = pairs(sides[: len(firsts)], sides[len(firsts) :])
    return [sides_prompt(inputs, pair, template) for pair in both]


def _prepare_side(inputs: InputProcessor, item: Any, role: str, name: str) -> ScoreInput:
    side = _side(item, role, name)
    side.prepared = inputs.media.prepare_sync(side.items, side.arguments)
    return side


def _side(item: Any, role: str, name: str) -> ScoreInput:
    if isinstance(item, str):
        return ScoreInput.of(role, item, name)
    content, text = (item.get("content"), item.get("prompt")) if isinstance(item, Mapping) else (None, None)
    if isinstance(content, list | tuple):
        return ScoreInput.of(role, content, name)
    if isinstance(text, str):
        arguments = item.get("mm_processor_kwargs")
        return ScoreInput({"role": role, "content": text}, media_inputs(item), arguments=arguments)
    raise RequestError(
        f"{name}: a cross-encoder scores pairs of texts, or dicts with `content` parts; got "
        f"{type(item).__name__}"
    )
