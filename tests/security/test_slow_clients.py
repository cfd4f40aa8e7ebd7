"""Clients that read slowly: the event loop's time for their waiting outputs is linear in the size of the
outputs. This is the class of CVE-2024-8939 (one request takes the time of all others)."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from quire.data.outputs import CompletionOutput, RequestOutput
from quire.frontend.output_stream import OutputBuffer, OutputStream

NUM_OUTPUTS = 20_000


class Counted(Sequence[int]):
    """Token ids that count how often one of them is read."""

    num_reads = 0

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, at: Any) -> Any:
        Counted.num_reads += 1
        return self._ids[at]

    def __iter__(self) -> Iterator[int]:
        Counted.num_reads += len(self._ids)
        return iter(self._ids)


class CountedText(str):
    """Text that counts the characters copied when it is concatenated."""

    num_copied = 0

    def __add__(self, other: str) -> "CountedText":
        CountedText.num_copied += len(self) + len(other)
        return CountedText(str(self) + str(other))

    __radd__ = __add__


def delta(at: int, *, finished: bool = False) -> RequestOutput:
    choice = CompletionOutput(0, CountedText("x"), Counted([at]), None, None)
    return RequestOutput("a", None, [1], None, [choice], finished)


def check_work(output: RequestOutput) -> None:
    (choice,) = output.outputs
    assert choice.text == "x" * NUM_OUTPUTS
    assert list(choice.token_ids) == list(range(NUM_OUTPUTS))
    assert Counted.num_reads <= 4 * NUM_OUTPUTS and CountedText.num_copied <= 4 * NUM_OUTPUTS


def test_waiting_outputs_are_copied_a_bounded_number_of_times() -> None:
    Counted.num_reads = CountedText.num_copied = 0
    gathered = OutputBuffer(delta(0))
    gathered.add(delta(1))
    kept = gathered._choices[0]._token_ids
    for at in range(2, NUM_OUTPUTS):
        gathered.add(delta(at))
        assert gathered._choices[0]._token_ids is kept, "the ids were copied for one more"
    check_work(gathered.joined())


def test_unread_outputs_are_merged_in_linear_time() -> None:
    Counted.num_reads = CountedText.num_copied = 0

    async def go() -> RequestOutput:
        answer: OutputStream[RequestOutput] = OutputStream("a", lambda _: None, lambda _: None)
        reading = asyncio.create_task(anext(answer))
        await asyncio.sleep(0)
        for at in range(NUM_OUTPUTS):
            answer.put(delta(at))
        return await reading

    check_work(asyncio.run(go()))
