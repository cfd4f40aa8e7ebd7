"""The client side of OpenAI's API: models, streamed chunks, errors."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from quire.errors import QuireError
from quire.remote.http import HttpClient, Response
from quire.remote.sse import EventSplitter


class BadAnswer(QuireError):
    """Raised if the server returned an error or an invalid response."""


class PromptDetails(msgspec.Struct, frozen=True):
    """OpenAI's `prompt_tokens_details` of a usage: the number of prompt tokens from the prefix cache."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """OpenAI's `usage` of a response: the numbers of prompt and output tokens that the server counted."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class Delta(msgspec.Struct, frozen=True):
    """OpenAI's `delta`: the text and reasoning that a chunk of a stream adds to a chat message."""

    content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct, frozen=True):
    """A choice in a chunk of a stream: the text and tokens to append to it."""

    text: str = ""
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None
    """Ids of the output tokens of this chunk, if the request has `return_token_ids`."""


class Chunk(msgspec.Struct, frozen=True):
    """An event of a streamed response."""

    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    error: Any = None

    @property
    def text(self) -> str:
        """Return the text that this chunk adds to the first choice."""
        if not self.choices:
            return ""
        choice = self.choices[0]
        return choice.text if choice.delta is None else choice.delta.content or choice.delta.reasoning or ""


class ModelCard(msgspec.Struct, frozen=True):
    """A model that the server lists at /v1/models."""

    id: str
    root: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: tuple[ModelCard, ...] = ()


_read_chunk = msgspec.json.Decoder(Chunk).decode
_read_models = msgspec.json.Decoder(_Models).decode


class CompletionStream:
    """Parser of the server-sent events of one streamed response. It passes each chunk to `on_chunk`; an error
    in the stream is not raised but stored in `error`."""

    def __init__(self, on_chunk: Callable[[Chunk], None]) -> None:
        self.error: str | None = None
        self.complete = False
        """Whether a finish reason or [DONE] was received."""
        self._on_chunk = on_chunk
        self._split = EventSplitter().feed

    def feed(self, data: bytes) -> None:
        for event in self._split(data):
            if event == b"[DONE]":
                self.complete = True
            elif self.error is None:
                self._read_event(event)

    def _read_event(self, event: bytes) -> None:
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
    """POST `body` to `path`, pass each chunk of the streamed response to `on_chunk`, and return at its end.
    Raise BadAnswer if the response is an error or incomplete."""
    reader = CompletionStream(on_chunk)
    response = await client.request("POST", path, body, on_body=reader.feed, headers=headers)
    if response.status != 200:
        raise BadAnswer(error_of(response))
    if reader.error is not None:
        raise BadAnswer(reader.error)
    if not reader.complete:
        raise BadAnswer("the stream ended before the answer was complete")


async def models(client: HttpClient, path: str = "/v1/models") -> tuple[ModelCard, ...]:
    """Return the models that the server lists, its default first. Raise BadAnswer if it lists none."""
    response = await client.request("GET", path)
    if response.status != 200:
        raise BadAnswer(f"{client.base_url}{path}: {error_of(response)}")
    try:
        cards = _read_models(response.body).data
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadAnswer(f"{client.base_url}{path} does not list models: {error}") from None
    if not cards:
        raise BadAnswer(f"{client.base_url}{path} lists no model; pass a model name")
    return cards


def bearer(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def error_of(response: Response) -> str:
    """Return the error of a failed response as one line: status, message and remedy."""
    try:
        content = msgspec.json.decode(response.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        content = response.body.decode(errors="replace")
    if isinstance(content, dict):
        content = content.get("error", content.get("detail", content))
    remedy = "; give --api-key or set OPENAI_API_KEY" if response.status == 401 else ""
    return f"HTTP {response.status}: {message_of(content)}{remedy}"


def message_of(error: Any) -> str:
    """Return the message of a decoded error (an object with `message`, or a text) as one line."""
    if isinstance(error, dict) and "message" in error:
        error = error["message"]
    return " ".join(str(error).split())[:500] or "no message"
