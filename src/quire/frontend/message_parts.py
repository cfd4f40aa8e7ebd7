"""Media parts of chat messages: parsing, and replacement by the placeholders of templates."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from PIL import Image

from quire.errors import RequestError
from quire.frontend.multimodal import read_embeds, read_image
from quire.multimodal.inputs import Base64Media, MediaInput, MediaLink, Source

Messages = Sequence[Mapping[str, Any]]
Reader = Callable[[str, Any], Source]


class _Kind(NamedTuple):
    modality: str
    field: str
    """Field with the content."""
    read: Reader


def _url(field: str, value: Any) -> Source:
    """Return the link in a part's field: a url string, or an object with a `url`. Errors name the `field`."""
    url = value.get("url") if isinstance(value, Mapping) else value
    if isinstance(url, str) and url:
        return MediaLink(url)
    raise RequestError(f"`{field}` needs a `url` string")


def _pil_image(field: str, value: Any) -> Source:
    if isinstance(value, Image.Image):
        return read_image(value)
    raise RequestError(f"`{field}` must be a PIL image, which only LLM.chat supports: send an `image_url`")


def _any_image(field: str, value: Any) -> Source:
    """Read an image in one of the forms that transformers accepts: a url, or an image object."""
    return _url(field, value) if isinstance(value, str | Mapping) else read_image(value)


def _audio(field: str, value: Any) -> Source:
    data = value.get("data") if isinstance(value, Mapping) else None
    if isinstance(data, str) and data:
        return Base64Media(data)
    raise RequestError(f"`{field}` needs `data`, the base64 of a file, and its `format`")


def _embeds(field: str, value: Any) -> Source:
    if isinstance(value, str | Mapping) or hasattr(value, "dtype"):
        return read_embeds(field.removesuffix("_embeds"), value)
    raise RequestError(f"`{field}` must be base64 of a saved tensor, or an object of such")


_KINDS = {
    "image_url": _Kind("image", "image_url", _url),
    "input_image": _Kind("image", "image_url", _url),
    "image_pil": _Kind("image", "image_pil", _pil_image),
    "image": _Kind("image", "image", _any_image),
    "image_embeds": _Kind("image", "image_embeds", _embeds),
    "audio_url": _Kind("audio", "audio_url", _url),
    "input_audio": _Kind("audio", "input_audio", _audio),
    "audio": _Kind("audio", "audio", _url),
    "audio_embeds": _Kind("audio", "audio_embeds", _embeds),
    "video_url": _Kind("video", "video_url", _url),
    "video": _Kind("video", "video", _url),
}
"""Kinds by the type of a part. A part without a type has the type of its field."""
_UNTYPED = ("image_url", "image_pil", "image", "image_embeds", "audio_url", "input_audio", "video_url")


def part_media(
    messages: Messages, salt: str | None = None
) -> tuple[list[Mapping[str, Any]], list[MediaInput]]:
    """Replace media by parts such as `{"type": "image"}`; return the messages and the media in order."""
    items: list[MediaInput] = []
    parted = [parted_message(m, f"messages[{at}].content", items) for at, m in enumerate(messages)]
    for item in items:
        item.salt = salt
    return parted, items


def parted_message(message: Mapping[str, Any], place: str, items: list[MediaInput]) -> Mapping[str, Any]:
    """Return a message with its media replaced by placeholder parts, and append the media to `items`. `place`
    is the path of the message's content, for errors."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    parts, before = [], len(items)
    for number, part in enumerate(content):
        kind = _kind(part)
        if kind is None:
            parts.append(part)
            continue
        items.append(_read_part(part, kind, f"{place}[{number}]"))
        parts.append({"type": items[-1].modality})
    return message if len(items) == before else {**message, "content": parts}


def _kind(part: Any) -> _Kind | None:
    if not isinstance(part, Mapping):
        return None
    kind = part.get("type")
    if kind is None:
        kind = next((name for name in _UNTYPED if part.get(name) is not None), None)
    return _KINDS.get(kind) if isinstance(kind, str) else None


def _read_part(part: Mapping[str, Any], kind: _Kind, place: str) -> MediaInput:
    uuid, value = part.get("uuid"), part.get(kind.field, part.get("url"))
    item = MediaInput(kind.modality, None, place, kind.field, uuid)
    if uuid is not None and not (isinstance(uuid, str) and uuid):
        raise item.wrong(RequestError(f"`uuid` must be a string, not {uuid!r:.40}"))
    if value is None and uuid is not None:
        return item
    try:
        item.source = kind.read(kind.field, value)
    except RequestError as error:
        raise item.wrong(error) from None
    return item
