"""Tests of the metrics of known traffic, under the names that dashboards use."""

import re
import time
from typing import Any

import pytest
from tiny_text import TextModel, open_text, text_model

from quire import LLM, SamplingParams
from quire.data.prefix_miss import MISS_REASONS
from quire.data.stats import FinishedSequence, FrontStats, SequenceTimes, StepStats
from quire.errors import RequestError
from quire.metrics.engine import EngineMetrics
from quire.metrics.pages import MetricsLayout, MetricsPages, length_buckets
from quire.metrics.reader import Counter, Gauge, Histogram

PROMPT = list(range(20, 37))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


@pytest.fixture
def llm(model: TextModel) -> LLM:
    return open_text(model, disable_log_stats=False, served_model_name="tiny")


def run(llm: LLM, prompts: Any, **fields: Any) -> None:
    fields = {"temperature": 0, "max_tokens": 4, "ignore_eos": True} | fields
    llm.generate(prompts, SamplingParams(**fields), use_tqdm=False)


def values(llm: LLM) -> dict[str, float]:
    """Return counters and gauges by name, histogram counts and sums, and name:reason for those labelled by
    reason."""
    results: dict[str, float] = {}
    for metric in llm.get_metrics():
        assert metric.name.startswith("vllm:")
        reason = metric.labels.get("finished_reason")
        name = metric.name.removeprefix("vllm:") + (f":{reason}" if reason else "")
        if isinstance(metric, Histogram):
            results[f"{name}.count"], results[f"{name}.sum"] = metric.count, metric.sum
        else:
            assert isinstance(metric, Counter | Gauge)
            results[name] = metric.value
    return results


def test_everything_is_zero_before_the_first_request(llm: LLM) -> None:
    before = values(llm)
    assert before.pop("cache_config_info") == 1
    assert before.pop("max_num_seqs") == llm.config.scheduler.max_num_seqs
    assert before.pop("engine_start_time_seconds") <= time.time()
    assert set(before.values()) == {0}


def test_counters_of_known_traffic(llm: LLM) -> None:
    run(llm, [PROMPT, [5, 6]])
    run(llm, PROMPT)
    after = values(llm)
    assert after["prompt_tokens"] == after["prefix_cache_queries"] == 17 + 2 + 17
    assert after["prefix_cache_hits"] == after["prompt_tokens_cached"] == 16
    assert after["generation_tokens"] == 12 and after["num_preemptions"] == 0
    assert after["request_success:length"] == 3 and after["request_success:stop"] == 0
    assert after["request_prompt_tokens.sum"] == 36 and after["request_generation_tokens.sum"] == 12
    assert after["request_prefill_kv_computed_tokens.sum"] == 20
    assert after["request_params_max_tokens.sum"] == 12 and after["request_params_n.sum"] == 3
    # Two runs of four steps; the cached tokens are not computed.
    assert after["iteration_tokens_total.count"] == 8
    assert after["iteration_tokens_total.sum"] == 19 + 3 * 2 + 1 + 3
    assert after["inter_token_latency_seconds.count"] == after["time_per_output_token_seconds.count"] == 9
    per_request = [name for name in after if re.fullmatch(r"(request_|e2e_|time_to_).*_seconds\.count", name)]
    assert len(per_request) == 7 and {after[name] for name in per_request} == {3}


def test_requests_are_counted_by_finish_reason(llm: LLM) -> None:
    run(llm, [5], ignore_eos=False, logit_bias={2: 100})
    run(llm, [5], stop_token_ids=[77], logit_bias={77: 100})
    run(llm, [5], stop="T", logit_bias={llm.get_tokenizer().encode("T")[1]: 100})
    detect = {"max_pattern_size": 1, "min_pattern_size": 1, "min_count": 3}
    run(llm, [5], logit_bias={77: 100}, repetition_detection=detect)
    llm.llm_engine.add_request("gone", [5], SamplingParams())
    llm.llm_engine.abort_request(["gone"])
    after = values(llm)
    expected = {"stop": 3, "repetition": 1, "abort": 1, "length": 0, "error": 0}
    assert {reason: after[f"request_success:{reason}"] for reason in expected} == expected


def test_gauges_return_to_zero(llm: LLM) -> None:
    """Also when a stop string or an abort ends the last request, which reaches the core after its step."""
    engine, names = llm.llm_engine, ("num_requests_running", "kv_cache_usage_perc", "gpu_cache_usage_perc")
    run(llm, PROMPT, stop="T", logit_bias={llm.get_tokenizer().encode("T")[1]: 100})
    assert [values(llm)[name] for name in names] == [0, 0, 0]
    for id in ("a", "b"):
        engine.add_request(id, PROMPT, SamplingParams(max_tokens=50, ignore_eos=True))
    engine.step()
    engine.add_request("c", PROMPT, SamplingParams())
    engine.abort_request(["a"])
    assert values(llm)["num_requests_running"] == 1 and values(llm)["num_requests_waiting"] == 1
    assert values(llm)["kv_cache_usage_perc"] == values(llm)["gpu_cache_usage_perc"] > 0
    engine.abort_request(["b", "c"])
    assert [values(llm)[name] for name in names] == [0, 0, 0]


def test_preempted_requests_count_their_prompt_once(model: TextModel) -> None:
    llm = open_text(model, disable_log_stats=False, num_gpu_blocks_override=16, max_model_len=48)
    run(llm, [[20 + i] * 11 for i in range(4)], max_tokens=24)
    after = values(llm)
    assert after["num_preemptions"] == llm.llm_engine.core.scheduler.num_preemptions > 0
    assert after["prompt_tokens"] == 44 and after["generation_tokens"] == 96
    assert after["prefix_cache_queries"] == 44


def test_interrupted_step_keeps_the_metrics(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(plan: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine.core.executor, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(llm, PROMPT)
    run(llm, PROMPT)
    assert values(llm)["num_requests_running"] == 0 and values(llm)["generation_tokens"] == 4


def test_snapshot_names_have_no_total_suffix(llm: LLM) -> None:
    run(llm, [5])
    names = {metric.name for metric in llm.get_metrics()}
    assert "vllm:generation_tokens" in names and "vllm:generation_tokens_total" not in names
    assert "vllm:iteration_tokens_total" in names, "this histogram's name really ends so"
    named = [metric for metric in llm.get_metrics() if metric.name != "vllm:cache_config_info"]
    assert {metric.labels["model_name"] for metric in named} == {"tiny"}
    assert llm.llm_engine.metrics is not None
    scrape = llm.llm_engine.metrics.text()
    assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"} 4.0' in scrape
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 1.0' in scrape


def test_engines_have_separate_metrics(llm: LLM, model: TextModel) -> None:
    other = open_text(model, disable_log_stats=False)
    run(llm, [5])
    assert values(llm)["generation_tokens"] == 4 and values(other)["generation_tokens"] == 0


def test_metrics_are_off_by_default(model: TextModel) -> None:
    with pytest.raises(RequestError, match="disable_log_stats=False"):
        open_text(model).get_metrics()


def test_cache_config_info(llm: LLM) -> None:
    (info,) = (metric for metric in llm.get_metrics() if metric.name == "vllm:cache_config_info")
    assert info.labels["block_size"] == "4" and info.labels["num_gpu_blocks"] == "400"
    assert info.labels["kv_cache_size_tokens"] == str(399 * 4)


def test_value_on_a_bucket_edge_is_included() -> None:
    """Buckets are `less or equal`, and count everything below them too."""
    pages = MetricsPages(MetricsLayout(max_model_len=100))
    for num_tokens in (1, 8, 9, 10**6):
        pages.observe(StepStats(num_computed_tokens=num_tokens), FrontStats())
    pages.observe(StepStats(), FrontStats(first_token_s=[0.001, 0.002, 9999.0]))
    result = EngineMetrics(pages, model_name="m", cache_info={}).snapshot()
    by_name = {metric.name: metric for metric in result if isinstance(metric, Histogram)}
    steps = by_name["vllm:iteration_tokens_total"].buckets
    assert (steps["1.0"], steps["8.0"], steps["16.0"], steps["+Inf"]) == (1, 2, 3, 4)
    first = by_name["vllm:time_to_first_token_seconds"]
    assert (first.buckets["0.001"], first.buckets["0.005"], first.buckets["+Inf"]) == (1, 2, 3)
    assert first.count == 3 and first.sum == pytest.approx(9999.003)


@pytest.mark.parametrize(("longest", "last"), [(1, 1), (9, 5), (10, 10), (8192, 5000), (131072, 100000)])
def test_length_buckets_end_at_max_model_len(longest: int, last: int) -> None:
    buckets = length_buckets(longest)
    assert buckets[-1] == last and buckets == sorted(set(buckets)) and buckets[0] == 1


def test_intervals_use_the_right_timestamps() -> None:
    pages = MetricsPages(MetricsLayout(max_model_len=100))
    times = SequenceTimes(queued_at=1.0, scheduled_at=2.5, first_token_at=4.5, last_token_at=10.5)
    ended = FinishedSequence("stop", 7, 4, 3, 4, SamplingParams(), 0.0, times)
    pages.observe(StepStats(), FrontStats(finished=[ended]))
    result = EngineMetrics(pages, model_name="m", cache_info={}).snapshot()
    sums = {metric.name: metric.sum for metric in result if isinstance(metric, Histogram)}
    expected = {"queue": 1.5, "prefill": 2.0, "decode": 6.0, "inference": 8.0}
    assert {name: sums[f"vllm:request_{name}_time_seconds"] for name in expected} == expected
    assert sums["vllm:request_time_per_output_token_seconds"] == 2.0
    assert sums["vllm:request_prefill_kv_computed_tokens"] == 4


def test_start_of_an_engine_is_known_when_it_is_ready() -> None:
    """A series that is 0 before a start would count as another one; a dead engine has no new start."""
    pages = MetricsPages(MetricsLayout(64), num_engines=2)
    metrics, began = EngineMetrics(pages, model_name="m", cache_info={}), time.time()
    pages.of_engine(1).start(max_num_seqs=7)
    pages.of_engine(1).clear_gauges()
    result = {(item.name, item.labels.get("engine")): item for item in metrics.snapshot()}
    started = result["vllm:engine_start_time_seconds", "1"]
    assert isinstance(started, Gauge) and began <= started.value <= time.time()
    most = result["vllm:max_num_seqs", "1"]
    assert isinstance(most, Gauge) and most.value == 7
    assert ("vllm:engine_start_time_seconds", "0") not in result


def test_lora_info_is_one_series_over_all_engines() -> None:
    pages = MetricsPages(MetricsLayout(64), num_engines=2)
    assert "lora_requests_info" not in EngineMetrics(pages, model_name="m", cache_info={}).text()
    metrics = EngineMetrics(pages, model_name="m", cache_info={}, max_loras=4)
    began = time.time()
    metrics.note_adapters(0, ["b"], ["c"])
    metrics.note_adapters(1, ["a", "b"], [])
    (result,) = [item for item in metrics.snapshot() if item.name == "vllm:lora_requests_info"]
    assert result.labels == {
        "max_lora": "4",
        "waiting_lora_adapters": "c",
        "running_lora_adapters": "a,b",
    }
    assert isinstance(result, Gauge) and began <= result.value <= time.time()


def test_misses_are_counted_by_reason() -> None:
    pages = MetricsPages(MetricsLayout(100))
    pages.observe(StepStats(misses=["evicted", "differs", "evicted"]), FrontStats())
    counts = {reason: pages.value(f"prefix_cache_misses:{reason}") for reason in MISS_REASONS}
    assert counts == dict.fromkeys(MISS_REASONS, 0.0) | {"evicted": 2.0, "differs": 1.0}
