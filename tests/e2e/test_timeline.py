"""Tests of request timelines over HTTP: the parts of a request's time add up, and the page shows them."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from serve_process import ServeProcess


def ask(server: ServeProcess, **body: Any) -> httpx.Response:
    defaults = {"prompt": list(range(5, 45)), "max_tokens": 24, "ignore_eos": True, "temperature": 0}
    headers = {"x-request-timeline": "1"}
    return server.client.post("/v1/completions", json=defaults | body, headers=headers)


def check(timeline: dict[str, Any]) -> None:
    parts = timeline["queue_ms"] + timeline["prefill_ms"] + timeline["decode_ms"]
    assert parts > 0 and timeline["prefill_ms"] > 0 and timeline["decode_ms"] > 0
    assert parts <= timeline["total_ms"] + 50  # arrival is measured by another clock
    assert 0 < timeline["step_share_ms"] <= timeline["prefill_ms"] + timeline["decode_ms"] + 1
    assert timeline["num_preemptions"] == 0 == timeline["preempted_ms"]


def test_parts_of_the_timeline_add_up(server: ServeProcess) -> None:
    whole = ask(server)
    check(whole.json()["usage"]["timeline"])
    assert "prefill_ms=" in whole.headers["x-request-timeline"]
    again = ask(server).json()["usage"]["timeline"]
    assert again["cached_tokens"] == 32
    streamed = ask(server, stream=True).text.split("\n\n")
    check(json.loads(streamed[-3].removeprefix("data: "))["usage"]["timeline"])
    stopped = ask(server, n=1, stop=["a", "e", "i", "o", "u", " "][:4], max_tokens=64).json()["usage"]
    assert stopped["timeline"]["step_share_ms"] > 0


def test_step_shares_of_concurrent_requests(server: ServeProcess) -> None:
    """Each request is charged a part of the shared steps, and all parts together are no more than the elapsed
    time."""
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda seed: ask(server, seed=seed, prompt=[seed] * 30), range(8)))
    timelines = [answer.json()["usage"]["timeline"] for answer in answers]
    for timeline in timelines:
        check(timeline)
    assert sum(timeline["step_share_ms"] for timeline in timelines) <= 8 * max(
        timeline["total_ms"] for timeline in timelines
    )


def test_page_shows_the_slowest_requests(server: ServeProcess) -> None:
    ask(server, max_tokens=100, request_id="slow-one")
    with server.client.stream("GET", "/page/events") as events:
        line = next(line for line in events.iter_lines() if line.startswith("data: "))
    slowest = json.loads(line.removeprefix("data: "))["slowest"]
    assert slowest and {"id", "total_ms", "queue_ms", "prefill_ms", "decode_ms"} <= slowest[0].keys()
    assert slowest == sorted(slowest, key=lambda item: -item["total_ms"])
