"""Tests of batch files: every line is indexed, and every invalid one has an error."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.batch.lines import answer_line, error_line, index, read_request
from quire.errors import ConfigError

URL = "/v1/completions"


def line(custom_id: object = "a", **changes: Any) -> str:
    fields = {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"prompt": "hi"}} | changes
    return json.dumps({name: value for name, value in fields.items() if value is not ...})


def write(folder: Path, *lines: str) -> Path:
    path = folder / "in.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_requests_are_read_from_their_offsets(tmp_path: Path) -> None:
    path = write(tmp_path, line("é"), "", "   ", line("b", body={"prompt": "ß", "seed": 2**70}))
    result = index(path)
    with path.open("rb") as file:
        requests = [read_request(file, item) for item in result]
    assert [request.custom_id for request in requests] == ["é", "b"]
    assert json.loads(bytes(requests[1].body)) == {"prompt": "ß", "seed": 2**70}, "bodies pass unchanged"
    assert all(item.error is None for item in result)


@pytest.mark.parametrize(
    ("content", "custom_id", "says"),
    [
        ("{", None, "not a batch request"),
        ("[1]", None, "not a batch request"),
        (line(5), None, "custom_id"),
        (line(...), None, "custom_id"),
        (line(body=...), "a", "body"),
        (line(body=[1]), "a", "Expected `object`"),
        (line(method="GET"), "a", "method 'GET' is not POST"),
        (line(url="/v1/audio"), "a", "known: /v1/chat/completions, /v1/completions"),
        (line(body={"prompt": "x", "stream": True}), "a", "cannot be streamed"),
    ],
)
def test_invalid_line_has_an_error(tmp_path: Path, content: str, custom_id: str | None, says: str) -> None:
    _, bad = index(write(tmp_path, line("first"), content))
    assert bad.custom_id == custom_id and bad.error is not None
    assert bad.error.startswith("line 2: ") and says in bad.error


def test_second_of_two_equal_ids_is_invalid(tmp_path: Path) -> None:
    first, other, second = index(write(tmp_path, line("a"), line("b"), line("a")))
    assert first.error is None and other.error is None
    assert second.error == "line 3: custom_id 'a' is already used by line 1"


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        index(tmp_path / "nowhere")


def test_output_lines(tmp_path: Path) -> None:
    good = json.loads(answer_line("a", status=200, request_id="r", body={"x": 1}))
    assert set(good) == {"id", "custom_id", "response", "error"} and good["error"] is None
    assert good["response"] == {"status_code": 200, "request_id": "r", "body": {"x": 1}}
    bad = json.loads(error_line(index(write(tmp_path, "{"))[0]))
    assert bad["custom_id"] is None and bad["response"] is None and "line 1" in bad["error"]["message"]
