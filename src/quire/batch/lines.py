"""The lines of a batch file: positions and errors of the requests."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import msgspec

from quire.errors import ConfigError
from quire.remote.http import Response
from quire.remote.openai import error_of

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/score", "/rerank")


class BatchRequest(msgspec.Struct, frozen=True):
    """A parsed request of the input file."""

    custom_id: str
    url: str
    body: msgspec.Raw
    """Body of the request to the endpoint `url`, as unparsed JSON."""
    method: str = "POST"


class _Body(msgspec.Struct):
    stream: bool | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input file: its offset and size in bytes, its custom_id, and its error if it is
    invalid."""

    offset: int
    num_bytes: int
    custom_id: str | None
    error: str | None
    """Reason why the line is not a valid request; None if it is."""


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Error(msgspec.Struct):
    message: str


class _Entry(msgspec.Struct):
    """A line of the output file: the response to a request, or the error of an invalid one."""

    custom_id: str | None
    response: _Response | None
    error: _Error | None


_read_entry = msgspec.json.Decoder(_Entry).decode
_read = msgspec.json.Decoder(BatchRequest).decode
_read_body = msgspec.json.Decoder(_Body).decode
_read_any = msgspec.json.Decoder(dict[str, Any]).decode


def index(path: Path) -> list[Line]:
    """Return all lines of a batch file that are not blank, without their content, since the file may be
    larger than the memory. Raise a ConfigError if the file cannot be read."""
    try:
        with path.open("rb") as file:
            return list(_index_lines(file))
    except OSError as error:
        raise ConfigError(f"the batch file {path} cannot be read: {error.strerror}") from None


def read_request(file: BinaryIO, line: Line) -> BatchRequest:
    file.seek(line.offset)
    return _read(file.read(line.num_bytes))


def answer_line(custom_id: str, *, status: int, request_id: str, body: Any) -> bytes:
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _output(custom_id, response, None)


def error_line(line: Line) -> bytes:
    return _output(line.custom_id, None, {"code": "invalid_request", "message": line.error})


def refusal(entry: bytes) -> str | None:
    """Return the reason, in one line, for which the request of the output line `entry` was refused; None if
    it was answered."""
    output = _read_entry(entry)
    if output.error is not None:
        return output.error.message
    if output.response is None or output.response.status_code == 200:
        return None
    answer = Response(output.response.status_code, {}, bytes(output.response.body))
    return f"{output.custom_id}: {error_of(answer)}"


def _output(custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    entry = {"id": f"batch_req_{uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(entry) + b"\n"


def _index_lines(file: BinaryIO) -> Iterator[Line]:
    seen: dict[str, int] = {}
    offset = 0
    for number, content in enumerate(file, 1):
        start, offset = offset, offset + len(content)
        if not content.strip():
            continue
        custom_id, error = _check_line(content)
        if custom_id is not None and custom_id in seen:
            error = f"custom_id {custom_id!r} is already used by line {seen[custom_id]}"
        elif custom_id is not None:
            seen[custom_id] = number
        yield Line(start, len(content), custom_id, f"line {number}: {error}" if error else None)


def _check_line(content: bytes) -> tuple[str | None, str | None]:
    """Return the custom_id of a line, if it has one, and its error, if there is one."""
    try:
        request = _read(content)
        body = _read_body(request.body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return _id_of(content), f"not a batch request: {error}"
    if request.method != "POST":
        return request.custom_id, f"method {request.method!r} is not POST"
    if request.url not in URLS:
        return request.custom_id, f"unknown url {request.url!r}; known: {', '.join(URLS)}"
    if body.stream:
        return request.custom_id, "batch answers cannot be streamed: leave `stream` out"
    return request.custom_id, None


def _id_of(content: bytes) -> str | None:
    """Return the custom_id of a line that is not a valid request; None if it has none."""
    try:
        value = _read_any(content).get("custom_id")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return value if isinstance(value, str) else None
