"""Tests that requests are sent on time and recorded correctly."""

import asyncio
import json
import time
from typing import Any

import pytest
from fake_openai import FakeServer

from quire.bench.datasets import Query
from quire.bench.traffic import Record, drive, request_body, send_times, token_times
from quire.errors import ConfigError
from quire.remote.http import HttpClient
from quire.remote.openai import Choice, Chunk, Delta, Usage

QUERY = Query([1, 2, 3], 3, 5)


def driven(
    server: FakeServer,
    prompts: list[str],
    *,
    backend: str = "openai",
    path: str = "/v1/completions",
    **limits: Any,
) -> list[Record]:
    bodies = [request_body(Query(prompt, 2, 5), backend=backend, model="m", options={}) for prompt in prompts]

    async def main() -> list[Record]:
        client = HttpClient(server.url)
        try:
            return await drive(
                client,
                path,
                [(body, 2) for body in bodies],
                **{
                    "times": [0.0] * len(prompts),
                    "max_concurrency": None,
                    "on_done": lambda _: None,
                    **limits,
                },
            )
        finally:
            client.close()

    return asyncio.run(main())


def test_successful_request() -> None:
    with FakeServer() as server:
        done: list[Record] = []
        (record,) = driven(server, ["hi"], on_done=done.append)
    assert done == [record] and record.error == ""
    assert (record.prompt_len, record.output_len) == (7, 5), "the server's count is used if there is one"
    assert "".join(record.pieces) == "t0 t1 t2 t3 t4 "
    assert record.start < record.arrivals[0] <= record.arrivals[-1] <= record.end
    assert len(record.itls) == 4 and sum(record.itls) == pytest.approx(record.latency - record.ttft)


def test_role_chunk_of_a_chat_is_not_a_token() -> None:
    """Check that it affects neither the time to the first token nor the count."""
    with FakeServer(usage=False) as server:
        (record,) = driven(server, ["slow"], backend="openai-chat", path="/v1/chat/completions")
        assert server.requests[0]["max_completion_tokens"] == 5
    assert (record.prompt_len, record.output_len) == (2, 5)
    assert record.ttft > 0.04


def test_failures_are_recorded() -> None:
    prompts = ["hi", "fail", "refuse", "drop", "garbage", "error", "early", "hi"]
    with FakeServer() as server:
        records = driven(server, prompts)
    says = ["", "HTTP 500", "HTTP 400", "lost", "malformed", "engine died", "complete", ""]
    for record, text in zip(records, says, strict=True):
        assert text in record.error and bool(record.error) == bool(text)


def test_unreachable_server_fails_every_request() -> None:
    with FakeServer() as server:
        pass
    assert all("is it running?" in record.error for record in driven(server, ["a", "b"]))


@pytest.mark.parametrize("limit", [1, 3])
def test_max_concurrency_is_respected(limit: int) -> None:
    with FakeServer() as server:
        server.held_until = limit
        driven(server, ["slow"] * 6, max_concurrency=limit)
        assert server.peak == limit


def test_requests_are_sent_at_their_times() -> None:
    with FakeServer() as server:
        start = time.perf_counter()
        records = driven(server, ["hi"] * 3, times=[0.0, 0.1, 0.2])
    assert [record.start - start >= at for record, at in zip(records, (0.0, 0.1, 0.2), strict=True)] == [
        True
    ] * 3


def test_arrivals_are_poisson_at_burstiness_one() -> None:
    """Check the spread of the gaps."""
    times = send_times(4000, rate=20.0, burstiness=1.0, seed=1)
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert times[-1] == pytest.approx(200.0) and deviation / mean == pytest.approx(1.0, abs=0.08)
    even = send_times(4000, rate=20.0, burstiness=100.0, seed=1)
    gaps = [after - before for before, after in zip([0.0, *even], even, strict=False)]
    assert max(gaps) < 2 * 0.05
    assert times == send_times(4000, rate=20.0, burstiness=1.0, seed=1)
    assert send_times(3, rate=float("inf"), burstiness=1.0, seed=0) == [0.0] * 3


def test_request_bodies() -> None:
    body = json.loads(request_body(QUERY, backend="vllm", model="m", options={"ignore_eos": True}))
    assert body == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "prompt": [1, 2, 3],
        "max_tokens": 5,
        "ignore_eos": True,
    }
    with pytest.raises(ConfigError, match="--tokenizer"):
        request_body(QUERY, backend="openai-chat", model="m", options={})


def test_tokens_without_text_count_in_completions() -> None:
    """Check half a character, which is a token without text, and the empty last chunk of a chat, which is
    not.
    """
    record = Record(1)
    record.take(Chunk(choices=(Choice(text=""),)))
    record.take(Chunk(choices=(Choice(text="", finish_reason="stop"),)))
    record.take(Chunk(choices=(Choice(delta=Delta(content=""), finish_reason="stop"),)))
    assert record.output_len == 1
    record.take(Chunk(usage=Usage(prompt_tokens=9, completion_tokens=3)))
    assert (record.prompt_len, record.output_len) == (9, 3)


def test_chunk_counts_as_its_share_of_the_tokens() -> None:
    record = Record(1, arrivals=[1.0, 2.0], num_tokens=6)
    assert list(token_times([record])) == [(1.0, 3.0), (2.0, 3.0)]
    longer = Record(1, arrivals=[1.0, 2.0], pieces=["ab", "abcdef"], num_tokens=10)
    assert list(token_times([longer])) == [(1.0, 3.0), (2.0, 7.0)]


def test_usage_in_every_chunk_is_used() -> None:
    record = Record(1)
    for text, count in (("a", 1), ("bcdefgh", 3), ("i", 9)):
        record.take(Chunk(choices=(Choice(text=text),), usage=Usage(completion_tokens=count)))
    record.take(Chunk(usage=Usage(prompt_tokens=2, completion_tokens=9)))
    assert [num_tokens for _, num_tokens in token_times([record])] == [1, 2, 6]


@pytest.mark.parametrize("chat", [False, True])
def test_output_without_text_arrives_with_its_end(chat: bool) -> None:
    """Check special tokens in one chunk, which must be counted in some second."""
    record = Record(1)
    delta = Delta(content="") if chat else None
    if chat:
        record.take(Chunk(choices=(Choice(delta=delta),)))
    record.take(Chunk(choices=(Choice(delta=delta, finish_reason="length"),)))
    record.take(Chunk(usage=Usage(completion_tokens=128)))
    assert [num_tokens for _, num_tokens in token_times([record])] == [128]


def test_output_of_one_token_has_no_time_per_token() -> None:
    assert Record(1, arrivals=[1.0]).tpot is None
    assert Record(1, start=0.0, arrivals=[1.0, 4.0], num_tokens=4).tpot == 1.0
    assert Record(1, start=1.0, end=3.0).ttft == Record(1, start=1.0, end=3.0).latency == 2.0
