"""Tests of the in-process engine: its statistics, and requests that cannot run."""

import logging
import re

import pytest
from tiny_text import TextModel, open_text, text_model

from quire import SamplingParams
from quire.data.step_plan import StepPlan
from quire.errors import EngineError
from quire.executor import Pending
from quire.metrics.reader import Gauge

PROMPTS = [{"prompt_token_ids": [5 + number, 6, 7, 8]} for number in range(6)]
PARAMS = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


def test_offline_run_logs_its_line_with_all_preemptions(
    model: TextModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that enabled statistics are logged."""
    llm = open_text(model, disable_log_stats=False, num_gpu_blocks_override=20, max_model_len=64)
    with caplog.at_level(logging.INFO):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    (line,) = [text for text in caplog.messages if text.startswith("Engine 000:")]
    num_preemptions = llm.llm_engine.core.scheduler.num_preemptions
    assert num_preemptions > 0 and line.endswith(f"Preemptions: {num_preemptions}")
    assert not re.search(r"throughput: 0\.0 tokens", line)
    assert "Sequence group" in caplog.text and "total_cumulative_preemption_cnt=1" in caplog.text


def test_offline_throughput_is_that_of_the_run(model: TextModel) -> None:
    llm = open_text(model, disable_log_stats=False)
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    rates = [metric for metric in llm.get_metrics() if metric.name.startswith("vllm:avg_")]
    assert len(rates) == 2
    assert all(isinstance(rate, Gauge) and rate.value > 0 for rate in rates)


def test_disabled_statistics_are_not_logged(model: TextModel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        open_text(model).generate(PROMPTS, PARAMS, use_tqdm=False)
    assert not [text for text in caplog.messages if text.startswith("Engine 000:")]


def test_device_too_small_for_the_batch_still_finishes_all(
    model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a failed batch leaves no worker rows and loses no tokens."""
    llm = open_text(model)
    executor = llm.llm_engine.core.executor
    submit, num_failed = executor.submit, 0

    def cramped(plan: StepPlan) -> Pending:
        nonlocal num_failed
        pending = submit(plan)
        if len(plan.rows) > 2:
            num_failed += 1
            raise RuntimeError("out of memory")
        return pending

    monkeypatch.setattr(executor, "submit", cramped)
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == model.greedy(prompt["prompt_token_ids"], 30)
    assert 0 < num_failed <= 3


def test_requests_that_can_never_run_end_the_call_and_not_the_engine(
    model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the call does not loop forever."""
    llm = open_text(model)
    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine.core.scheduler, "plan", lambda: None)
        with pytest.raises(EngineError, match="none of them can be scheduled"):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert len(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == 6
