"""Tests that a request which breaks every step it is in fails alone."""

from collections.abc import Iterator

import numpy as np
import pytest
from tiny_text import TextModel, open_text

from quire.data.outputs import RequestOutput
from quire.data.params import SamplingParams
from quire.data.step_plan import StepPlan
from quire.entrypoints.in_process import LocalEngine
from quire.executor import Pending

PROMPTS = [[5 + number, 6, 7 + number] for number in range(9)]
POISONED = 4


@pytest.fixture
def engine(tiny: TextModel) -> Iterator[LocalEngine]:
    yield open_text(tiny).llm_engine


def finished(engine: LocalEngine) -> dict[str, RequestOutput]:
    results: dict[str, RequestOutput] = {}
    for _ in range(500):
        if not engine.has_unfinished_requests():
            return results
        results |= {output.request_id: output for output in engine.step() if output.finished}
    raise AssertionError("the engine does not finish")


@pytest.mark.parametrize("after", [0, 3], ids=["at once", "after 3 tokens"])
def test_only_the_request_at_fault_fails(
    engine: LocalEngine, tiny: TextModel, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Catches a bad request that ends other requests, or changes their output."""
    submit = engine.core.executor.submit
    core = engine.core.scheduler

    def poisoned(plan: StepPlan) -> Pending:
        for row in np.asarray(plan.rows).tolist():
            request = core.running.request(row)
            length = int(core.running.num_known[row]) - request.prompt_len
            if request.id.startswith(str(POISONED)) and length >= after:
                raise RuntimeError("poison")
        return submit(plan)

    monkeypatch.setattr(engine.core.executor, "submit", poisoned)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    result = finished(engine)
    assert result.pop(str(POISONED)).outputs[0].finish_reason == "error"
    for id, output in result.items():
        assert list(output.outputs[0].token_ids) == tiny.greedy(PROMPTS[int(id)], 8)
    assert len(result) == 8
    assert engine.core.scheduler.kv.pool.usage == 0
