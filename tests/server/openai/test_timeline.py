"""Tests of the x-request-timeline header and of per-request metrics."""

from typing import Any

import httpx
import pytest
from ask import CHAT, COMPLETIONS, MESSAGES, ask, chat, complete, events
from fake_engine import FakeEngine

from quire.data.outputs import RequestStateStats
from quire.data.prefix_miss import PrefixMiss
from quire.data.timeline import RequestTimeline
from quire.server.openai.timeline import TOKENS_AFTER, request_metrics

NAMES = {
    *("total_ms", "queue_ms", "prefill_ms", "decode_ms", "preempted_ms"),
    *("num_preemptions", "cached_tokens", "step_share_ms"),
    *("draft_tokens", "accepted_tokens", "cached_tokens_from_host", "cached_tokens_from_disk", "cache_miss"),
}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 4},
    COMPLETIONS: {"prompt": ["ab", "c"], "max_tokens": 4},
}


def timed(path: str, header: str | None = "1", **body: Any) -> httpx.Response:
    headers = {} if header is None else {"X-Request-Timeline": header}
    return ask("POST", path, json=BODIES[path] | body, headers=headers)


@pytest.mark.parametrize("path", BODIES)
def test_timeline_is_in_usage_and_header(path: str) -> None:
    answer = timed(path)
    timeline = answer.json()["usage"]["timeline"]
    assert timeline.keys() == NAMES
    num_prompts = 1 if path == CHAT else 2
    assert timeline["step_share_ms"] == pytest.approx(4 * num_prompts)
    assert timeline["cached_tokens"] == 3 * num_prompts
    short = dict(part.split("=") for part in answer.headers["x-request-timeline"].split(", "))
    assert timeline.pop("cache_miss") is None
    assert {name: float(value) for name, value in short.items()} == timeline


@pytest.mark.parametrize("stream", [False, True])
def test_miss_is_reported_with_the_text_of_the_request(stream: bool) -> None:
    engine = FakeEngine()
    engine.miss = PrefixMiss("differs", 6)
    headers = {"x-request-timeline": "1"}
    body = {"prompt": "Today is Tuesday. Say so.", "max_tokens": 2, "stream": stream}
    answer = ask("POST", COMPLETIONS, engine=engine, json=body, headers=headers)
    usage = events(answer)[-1]["usage"] if stream else answer.json()["usage"]
    assert usage["timeline"]["cache_miss"] == {
        "reason": "differs",
        "from_token": 6,
        "text": "Today is Tuesday. Say "[: 6 + TOKENS_AFTER],
    }
    if not stream:
        assert answer.headers["x-request-timeline"].endswith("cache_miss=differs")


def test_only_a_difference_has_text() -> None:
    engine = FakeEngine()
    engine.miss = PrefixMiss("evicted", 4, evicted_s=12.5, tier="device")
    answer = ask("POST", CHAT, engine=engine, json=BODIES[CHAT], headers={"x-request-timeline": "1"})
    miss = answer.json()["usage"]["timeline"]["cache_miss"]
    assert miss == {"reason": "evicted", "from_token": 4, "evicted_s": 12.5, "tier": "device"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4, "model": "fake"}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 4}),
    ],
)
def test_other_apis_return_the_timeline(path: str, body: dict[str, Any]) -> None:
    answer = ask("POST", path, json=body, headers={"x-request-timeline": "1"})
    assert answer.json()["usage"]["timeline"].keys() == NAMES and "x-request-timeline" in answer.headers


@pytest.mark.parametrize("options", [None, {"include_usage": True}])
@pytest.mark.parametrize("path", BODIES)
def test_stream_has_the_timeline_in_its_last_chunk(path: str, options: dict[str, bool] | None) -> None:
    chunks = events(timed(path, stream=True, stream_options=options))
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["timeline"].keys() == NAMES
    assert not any(chunk.get("usage") for chunk in chunks[:-1])


@pytest.mark.parametrize("header", [None, "0", "", "no"])
@pytest.mark.parametrize("path", BODIES)
def test_timeline_is_returned_only_on_request(path: str, header: str | None) -> None:
    answer = timed(path, header)
    assert "timeline" not in answer.json()["usage"] and "x-request-timeline" not in answer.headers
    assert not any("usage" in chunk for chunk in events(timed(path, header, stream=True)))


def test_beam_search_has_no_timeline() -> None:
    answer = timed(COMPLETIONS, use_beam_search=True, n=2, temperature=0)
    assert answer.status_code == 200 and "timeline" not in answer.json()["usage"]


def test_timelines_of_parallel_requests_are_joined() -> None:
    first = RequestStateStats(
        queued_ts=1.0, scheduled_ts=1.5, first_token_ts=2.0, last_token_ts=4.0, latency=3.5, preempted_s=0.25
    )
    second = RequestStateStats(queued_ts=1.0, scheduled_ts=3.0, latency=2.0, num_preemptions=2)
    joined = RequestTimeline.joined([RequestTimeline.of(first, 5), RequestTimeline.of(second, 7)])
    assert joined == RequestTimeline(3500.0, 2000.0, 500.0, 2000.0, 250.0, 2, 12, 0.0)


def test_request_metrics_match_vllm() -> None:
    stats = RequestStateStats(
        queued_ts=1.0, scheduled_ts=1.5, first_token_ts=2.0, last_token_ts=3.0, num_generation_tokens=10
    )
    assert request_metrics(stats) == {
        "time_to_first_token_ms": 500.0,
        "generation_time_ms": 1000.0,
        "queue_time_ms": 500.0,
        "mean_itl_ms": pytest.approx(1000 / 9),
        "tokens_per_second": pytest.approx(10 / 1.5),
    }
    assert set(request_metrics(RequestStateStats(num_generation_tokens=10)).values()) == {None}
    stats.num_generation_tokens = 1
    assert request_metrics(stats)["mean_itl_ms"] is None


def test_request_metrics_need_a_flag_and_one_choice() -> None:
    settings, usage = {"enable_per_request_metrics": True}, {"stream_options": {"include_usage": True}}
    for ask_it in (chat, complete):
        one = ask_it(settings=settings, max_tokens=4).json()["metrics"]
        assert one.keys() == request_metrics(RequestStateStats()).keys()
        *chunks, last = events(ask_it(settings=settings, max_tokens=4, stream=True, **usage))
        assert last["metrics"].keys() == one.keys() and not any("metrics" in chunk for chunk in chunks)
        assert ask_it(settings=settings, max_tokens=4, n=2).json()["metrics"] is None
        assert ask_it(max_tokens=4).json()["metrics"] is None
        assert "metrics" not in events(ask_it(max_tokens=4, stream=True, **usage))[-1]
    assert complete(settings=settings, prompt=["a", "b"]).json()["metrics"] is None
    for num_talks, is_told in ((1, True), (2, False)):
        body = {"messages": [MESSAGES] * num_talks, "max_tokens": 4}
        reply = ask("POST", f"{CHAT}/batch", settings=settings, json=body).json()
        assert (reply["metrics"] is not None) == is_told
