"""Tests of stat loggers with vLLM's interface."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tiny_text import TextModel, text_model

from quire import AsyncLLMEngine, EngineArgs, SamplingParams
from quire.data.stats import FrontStats, StepStats
from quire.frontend.stat_loggers import StatLoggerBase, StatLoggers


class Recorder(StatLoggerBase):
    """Keeps what it is called with."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.config, self.engine = vllm_config, engine_index
        self.calls: list[tuple[Any, ...]] = []

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        assert engine_idx == self.engine
        self.calls.append((scheduler_stats, iteration_stats))

    def log_engine_initialized(self) -> None:
        self.calls.append(("initialized",))

    def log(self) -> None:
        self.calls.append(("log",))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


def test_loggers_get_the_statistics_of_their_rank() -> None:
    made: list[Recorder] = []

    def make(config: Any, rank: int) -> Recorder:
        made.append(Recorder(config, rank))
        return made[-1]

    loggers = StatLoggers({"mine": make}, "the configuration", [0, 1], interval_s=1e9)
    step = StepStats(num_running=2, num_waiting=1, kv_usage=0.5, prefix_queries=9, prefix_hits=4)
    step.num_drafts, step.num_draft_tokens, step.num_accepted_by_position = 1, 3, [1, 1]
    loggers(1, step, None)
    loggers(1, None, FrontStats(num_tokens=7, first_token_s=[0.1], between_tokens_s=[0.2, 0.3]))
    assert [one.config for one in made] == ["the configuration"] * 2 and made[0].calls == [("initialized",)]
    _, (scheduler, nothing), (also_nothing, iteration) = made[1].calls
    assert nothing is also_nothing is None
    assert (scheduler.num_running_reqs, scheduler.num_waiting_reqs, scheduler.kv_cache_usage) == (2, 1, 0.5)
    assert (scheduler.prefix_cache_stats.queries, scheduler.prefix_cache_stats.hits) == (9, 4)
    assert scheduler.spec_decoding_stats.num_accepted_tokens_per_pos == [1, 1]
    assert scheduler.spec_decoding_stats.num_accepted_tokens == 2
    assert (iteration.num_generation_tokens, iteration.inter_token_latencies_iter) == (7, [0.2, 0.3])
    loggers = StatLoggers({"mine": Recorder}, None, [0], interval_s=0.0)
    loggers(0, step, None)
    assert [call[0] for call in loggers._loggers["mine", 0].calls[-1:]] == ["log"]


def test_failing_logger_is_left_out() -> None:
    """Catches a logger that ends the requests of its engine."""

    class Failing(Recorder):
        def record(self, *args: Any, **options: Any) -> None:
            raise RuntimeError("no luck")

    class Unbuildable:
        def __init__(self, *_: Any) -> None:
            raise RuntimeError

    factories = {"failing": Failing, "unbuildable": Unbuildable, "good": Recorder}
    loggers = StatLoggers(factories, None, [0], interval_s=1e9)
    for _ in range(2):
        loggers(0, StepStats(), None)
    ((name, _),) = loggers._loggers
    assert name == "good" and len(loggers._loggers["good", 0].calls) == 3


def test_engine_passes_its_statistics(model: TextModel, tmp_path: Path) -> None:
    """Catches tokens that are counted twice or not at all, and a request without its times."""
    made: list[Recorder] = []

    def make(config: Any, rank: int) -> Recorder:
        made.append(Recorder(config, rank))
        return made[-1]

    args = EngineArgs(model=str(model.path), dtype="float32", num_gpu_blocks_override=64, max_model_len=64)

    async def run() -> None:
        engine = AsyncLLMEngine.from_engine_args(args, stat_loggers=[make])
        params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        async for _ in engine.generate({"prompt_token_ids": [5, 6, 7]}, params, "one"):
            pass
        await engine.aclose()

    asyncio.run(run())
    (logger,) = made
    assert logger.config.model_config.max_model_len == 64 and logger.calls[0] == ("initialized",)
    iterations = [call[1] for call in logger.calls if len(call) == 2 and call[1] is not None]
    assert sum(stats.num_generation_tokens for stats in iterations) == 9
    (ended,) = [ended for stats in iterations for ended in stats.finished_requests]
    assert (ended.finish_reason, ended.num_prompt_tokens, ended.num_generation_tokens) == ("length", 3, 9)
    assert 0 < ended.prefill_time <= ended.inference_time <= ended.e2e_latency + 0.1
    steps = [call[0] for call in logger.calls if len(call) == 2 and call[0] is not None]
    assert sum(stats.num_prompt_tokens for stats in steps) == 3
    assert max(stats.num_running_reqs for stats in steps) == 1
