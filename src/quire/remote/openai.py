"""The parts of OpenAI's API that a client needs: models, streamed chunks, errors."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from quire.errors import QuireError
from quire.remote.http import HttpClient, Response
from quire.remote.sse import EventSplitter


class BadAnswer(QuireError):
    """The server answered with an error, or with something that cannot be understood."""


class Usage(msgspec.Struct, frozen=True):
    """Tokens, as the server counts them."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None


class Delta(msgspec.Struct, frozen=True):
    """What a chunk adds to a chat answer."""

    content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct, frozen=True):
    """What a chunk adds to one of the answers."""

    text: str = ""
    delta: Delta | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct, frozen=True):
    """An event of a streamed answer."""

    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    error: Any = None

    @property
    def text(self) -> str:
        """What this chunk adds to the first choice."""
        if not self.choices:
            return ""
        choice = self.choices[0]
        return choice.text if choice.delta is None else choice.delta.content or choice.delta.reasoning or ""


class ModelCard(msgspec.Struct, frozen=True):
    """A model that the server offers."""

    id: str
    root: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: tuple[ModelCard, ...] = ()


_read_chunk = msgspec.json.Decoder(Chunk).decode
_read_models = msgspec.json.Decoder(_Models).decode


class CompletionStream:
    """The events of one streamed answer, read as they come. What goes wrong is kept in `error`."""

    def __init__(self, on_chunk: Callable[[Chunk], None]) -> None:
        self.error: str | None = None
        self.complete = False
        """Whether a finish reason or the closing mark has come."""
        self._on_chunk = on_chunk
        self._split = EventSplitter().feed

    def feed(self, data: bytes) -> None:
        for event in self._split(data):
            if event == b"[DONE]":
                self.complete = True
            elif self.error is None:
                self._take(event)

    def _take(self, event: bytes) -> None:
        try:
            chunk = _read_chunk(event)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.error = f"malformed event {event[:80]!r}: {error}"
            return
        if chunk.error is not None:
            self.error = message_of(chunk.error)
            return
        if chunk.choices and chunk.choices[0].finish_reason is not None:
            self.complete = True
        self._on_chunk(chunk)


async def stream(
    client: HttpClient,
    path: str,
    body: bytes,
    on_chunk: Callable[[Chunk], None],
    *,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Ask for a streamed answer and hand on its chunks. BadAnswer if it is none, or breaks off."""
    reader = CompletionStream(on_chunk)
    response = await client.request("POST", path, body, on_body=reader.feed, headers=headers)
    if response.status != 200:
        raise BadAnswer(error_of(response))
    if reader.error is not None:
        raise BadAnswer(reader.error)
    if not reader.complete:
        raise BadAnswer("the stream ended before the answer was complete")


async def models(client: HttpClient, path: str = "/v1/models") -> tuple[ModelCard, ...]:
    """What the server serves, the first being its own choice."""
    response = await client.request("GET", path)
    if response.status != 200:
        raise BadAnswer(f"{client.base_url}{path}: {error_of(response)}")
    try:
        found = _read_models(response.body).data
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadAnswer(f"{client.base_url}{path} does not list models: {error}") from None
    if not found:
        raise BadAnswer(f"{client.base_url}{path} lists no model; name one yourself")
    return found


def bearer(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def error_of(response: Response) -> str:
    """A failed answer in one line."""
    try:
        content = msgspec.json.decode(response.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        content = response.body.decode(errors="replace")
    if isinstance(content, dict):
        content = content.get("error", content.get("detail", content))
    return f"HTTP {response.status}: {message_of(content)}"


def message_of(error: Any) -> str:
    """The message out of an error in any of the shapes that servers give it."""
    if isinstance(error, dict) and "message" in error:
        error = error["message"]
    return " ".join(str(error).split())[:500] or "no message"
