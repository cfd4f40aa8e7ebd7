"""Latency targets over HTTP: requests that would miss theirs by far are refused, and the metrics count
results."""

import re

import httpx
from serve_process import ServeProcess, Start

PROMPT = "one two three four five six seven eight nine ten " * 4


def complete(server: ServeProcess, **fields: object) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0} | fields
    return server.client.post("/v1/completions", json=body)


def results(server: ServeProcess) -> dict[str, int]:
    """Return the number of requests by result."""
    found = re.findall(r'slo_requests_total\{.*result="(\w+)".*\} (\d+)', server.client.get("/metrics").text)
    return {result: int(count) for result, count in found if int(count)}


def test_requests_beyond_reach_are_refused_and_others_answered(start: Start) -> None:
    server = start("--slo-ttft-ms", "0.01", "--slo-itl-ms", "100000", "--slo-max-wait", "1")
    server.until_healthy()
    statuses = []
    while 429 not in statuses and len(statuses) < 60:  # the first requests show what a prompt costs
        statuses.append(complete(server).status_code)
    assert set(statuses) == {200, 429} and statuses[-1] == 429
    for fields in ({}, {"stream": True}):
        refused = complete(server, **fields)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "RateLimitError"
        assert "slo_ttft_ms" in refused.json()["error"]["message"]
    assert complete(server, slo_ttft_ms=100_000).status_code == 200
    assert complete(server, slo_ttft_ms=0.001).status_code == 429  # no earlier than the server's
    for wrong in (0, -1, "fast"):
        assert complete(server, slo_itl_ms=wrong).status_code == 400
    counts = results(server)
    assert counts["refused"] == 4 and counts["late_first_token"] == len(statuses) - 1 and counts["good"] == 1
    server.end_cleanly()
