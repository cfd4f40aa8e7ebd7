"""Why was this slow, over HTTP: the parts of a request's time fit together, and the page shows them."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from serve_process import ServeProcess


def ask(server: ServeProcess, **body: Any) -> httpx.Response:
    asked = {"prompt": list(range(5, 45)), "max_tokens": 24, "ignore_eos": True, "temperature": 0}
    headers = {"x-request-timeline": "1"}
    return server.client.post("/v1/completions", json=asked | body, headers=headers)


def check(told: dict[str, Any]) -> None:
    parts = told["queue_ms"] + told["prefill_ms"] + told["decode_ms"]
    assert parts > 0 and told["prefill_ms"] > 0 and told["decode_ms"] > 0
    assert parts <= told["total_ms"] + 50  # arrival is measured by another clock
    assert 0 < told["step_share_ms"] <= told["prefill_ms"] + told["decode_ms"] + 1
    assert told["num_preemptions"] == 0 == told["preempted_ms"]


def test_the_parts_of_a_requests_time_fit_together(server: ServeProcess) -> None:
    whole = ask(server)
    check(whole.json()["usage"]["timeline"])
    assert "prefill_ms=" in whole.headers["x-request-timeline"]
    again = ask(server).json()["usage"]["timeline"]
    assert again["cached_tokens"] == 32
    streamed = ask(server, stream=True).text.split("\n\n")
    check(json.loads(streamed[-3].removeprefix("data: "))["usage"]["timeline"])
    stopped = ask(server, n=1, stop=["a", "e", "i", "o", "u", " "][:4], max_tokens=64).json()["usage"]
    assert stopped["timeline"]["step_share_ms"] > 0


def test_shares_of_a_crowd_are_shares(server: ServeProcess) -> None:
    """Each took a part of the steps that all were in: together no more than the time that passed."""
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda seed: ask(server, seed=seed, prompt=[seed] * 30), range(8)))
    told = [answer.json()["usage"]["timeline"] for answer in answers]
    for each in told:
        check(each)
    assert sum(each["step_share_ms"] for each in told) <= 8 * max(each["total_ms"] for each in told)


def test_the_page_has_the_slowest(server: ServeProcess) -> None:
    ask(server, max_tokens=100, request_id="slow-one")
    with server.client.stream("GET", "/page/events") as events:
        line = next(line for line in events.iter_lines() if line.startswith("data: "))
    slowest = json.loads(line.removeprefix("data: "))["slowest"]
    assert slowest and {"id", "total_ms", "queue_ms", "prefill_ms", "decode_ms"} <= slowest[0].keys()
    assert slowest == sorted(slowest, key=lambda each: -each["total_ms"])
