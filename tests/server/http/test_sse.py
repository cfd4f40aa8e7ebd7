"""Tests of server-sent events: their encoding, and their delivery to slow clients."""

import asyncio
import json
from collections.abc import Callable

import pytest

from quire.data.outputs import CompletionOutput, RequestOutput
from quire.server.http.sse import StreamWriter, chunk_head, event, quote

NASTY = ['a"b\\c', "line\nfeed\r\n", "\x00\x1f\x7f", "\x85 \u2028 \u2029", "żółw 🙂", "</script>", ""]


@pytest.mark.parametrize("text", NASTY)
def test_event_is_one_line_and_decodes_to_the_text(text: str) -> None:
    """A client that splits at U+2028 or U+0085 would lose the rest of the chunk."""
    quoted = quote(text).decode()
    assert json.loads(quoted) == text and len(quoted.splitlines()) == 1
    whole = event({"text": text}).decode()
    assert len(whole.splitlines()) == 2 and json.loads(whole.removeprefix("data: ")) == {"text": text}


@pytest.mark.parametrize("name", ["m", 'odd "}\n\n', '"index":0'])
def test_assembled_chunk_equals_one_encoded_at_once(name: str) -> None:
    frame = {"id": name, "model": name}
    pieces = chunk_head(frame) + b'{"index":1,"text":' + quote("x") + b"}]}\n\n"
    assert json.loads(pieces.removeprefix(b"data: ")) == frame | {"choices": [{"index": 1, "text": "x"}]}


class SlowConnection:
    """Connection of a client that reads when the test sets `reads`."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_full = False
        self.reads = asyncio.Event()

    async def drained(self) -> None:
        await self.reads.wait()
        self.is_full = False

    def write(self, body: bytes) -> None:
        self.written.append(body)


class Script:
    """Outputs that the test pushes."""

    def __init__(self) -> None:
        self.over = asyncio.Event()

    async def forward(
        self, reader: Callable[[RequestOutput], None], text_reader: Callable[[str, int], None] | None = None
    ) -> None:
        self.push, self.push_text = reader, text_reader
        await self.over.wait()


class Texts:
    """Encoder with chunks that are the text itself."""

    text_only = True

    def encode(self, output: RequestOutput) -> bytes:
        return output.outputs[0].text.encode()

    def encode_text(self, text: str, num_tokens: int) -> bytes:
        return text.encode() * bool(num_tokens)

    def finish(self) -> bytes:
        return b""


async def run_event_loop() -> None:
    """Run more rounds of the event loop than any task here needs."""
    for _ in range(20):
        await asyncio.sleep(0)


def delta(text: str, id: str = "a") -> RequestOutput:
    return RequestOutput(id, None, [1], None, [CompletionOutput(0, text, [1], None, None)], False)


async def test_slow_client_gets_merged_events() -> None:
    """Waiting events are merged: a client that does not read costs no more than its text."""
    connection, script = SlowConnection(), Script()
    task = asyncio.create_task(StreamWriter(connection, Texts()).run(script))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    script.push(delta("one"))
    assert script.push_text is not None
    script.push_text(" ", 1)
    assert connection.written == [b"one", b" "]
    connection.is_full = True
    script.push(delta("two "))
    assert script.push_text is not None
    script.push_text("three ", 1)
    script.push(delta("four"))
    script.push(delta("other", id="b"))
    await run_event_loop()
    assert connection.written == [b"one", b" "]
    script.over.set()
    await run_event_loop()
    assert not task.done(), "an answer is not over before all of it is sent"
    connection.reads.set()
    await task
    assert connection.written == [b"one", b" ", b"two three four", b"other"]


@pytest.mark.parametrize("goes_on", [False, True])
async def test_encoder_failure_on_a_held_output_ends_the_stream(goes_on: bool) -> None:
    """Without that piece the text would be wrong."""

    class Broken(Texts):
        def encode(self, output: RequestOutput) -> bytes:
            if "bad" in output.outputs[0].text:
                raise ValueError("cannot be written")
            return super().encode(output)

    connection, script = SlowConnection(), Script()
    task = asyncio.create_task(StreamWriter(connection, Broken()).run(script))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    connection.is_full = True
    script.push(delta("bad"))
    connection.reads.set()
    await run_event_loop()
    assert connection.written == []
    if goes_on:
        for push in (lambda: script.push(delta("more")), lambda: script.push_text("more", 1)):  # type: ignore[misc]
            with pytest.raises(ValueError, match="cannot be written"):
                push()
    script.over.set()
    with pytest.raises(ValueError, match="cannot be written"):
        await task
    assert connection.written == [] and len(asyncio.all_tasks()) == 1


async def test_cancelled_stream_leaves_no_task() -> None:
    connection, script = SlowConnection(), Script()
    connection.is_full = True
    task = asyncio.create_task(StreamWriter(connection, Texts()).run(script))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    script.push(delta("never read"))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await run_event_loop()
    assert len(asyncio.all_tasks()) == 1 and connection.written == []
