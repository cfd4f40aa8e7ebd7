"""Tests of requests that wait for a grammar and requests that a grammar ends, with fake grammars."""

import threading
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from symbolic import Engine, SymbolicWorker, continuation

from quire.data.params import SamplingParams
from quire.data.step_plan import Masks, StepPlan, StepResult, Verdict
from quire.errors import RequestError

PROMPT = [3, 1, 4, 1, 5]


class ScriptedMatcher:
    """A matcher that returns the verdicts it was constructed with."""

    def __init__(self, *verdicts: Verdict) -> None:
        self.verdicts = list(verdicts)
        self.seen: list[int] = []

    def advance(self, token_id: int) -> Verdict:
        self.seen.append(token_id)
        return self.verdicts.pop(0) if self.verdicts else ""


class PendingGrammars:
    """Grammars whose compilation ends when the test sets the future."""

    def __init__(self) -> None:
        self.begun: list[Future[Any]] = []
        self.filled: list[int] = []

    def begin(self, params: Any) -> Future[Any]:
        self.begun.append(Future())
        return self.begun[-1]

    num_words = 4
    fills_in_thread = True

    def advance(self, moves: Any) -> list[Verdict]:
        return [matcher.advance(token_id) for matcher, token_id in moves]

    def fill_remembered(self, matchers: Any, bits: NDArray[np.uint32]) -> Any:
        return matchers

    def forced_tokens(self, matcher: Any) -> list[int]:
        return []

    def fill(self, matchers: Any, bits: NDArray[np.uint32]) -> None:
        self.filled.append(len(matchers))
        for _, place in matchers:
            bits[place] = 2**32 - 1


def constrained_params(count: int = 4) -> SamplingParams:
    return SamplingParams(max_tokens=count, structured_outputs={"regex": "a"})


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_request_waiting_for_grammar_is_skipped_and_keeps_its_place(policy: str) -> None:
    grammars = PendingGrammars()
    engine = Engine(grammars=grammars, policy=policy, max_num_seqs=1)
    for id in ("a", "b"):
        engine.add(id, PROMPT, count=2, params=constrained_params(2))
    for id in ("c", "d"):
        engine.add(id, PROMPT, count=2)
    order = []
    for made in range(4):
        if made == 1:
            for coming in reversed(grammars.begun):
                coming.set_result(ScriptedMatcher())
        order.append(engine.step().request_ids[0])
        engine.step()
    assert order == ["c", "a", "b", "d"]


@pytest.mark.parametrize("depth", [1, 2])
def test_constrained_row_waits_for_its_token_and_others_do_not(depth: int) -> None:
    grammars, script = PendingGrammars(), ScriptedMatcher("", "", "complete")
    engine = Engine(grammars=grammars, depth=depth, lazy=depth > 1)
    engine.add("a", PROMPT, count=9, params=constrained_params(9))
    engine.add("b", PROMPT, count=9)
    grammars.begun[0].set_result(script)
    engine.run()
    assert engine.outputs["a"] == continuation(PROMPT, 3) == script.seen
    assert engine.outputs["b"] == continuation(PROMPT, 9)
    assert engine.reasons["a"] == "stop" and grammars.filled == [1, 1, 1]
    assert sum(len(plan.constrained) > 0 for plan in engine.plans) == len(engine.masks)


def test_failed_grammar_ends_only_its_request() -> None:
    grammars = PendingGrammars()
    engine = Engine(grammars=grammars)
    for id in ("late", "wrong", "gone"):
        engine.add(id, PROMPT, params=constrained_params())
    engine.add("free", PROMPT)
    grammars.begun[0].set_exception(RequestError("too complex"))
    grammars.begun[1].set_result(ScriptedMatcher("", "error"))
    engine.step()
    engine.core.abort(["gone"])
    assert grammars.begun[2].cancelled()
    engine.run()
    assert engine.reasons == {"late": "error", "wrong": "error", "free": "length"}
    assert len(engine.outputs["wrong"]) == 2


class SlowGrammars(PendingGrammars):
    """Grammars whose masks are filled only after `fill_allowed` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.fill_allowed = threading.Event()

    def fill(self, matchers: Any, bits: NDArray[np.uint32]) -> None:
        assert self.fill_allowed.wait(60)
        self.fill_allowed.clear()
        super().fill(matchers, bits)


def engine_with_six_rows(grammars: PendingGrammars) -> Engine:
    """Return an engine with more constrained rows than are filled synchronously."""
    engine = Engine(grammars=grammars, depth=2, lazy=True, max_num_seqs=8)
    for row in range(6):
        engine.add(str(row), PROMPT, count=3, params=constrained_params(3))
        grammars.begun[row].set_result(ScriptedMatcher())
    return engine


def test_masks_are_submitted_before_they_are_filled() -> None:
    engine, was_pending = engine_with_six_rows(grammars := SlowGrammars()), list[bool]()
    sample_tokens = engine.core.executor.sample_tokens

    def sample_and_allow_fill(masks: Masks) -> None:
        was_pending.append(masks.pending is not None and not masks.pending.is_ready)
        grammars.fill_allowed.set()
        sample_tokens(masks)

    engine.core.executor.sample_tokens = sample_and_allow_fill  # type: ignore[method-assign]
    engine.run()
    assert was_pending == [True] * 3 and grammars.filled == [6] * 3
    assert all((masks.bits == 2**32 - 1).all() for masks in engine.masks)
    assert all(output == continuation(PROMPT, 3) for output in engine.outputs.values())


class RememberingGrammars(PendingGrammars):
    """Grammars that remember all masks but those of the first step and of one row."""

    def fill_remembered(self, matchers: Any, bits: NDArray[np.uint32]) -> Any:
        if not self.filled:
            return matchers
        bits[1 : len(matchers)] = 2**32 - 1
        return matchers[:1]


def test_only_masks_that_are_not_remembered_are_computed() -> None:
    engine = engine_with_six_rows(grammars := RememberingGrammars())
    engine.run()
    assert grammars.filled == [6, 1, 1]
    assert all((masks.bits == 2**32 - 1).all() for masks in engine.masks)


class FailingGrammars(PendingGrammars):
    def fill(self, matchers: Any, bits: NDArray[np.uint32]) -> None:
        raise ArithmeticError("no mask")


def test_rows_waiting_for_masks_continue_if_filling_fails() -> None:
    engine = engine_with_six_rows(FailingGrammars())
    with pytest.raises(ArithmeticError, match="no mask"):
        engine.run()
    engine.core.clear()
    assert not engine.core.has_work


class ThirdStepFails(SymbolicWorker):
    """A worker whose third step fails."""

    def run(self, plan: StepPlan) -> StepResult:
        if plan.step == 3:
            raise RuntimeError("broken")
        return super().run(plan)


def test_failed_step_leaves_no_row_waiting_for_masks() -> None:
    """Check the step behind the failed one, which is launched and waits for masks."""
    grammars, script = PendingGrammars(), ScriptedMatcher()
    engine = Engine(grammars=grammars, depth=2, lazy=True)
    engine.use(ThirdStepFails)
    engine.add("a", PROMPT, count=6, params=constrained_params(6))
    engine.add("b", PROMPT, count=6)
    grammars.begun[0].set_result(script)
    engine.run()
    assert engine.outputs["a"] == engine.outputs["b"] == continuation(PROMPT, 6) == script.seen
    assert sum(len(plan.constrained) > 0 for plan in engine.plans) == len(engine.masks)
    assert sum(not len(masks.rows) for masks in engine.masks) == 1 and not engine.core.step_queue.is_unsampled
