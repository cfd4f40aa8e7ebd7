"""Tests of output streams: no output is lost with slow readers."""

import asyncio
from typing import Any

import pytest

from quire.data.outputs import CompletionOutput, Logprob, RequestOutput
from quire.errors import EngineError
from quire.frontend.output_stream import OutputBuffer, OutputStream


def output(*texts: str, finished: bool = False, prompt_logprobs: Any = None, **fields: Any) -> RequestOutput:
    """Return one delta with a text per choice."""
    choices = [
        CompletionOutput(index, text, [len(text)], None, [{7: Logprob(-1.0)}], **fields)
        for index, text in enumerate(texts)
    ]
    return RequestOutput("a", None, [1], prompt_logprobs, choices, finished)


class RecordedStream:
    """A stream and the calls that its engine received."""

    def __init__(self, **options: Any) -> None:
        self.begun, self.abandoned = 0, []  # type: ignore[var-annotated]
        self.answer = OutputStream("a", self._begin, self.abandoned.append, **options)

    def _begin(self, _: OutputStream) -> None:
        self.begun += 1


def test_two_deltas_are_merged_completely() -> None:
    """Check that prompt logprobs, which come only with the first delta, are kept."""
    gathered = OutputBuffer(output("a", "b", prompt_logprobs=[None]))
    gathered.add(output("c", finished=True, finish_reason="stop"))
    merged = gathered.joined()
    assert [item.text for item in merged.outputs] == ["ac", "b"] and merged.finished
    assert merged.prompt_logprobs == [None]
    assert merged.outputs[0].token_ids == [1, 1] and len(merged.outputs[0].logprobs or ()) == 2
    assert merged.outputs[0].finish_reason == "stop"


def test_newest_cumulative_output_is_read() -> None:
    """Check that cumulative outputs are not concatenated like deltas."""

    async def go() -> None:
        stream = RecordedStream(is_delta=False)
        reading = asyncio.create_task(anext(stream.answer))
        await asyncio.sleep(0)
        stream.answer.put(output("x", "one"))
        stream.answer.put(output("xy"))
        actual = await reading
        assert [item.text for item in actual.outputs] == ["xy", "one"]
        assert actual.outputs[0].token_ids == [2]

    asyncio.run(go())


def test_outputs_before_an_error_are_read_before_it_is_raised() -> None:
    async def go() -> None:
        stream = RecordedStream()
        reading = asyncio.create_task(anext(stream.answer))
        await asyncio.sleep(0)
        stream.answer.put(output("x"))
        stream.answer.put(output("y"))
        stream.answer.fail(EngineError("broken"))
        assert (await reading).outputs[0].text == "xy"
        for _ in range(2):
            with pytest.raises(EngineError, match="broken"):
                await anext(stream.answer)
        await stream.answer.aclose()
        assert stream.begun == 1 and stream.abandoned == ["a"]

    asyncio.run(go())


def test_stream_begins_at_the_first_read() -> None:
    async def go() -> None:
        stream = RecordedStream()
        await stream.answer.aclose()
        assert not stream.begun and not stream.abandoned

    asyncio.run(go())


def test_finished_stream_needs_no_abort() -> None:
    async def go() -> None:
        stream = RecordedStream()
        reading = asyncio.create_task(anext(stream.answer))
        await asyncio.sleep(0)
        stream.answer.put(output("x", finished=True))
        await reading
        assert [item async for item in stream.answer] == []
        await stream.answer.aclose()
        assert stream.abandoned == []

    asyncio.run(go())


def test_forwarded_outputs_arrive_at_once_and_end_with_the_last() -> None:
    async def go() -> None:
        stream, seen = RecordedStream(), []  # type: ignore[var-annotated]
        forwarding = asyncio.create_task(
            stream.answer.forward(lambda item: seen.append(item.outputs[0].text))
        )
        await asyncio.sleep(0)
        stream.answer.put(output("x"))
        assert seen == ["x"]
        stream.answer.put(output("y", finished=True))
        await forwarding
        await stream.answer.aclose()
        assert seen == ["x", "y"] and stream.abandoned == []

    asyncio.run(go())


@pytest.mark.parametrize("whose", ["engine", "reader"])
def test_errors_reach_the_forwarder(whose: str) -> None:
    async def go() -> None:
        stream = RecordedStream()

        def reader(_: RequestOutput) -> None:
            raise EngineError("reader")

        forwarding = asyncio.create_task(stream.answer.forward(reader))
        await asyncio.sleep(0)
        stream.answer.put(output("x")) if whose == "reader" else stream.answer.fail(EngineError("engine"))
        with pytest.raises(EngineError, match=whose):
            await forwarding
        await stream.answer.aclose()
        assert stream.abandoned == ["a"]

    asyncio.run(go())
