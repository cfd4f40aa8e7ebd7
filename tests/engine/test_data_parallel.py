"""Tests of LLM over several engine cores: equal outputs in order, and no leftover processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny_text import TextModel, open_text, text_model

from quire import LLM, SamplingParams
from quire.errors import EngineError, RequestError, RequestsFailed

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, n=3)
PROMPTS = [[5 + i, 6, 7 * i % 50 + 5, *range(20, 20 + i)] for i in range(12)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def opened(model: TextModel) -> Iterator[tuple[LLM, list[list[list[int]]]]]:
    """Open an LLM over two cores and return it with its first sampled tokens: each call draws new seeds."""
    before = cores()
    llm = open_text(model, data_parallel_size=2, disable_log_stats=False)
    children = [core for core in cores() if core not in before]
    yield llm, ids(llm, PROMPTS, SEEDED)
    llm.llm_engine.close()
    assert len(children) == 2 and not psutil.wait_procs(children, timeout=60)[1]


@pytest.fixture(scope="module")
def pair(opened: tuple[LLM, list[list[list[int]]]]) -> LLM:
    return opened[0]


def cores() -> list[psutil.Process]:
    """Return the core processes of this process, including those of other tests."""
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if child.name().startswith("quire:Engine")
    ]


def ids(llm: LLM, prompts: Any, params: SamplingParams) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    return [[list(item.token_ids) for item in output.outputs] for output in outputs]


def test_outputs_match_one_core_in_order(model: TextModel, opened: tuple[LLM, list[list[list[int]]]]) -> None:
    one = open_text(model)
    pair, sampled = opened
    assert sampled == ids(one, PROMPTS, SEEDED), "seeds are drawn in the order of prompts"
    assert ids(pair, PROMPTS, GREEDY) == ids(one, PROMPTS, GREEDY)
    assert pair.get_world_size() == 2 and pair.get_world_size(include_dp=False) == 1
    ended = {metric.labels["engine"] for metric in pair.get_metrics() if metric.labels.get("engine")}
    assert ended == {"0", "1"}
    assert pair.reset_prefix_cache()


def test_invalid_prompt_is_rejected_before_any_request_runs(pair: LLM) -> None:
    with pytest.raises(RequestError, match="out of vocabulary"):
        pair.generate([[5], [10**6]], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError):
        pair.generate([[5], [6]], [GREEDY, SamplingParams(temperature=0, logprobs=10**6)], use_tqdm=False)
    assert not pair.llm_engine.has_unfinished_requests()
    assert len(ids(pair, PROMPTS[:2], GREEDY)) == 2


def test_failed_request_does_not_affect_others(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that outputs are not lost because another request of the same call failed."""
    expected, engine = ids(pair, PROMPTS[:3], GREEDY), pair.llm_engine._engine  # type: ignore[attr-defined]
    generate = engine.generate

    def fail_the_second(prompt: Any, *arguments: Any, **options: Any) -> Any:
        answer = generate(prompt, *arguments, **options)
        if prompt.token_ids == PROMPTS[1]:
            answer.fail(EngineError("broken"))
        return answer

    monkeypatch.setattr(engine, "generate", fail_the_second)
    with pytest.raises(RequestsFailed, match="1 of 3 requests failed.*prompt 1: broken") as failed:
        pair.generate(PROMPTS[:3], GREEDY, use_tqdm=False)
    first, second, third = failed.value.outputs
    assert [[list(output.outputs[0].token_ids)] for output in (first, third)] == [expected[0], expected[2]]
    assert second.error is failed.value.errors[1] and not pair.llm_engine.has_unfinished_requests()


def test_beam_search_over_two_cores(model: TextModel, pair: LLM) -> None:
    from quire import BeamSearchParams

    params = BeamSearchParams(beam_width=3, max_tokens=4)
    prompts: Any = [{"prompt_token_ids": [5, 6, 7]}]
    both = [llm.beam_search(prompts, params)[0] for llm in (pair, open_text(model))]
    assert [beam.tokens for beam in both[0].sequences] == [beam.tokens for beam in both[1].sequences]


def test_dead_core_is_replaced_by_the_other(model: TextModel) -> None:
    before = cores()
    llm = open_text(model, data_parallel_size=2)
    first, second = (core for core in cores() if core not in before)
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = ids(llm, PROMPTS, long)
    engine = llm.llm_engine
    for number, prompt in enumerate(PROMPTS):
        llm.enqueue([prompt], long, use_tqdm=False)
        if number == 6:
            os.kill(second.pid, signal.SIGKILL)
    outputs: Any = llm.wait_for_completion(use_tqdm=False)
    assert [[list(output.outputs[0].token_ids)] for output in outputs] == expected
    os.kill(first.pid, signal.SIGKILL)
    with pytest.raises(EngineError):
        for _ in range(100):
            ids(llm, PROMPTS, long)
    assert not engine.has_unfinished_requests()
    engine.close()


def test_script_without_main_guard_or_shutdown(model: TextModel, tmp_path: Path) -> None:
    """Check that cores do not run the user's script again and that the process exits."""
    script = tmp_path / "script.py"
    script.write_text(
        "from quire import LLM, SamplingParams\n"
        f"llm = LLM({str(model.path)!r}, dtype='float32', num_gpu_blocks_override=64, data_parallel_size=2)\n"
        "params = SamplingParams(temperature=0, max_tokens=4)\n"
        "print([output.outputs[0].text for output in llm.generate(['a', 'b'], params, use_tqdm=False)])\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[") == 1
