"""Tests of the metrics of known traffic: every counter and every histogram has the exact value."""

from collections.abc import Iterator

import httpx
import pytest
from preloaded import Preloaded
from prometheus_client.parser import text_string_to_metric_families
from serve_process import SHARED_FLAGS, ServeProcess, eventually, greedy, parse_metrics, samples
from tiny_text import TextModel

from quire.metrics.tables import COUNTERS, HISTOGRAMS, LENGTHS, START_GAUGES

BLOCK = 16
PROMPT = list(range(100, 100 + 3 * BLOCK))


@pytest.fixture(scope="module")
def pair(
    tiny: TextModel, tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded
) -> Iterator[ServeProcess]:
    log = tmp_path_factory.mktemp("pair") / "log"
    with ServeProcess(
        str(tiny.path), *SHARED_FLAGS, "--api-server-count", "2", log=log, preloaded=preloaded
    ) as started:
        started.until_healthy(num_api=2)
        yield started
        started.end_cleanly()


PROCESS_PREFIXES = ("process_", "python_")


@pytest.fixture(params=["server", "pair"], ids=["one API process", "two API processes"])
def counted(request: pytest.FixtureRequest) -> ServeProcess:
    result: ServeProcess = request.getfixturevalue(request.param)
    eventually("earlier requests have ended", lambda: result.metrics()["num_requests_running"] == 0)
    return result


def ask(server: ServeProcess, **body: object) -> dict[str, object]:
    """Send a request on a new connection, so that any of the API processes may answer."""
    with httpx.Client(base_url=server.url, timeout=60) as fresh:
        reply = fresh.post("/v1/completions", json=greedy(**body))
    assert reply.status_code == 200, reply.text
    reply_body: dict[str, object] = reply.json()
    return reply_body


def scrape(server: ServeProcess) -> dict[str, float]:
    """Read the metrics several times, and check that every process gives the same values."""
    results = []
    for _ in range(6):
        with httpx.Client(base_url=server.url, timeout=60) as fresh:
            results.append(parse_metrics(fresh.get("/metrics").text))
    for name in [name for name in results[0] if name.startswith(PROCESS_PREFIXES)]:
        for item in results:
            del item[name]
    for name, value in results[0].items():
        if not name.startswith("avg_"):  # updated by a timer, between any two scrapes
            assert [item[name] for item in results] == [value] * len(results), name
    return results[0]


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return the engine's counters and histogram counts that have changed since `before`, and by how much."""
    names = [name for name in after if name.split(":")[0].endswith(("_total", "_count"))]
    return {
        name: after[name] - before[name]
        for name in names
        if not name.startswith("http_") and after[name] != before[name]
    }


def test_prometheus_parses_the_same_samples(counted: ServeProcess) -> None:
    """Catches a page that Prometheus refuses or reads differently."""
    text = counted.client.get("/metrics").text
    families = text_string_to_metric_families(text)
    expected = [
        (sample.name, sample.labels, sample.value) for family in families for sample in family.samples
    ]
    assert list(samples(text)) == expected and len(expected) > 100


def test_every_metric_exists_from_the_start(counted: ServeProcess) -> None:
    """Catches a metric that dashboards would miss until the first request."""
    metrics = scrape(counted)
    assert START_GAUGES.keys() <= metrics.keys()
    for name in COUNTERS:
        assert f"{name}_total" in metrics
    for name in HISTOGRAMS | LENGTHS:
        assert f"{name}_count" in metrics and f"{name}_bucket:+Inf" in metrics
    with httpx.Client(base_url=counted.url) as fresh:
        info = [line for line in fresh.get("/metrics").text.splitlines() if "cache_config_info{" in line]
    assert len(info) == 1 and 'num_gpu_blocks="8192"' in info[0] and 'block_size="16"' in info[0]


def test_every_counter_counts_known_traffic(counted: ServeProcess) -> None:
    """Catches events that are counted twice, never, or only in the process that answers."""
    before = scrape(counted)
    ask(counted, prompt=PROMPT, max_tokens=5)
    ask(counted, prompt=PROMPT, max_tokens=4, n=3, temperature=1.0)
    first = ask(counted, prompt=[7, 8, 9], max_tokens=1, return_token_ids=True)
    token = first["choices"][0]["token_ids"][0]  # type: ignore[index]
    ask(counted, prompt=[7, 8, 9], max_tokens=6, stop_token_ids=[token])
    after = scrape(counted)

    num_sequences, num_requests = 6, 4
    lengths = [5, 4, 4, 4, 1, 1]
    # All whole blocks but the last token, which must be computed to sample the next one.
    num_hits = 3 * (2 * BLOCK)
    expected = {
        "prompt_tokens_total": 4 * len(PROMPT) + 2 * 3,
        "prefix_cache_queries_total": 4 * len(PROMPT) + 2 * 3,
        "prefix_cache_hits_total": num_hits,
        "prompt_tokens_cached_total": num_hits,
        "generation_tokens_total": sum(lengths),
        "request_success_total:length": 5,
        "request_success_total:stop": 1,
        "time_to_first_token_seconds_count": num_requests,
        "inter_token_latency_seconds_count": sum(lengths) - num_sequences,
        "time_per_output_token_seconds_count": sum(lengths) - num_sequences,
        "request_time_per_output_token_seconds_count": 4,
        "request_params_n_count": num_requests,
        "request_max_num_generation_tokens_count": num_requests,
    } | {
        f"{name}_count": num_sequences
        for name in (
            *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds"),
            *("request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens"),
            *("request_generation_tokens", "request_params_max_tokens"),
            "request_prefill_kv_computed_tokens",
        )
    }
    changes = grown(before, after)
    assert {name: changes.get(name) for name in expected} == expected
    unexpected = set(changes) - set(expected)
    others = ("iteration_tokens", "prompt_tokens_by_source", "prefix_cache_misses")
    assert all(name.startswith(others) for name in unexpected)
    # The sequences of a request may share steps; each request has at least as many as its tokens.
    assert 5 + 4 + 1 + 1 <= changes["iteration_tokens_total_count"] <= sum(lengths)
    assert after["iteration_tokens_total_sum"] - before["iteration_tokens_total_sum"] == (
        expected["prompt_tokens_total"] - num_hits + sum(lengths) - num_sequences
    )
    assert after["request_generation_tokens_sum"] - before["request_generation_tokens_sum"] == sum(lengths)
    assert (after["num_requests_running"], after["num_requests_waiting"]) == (0, 0)
    assert after["kv_cache_usage_perc"] == after["gpu_cache_usage_perc"] == 0


def test_every_http_request_is_counted_once(counted: ServeProcess) -> None:
    """Catches requests that are counted only in the process that answered them."""
    before = scrape(counted)
    for _ in range(4):
        ask(counted, prompt=[7, 8, 9], max_tokens=1)
        with httpx.Client(base_url=counted.url, timeout=60) as fresh:
            assert fresh.post("/v1/completions", json={"prompt": -1}).status_code == 400
    after = scrape(counted)
    for status in ("2xx", "4xx"):
        name = f"http_requests_total:/v1/completions:POST:{status}"
        assert after[name] - before.get(name, 0) == 4
    name = "http_request_duration_highr_seconds_count"
    assert after[name] - before.get(name, 0) == 8


def test_stop_string_counts_only_returned_tokens(counted: ServeProcess) -> None:
    """Catches counted tokens that were computed after the stop and discarded."""
    free = ask(counted, prompt=[5, 6, 7], max_tokens=30)["choices"][0]["text"]  # type: ignore[index]
    before = scrape(counted)
    reply = ask(counted, prompt=[5, 6, 7], max_tokens=2000, stop=[free[8:11]])
    eventually("the engine is idle", lambda: counted.metrics()["num_requests_running"] == 0)
    changes = grown(before, scrape(counted))
    assert changes["request_success_total:stop"] == 1
    assert changes["generation_tokens_total"] == reply["usage"]["completion_tokens"]  # type: ignore[index]


def test_refused_request_is_not_counted(counted: ServeProcess) -> None:
    """Catches a refused request that reached the engine."""
    before = scrape(counted)
    with httpx.Client(base_url=counted.url) as fresh:
        assert fresh.post("/v1/completions", json=greedy(prompt=[10**6])).status_code == 400
    assert grown(before, scrape(counted)) == {}


def test_disconnect_is_counted_as_abort(counted: ServeProcess) -> None:
    before = scrape(counted)
    with counted.streaming(max_tokens=4000) as stream:
        next(stream)
        eventually("the request runs", lambda: counted.metrics()["num_requests_running"] == 1)
    gone = "request_success_total:abort"
    eventually("the abort is counted", lambda: counted.metrics()[gone] > before[gone])
    eventually("no request runs", lambda: counted.metrics()["num_requests_running"] == 0)
    changes = grown(before, scrape(counted))
    assert changes["request_success_total:abort"] == changes["request_prompt_tokens_count"] == 1
    assert scrape(counted)["kv_cache_usage_perc"] == 0
