"""Tests of the relay of a replica: requests of ingresses on the core of this machine."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from quire.data.params import SamplingParams
from quire.data.request import Request
from quire.data.step_plan import FinishReason, StepOutput
from quire.data.wire import (
    Abort,
    Add,
    Missing,
    Ready,
    StepDone,
    ToCore,
    decode_from_core,
    decode_to_core,
    encode,
)
from quire.errors import EngineDead
from quire.frontend.core_relay import CoreRelay

DONE = FinishReason("length")


class Relayed:
    """A relay whose core is the test."""

    def __init__(self) -> None:
        self.num_ends = 0
        self.relay = CoreRelay("ipc://nowhere", "", health_timeout_s=30.0, on_end=self.count_end)
        self.sent: list[ToCore] = []
        self.relay.link.send = lambda message: self.sent.append(decode_to_core(encode(message)))  # type: ignore[method-assign]
        self.relay.link.handle(Ready(1, 1000, 10, 160))

    def count_end(self) -> None:
        self.num_ends += 1

    def step(self, tokens: dict[str, int], **fields: Any) -> None:
        self.relay.link.handle(StepDone(StepOutput([*tokens], [*tokens.values()], **fields)))

    def stream(self, *ids: str) -> Any:
        requests = [
            Request(id=id, tokens=[1, 2], params=SamplingParams(), prompt_len=2, limit=9, seed=0)
            for id in ids
        ]
        return self.relay.run(encode(Add.of(requests)))


def output(messages: list[bytes]) -> StepOutput:
    """Return the output of the only message."""
    (data,) = messages
    message = decode_from_core(data)
    assert isinstance(message, StepDone)
    return message.output


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 10))


def test_each_stream_gets_its_own_part_of_a_step() -> None:
    async def test() -> None:
        core = Relayed()
        assert (await core.relay.ready()).num_blocks == 10
        streams = core.stream("a", "b"), core.stream("c")
        reads = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await asyncio.sleep(0)
        assert [[request.id for request in add.all()] for add in core.sent if isinstance(add, Add)] == [
            ["a", "b"],
            ["c"],
        ]
        core.step({"a": 5, "b": 6, "c": 7, "other": 8})
        first, second = [output(await read) for read in reads]
        assert (first.request_ids, first.token_ids) == (["a", "b"], [5, 6])
        assert (second.request_ids, second.token_ids) == (["c"], [7])
        core.step({"a": 9, "c": 9}, finished={"a": DONE, "c": DONE})
        core.step({"b": 9}, finished={"b": DONE})
        assert len(await anext(streams[0])) == 2, "what arrived since the last read comes together"
        await anext(streams[1])
        for stream in streams:
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        assert len(core.sent) == 2, "ended requests are not aborted"

    run(test())


def test_closed_stream_aborts_what_still_runs() -> None:
    async def test() -> None:
        core = Relayed()
        stream = core.stream("a", "b", "c")
        read = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        core.relay.abort(["b", "unknown"])
        core.step({"a": 5}, finished={"a": DONE})
        await read
        await stream.aclose()
        aborts = [message.request_ids for message in core.sent if isinstance(message, Abort)]
        assert aborts == [["b"], ["c"]]

    run(test())


def test_stream_ends_if_all_sequences_are_aborted_or_arrays_are_missing() -> None:
    async def test() -> None:
        core = Relayed()
        stream = core.stream("a")
        read = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        core.relay.abort(["a"])
        with pytest.raises(StopAsyncIteration):
            await read
        stream = core.stream("b")
        read = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        core.relay.link.handle(Missing("b"))
        assert [decode_from_core(data) for data in await read] == [Missing("b")]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run(test())


def test_death_of_the_core_ends_all_streams() -> None:
    async def test() -> None:
        core = Relayed()
        core.relay.check()
        stream = core.stream("a")
        read = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        core.relay.link._handle_death()
        with pytest.raises(EngineDead, match="died"):
            await read
        assert core.num_ends == 1
        with pytest.raises(EngineDead, match="died"):
            core.relay.check()
        with pytest.raises(EngineDead, match="died"):
            await anext(core.stream("b"))

    run(test())
