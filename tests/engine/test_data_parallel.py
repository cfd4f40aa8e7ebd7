"""LLM over several cores: the same answers in the same order, and nothing left behind."""

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
    """An LLM over two cores, and the tokens that it sampled first: each call draws new seeds."""
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
    """The cores that are children of this process, those of other tests among them."""
    return [each for each in psutil.Process().children() if each.name().startswith("quire:Engine")]


def ids(llm: LLM, prompts: Any, params: SamplingParams) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    return [[list(each.token_ids) for each in output.outputs] for output in outputs]


def test_answers_are_those_of_one_core_in_order(
    model: TextModel, opened: tuple[LLM, list[list[list[int]]]]
) -> None:
    one = open_text(model)
    pair, sampled = opened
    assert sampled == ids(one, PROMPTS, SEEDED), "seeds are drawn in the order of prompts"
    assert ids(pair, PROMPTS, GREEDY) == ids(one, PROMPTS, GREEDY)
    assert pair.get_world_size() == 2 and pair.get_world_size(include_dp=False) == 1
    ended = {metric.labels["engine"] for metric in pair.get_metrics() if metric.labels.get("engine")}
    assert ended == {"0", "1"}
    assert pair.reset_prefix_cache()


def test_what_is_wrong_with_a_prompt_is_said_at_once_and_nothing_stays(pair: LLM) -> None:
    with pytest.raises(RequestError, match="out of vocabulary"):
        pair.generate([[5], [10**6]], GREEDY, use_tqdm=False)
    with pytest.raises(RequestError):
        pair.generate([[5], [6]], [GREEDY, SamplingParams(temperature=0, logprobs=10**6)], use_tqdm=False)
    assert not pair.llm_engine.has_unfinished_requests()
    assert len(ids(pair, PROMPTS[:2], GREEDY)) == 2


def test_a_request_that_fails_leaves_the_others(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches answers that are lost because another request of the same call failed."""
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


def test_beams(model: TextModel, pair: LLM) -> None:
    from quire import BeamSearchParams

    params = BeamSearchParams(beam_width=3, max_tokens=4)
    prompts: Any = [{"prompt_token_ids": [5, 6, 7]}]
    both = [llm.beam_search(prompts, params)[0] for llm in (pair, open_text(model))]
    assert [beam.tokens for beam in both[0].sequences] == [beam.tokens for beam in both[1].sequences]


def test_a_dead_core_costs_nothing_while_there_is_another(model: TextModel) -> None:
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


def test_a_script_without_a_guard_and_without_an_end(model: TextModel, tmp_path: Path) -> None:
    """Catches cores that run the user's script once more, and a process that waits for them at its end."""
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
