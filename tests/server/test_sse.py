"""The bytes of events."""

import json

import pytest

from quire.server.sse import event, opening, quote

NASTY = ['a"b\\c', "line\nfeed\r\n", "\x00\x1f\x7f", "\x85 \u2028 \u2029", "żółw 🙂", "</script>", ""]


@pytest.mark.parametrize("text", NASTY)
def test_a_text_is_one_line_to_any_reader_and_reads_back(text: str) -> None:
    """A client that splits at U+2028 or U+0085 would lose the rest of the chunk."""
    quoted = quote(text).decode()
    assert json.loads(quoted) == text and len(quoted.splitlines()) == 1
    whole = event({"text": text}).decode()
    assert len(whole.splitlines()) == 2 and json.loads(whole.removeprefix("data: ")) == {"text": text}


@pytest.mark.parametrize("name", ["m", 'odd "}\n\n', '"index":0'])
def test_a_chunk_put_together_equals_one_encoded_whole(name: str) -> None:
    frame = {"id": name, "model": name}
    pieces = opening(frame) + b'{"index":1,"text":' + quote("x") + b"}]}\n\n"
    assert json.loads(pieces.removeprefix(b"data: ")) == frame | {"choices": [{"index": 1, "text": "x"}]}
