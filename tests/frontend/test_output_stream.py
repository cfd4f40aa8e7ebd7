"""An answer on its way: nothing of it is lost, however late its reader comes."""

import asyncio
from typing import Any

import pytest

from quire.data.outputs import CompletionOutput, Logprob, RequestOutput
from quire.errors import EngineError
from quire.frontend.output_stream import OutputBuffer, OutputStream


def output(*texts: str, finished: bool = False, prompt_logprobs: Any = None, **fields: Any) -> RequestOutput:
    """One delta: a text for each choice."""
    choices = [
        CompletionOutput(index, text, [len(text)], None, [{7: Logprob(-1.0)}], **fields)
        for index, text in enumerate(texts)
    ]
    return RequestOutput("a", None, [1], prompt_logprobs, choices, finished)


class Asked:
    """An answer, and what its engine was told."""

    def __init__(self, **options: Any) -> None:
        self.begun, self.abandoned = 0, []  # type: ignore[var-annotated]
        self.answer = OutputStream("a", self._begin, self.abandoned.append, **options)

    def _begin(self, _: OutputStream) -> None:
        self.begun += 1


def test_two_deltas_are_one_with_everything_in_it() -> None:
    """Prompt logprobs come with the first delta only: a merge must not lose them."""
    gathered = OutputBuffer(output("a", "b", prompt_logprobs=[None]))
    gathered.add(output("c", finished=True, finish_reason="stop"))
    merged = gathered.joined()
    assert [each.text for each in merged.outputs] == ["ac", "b"] and merged.finished
    assert merged.prompt_logprobs == [None]
    assert merged.outputs[0].token_ids == [1, 1] and len(merged.outputs[0].logprobs or ()) == 2
    assert merged.outputs[0].finish_reason == "stop"


def test_of_outputs_that_repeat_what_came_before_the_newest_is_read() -> None:
    """Put together as deltas are, they would say everything twice."""

    async def go() -> None:
        asked = Asked(is_delta=False)
        reading = asyncio.create_task(anext(asked.answer))
        await asyncio.sleep(0)
        asked.answer.put(output("x", "one"))
        asked.answer.put(output("xy"))
        found = await reading
        assert [each.text for each in found.outputs] == ["xy", "one"]
        assert found.outputs[0].token_ids == [2]

    asyncio.run(go())


def test_what_came_before_an_error_is_read_before_it_is_raised() -> None:
    async def go() -> None:
        asked = Asked()
        reading = asyncio.create_task(anext(asked.answer))
        await asyncio.sleep(0)
        asked.answer.put(output("x"))
        asked.answer.put(output("y"))
        asked.answer.fail(EngineError("broken"))
        assert (await reading).outputs[0].text == "xy"
        for _ in range(2):
            with pytest.raises(EngineError, match="broken"):
                await anext(asked.answer)
        await asked.answer.aclose()
        assert asked.begun == 1 and asked.abandoned == ["a"]

    asyncio.run(go())


def test_an_answer_begins_when_it_is_first_asked_for() -> None:
    async def go() -> None:
        asked = Asked()
        await asked.answer.aclose()
        assert not asked.begun and not asked.abandoned

    asyncio.run(go())


def test_a_finished_answer_is_over_and_needs_no_abort() -> None:
    async def go() -> None:
        asked = Asked()
        reading = asyncio.create_task(anext(asked.answer))
        await asyncio.sleep(0)
        asked.answer.put(output("x", finished=True))
        await reading
        assert [each async for each in asked.answer] == []
        await asked.answer.aclose()
        assert asked.abandoned == []

    asyncio.run(go())


def test_forwarded_outputs_arrive_at_once_and_end_with_the_last() -> None:
    async def go() -> None:
        asked, seen = Asked(), []  # type: ignore[var-annotated]
        forwarding = asyncio.create_task(asked.answer.forward(lambda each: seen.append(each.outputs[0].text)))
        await asyncio.sleep(0)
        asked.answer.put(output("x"))
        assert seen == ["x"]
        asked.answer.put(output("y", finished=True))
        await forwarding
        await asked.answer.aclose()
        assert seen == ["x", "y"] and asked.abandoned == []

    asyncio.run(go())


@pytest.mark.parametrize("whose", ["engine", "reader"])
def test_errors_reach_whoever_forwards(whose: str) -> None:
    async def go() -> None:
        asked = Asked()

        def reader(_: RequestOutput) -> None:
            raise EngineError("reader")

        forwarding = asyncio.create_task(asked.answer.forward(reader))
        await asyncio.sleep(0)
        asked.answer.put(output("x")) if whose == "reader" else asked.answer.fail(EngineError("engine"))
        with pytest.raises(EngineError, match=whose):
            await forwarding
        await asked.answer.aclose()
        assert asked.abandoned == ["a"]

    asyncio.run(go())
