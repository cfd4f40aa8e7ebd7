"""Requests that wait for a grammar, and those that a grammar ends, without one."""

import threading
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from symbolic import Engine, SymbolicWorker, continuation

from quire.data.params import SamplingParams
from quire.data.plan import Masks, StepPlan, StepResult, Verdict
from quire.errors import RequestError

PROMPT = [3, 1, 4, 1, 5]


class Script:
    """A matcher that says what it was told to."""

    def __init__(self, *verdicts: Verdict) -> None:
        self.verdicts = list(verdicts)
        self.seen: list[int] = []

    def advance(self, token_id: int) -> Verdict:
        self.seen.append(token_id)
        return self.verdicts.pop(0) if self.verdicts else ""


class Waiting:
    """Grammars that are ready when the test says so."""

    def __init__(self) -> None:
        self.begun: list[Future[Any]] = []
        self.filled: list[int] = []

    def begin(self, asked: Any) -> Future[Any]:
        self.begun.append(Future())
        return self.begun[-1]

    num_words = 4
    is_beside = True

    def advance(self, moves: Any) -> list[Verdict]:
        return [matcher.advance(token_id) for matcher, token_id in moves]

    def fill(self, matchers: Any, bits: NDArray[np.uint32]) -> None:
        self.filled.append(len(matchers))
        for _, place in matchers:
            bits[place] = 2**32 - 1


def bound(count: int = 4) -> SamplingParams:
    return SamplingParams(max_tokens=count, structured_outputs={"regex": "a"})


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_who_waits_is_passed_by_and_keeps_its_place(policy: str) -> None:
    grammars = Waiting()
    engine = Engine(grammars=grammars, policy=policy, max_num_seqs=1)
    for id in ("a", "b"):
        engine.add(id, PROMPT, count=2, params=bound(2))
    for id in ("c", "d"):
        engine.add(id, PROMPT, count=2)
    order = []
    for made in range(4):
        if made == 1:
            for coming in reversed(grammars.begun):
                coming.set_result(Script())
        order.append(engine.step().request_ids[0])
        engine.step()
    assert order == ["c", "a", "b", "d"]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_constrained_row_waits_for_its_value_and_others_do_not(depth: int) -> None:
    grammars, script = Waiting(), Script("", "", "complete")
    engine = Engine(grammars=grammars, depth=depth, lazy=depth > 1)
    engine.add("a", PROMPT, count=9, params=bound(9))
    engine.add("b", PROMPT, count=9)
    grammars.begun[0].set_result(script)
    engine.run()
    assert engine.outputs["a"] == continuation(PROMPT, 3) == script.seen
    assert engine.outputs["b"] == continuation(PROMPT, 9)
    assert engine.reasons["a"] == "stop" and grammars.filled == [1, 1, 1]
    assert sum(len(plan.constrained) > 0 for plan in engine.plans) == len(engine.masks)


def test_a_grammar_that_fails_ends_its_request_alone() -> None:
    grammars = Waiting()
    engine = Engine(grammars=grammars)
    for id in ("late", "wrong", "gone"):
        engine.add(id, PROMPT, params=bound())
    engine.add("free", PROMPT)
    grammars.begun[0].set_exception(RequestError("too complex"))
    grammars.begun[1].set_result(Script("", "error"))
    engine.step()
    engine.core.abort(["gone"])
    assert grammars.begun[2].cancelled()
    engine.run()
    assert engine.reasons == {"late": "error", "wrong": "error", "free": "length"}
    assert len(engine.outputs["wrong"]) == 2


class Slow(Waiting):
    """Masks that are filled once somebody has asked for them."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    def fill(self, matchers: Any, bits: NDArray[np.uint32]) -> None:
        assert self.asked.wait(60)
        self.asked.clear()
        super().fill(matchers, bits)


def six(grammars: Waiting) -> Engine:
    """More than are filled on the spot."""
    engine = Engine(grammars=grammars, depth=2, lazy=True, max_num_seqs=8)
    for row in range(6):
        engine.add(str(row), PROMPT, count=3, params=bound(3))
        grammars.begun[row].set_result(Script())
    return engine


def test_masks_are_on_their_way_before_they_are_filled() -> None:
    engine, found = six(grammars := Slow()), list[bool]()
    draw = engine.core.executor.draw

    def ask(masks: Masks) -> None:
        found.append(masks.coming is not None and not masks.coming.is_there)
        grammars.asked.set()
        draw(masks)

    engine.core.executor.draw = ask  # type: ignore[method-assign]
    engine.run()
    assert found == [True] * 3 and grammars.filled == [6] * 3
    assert all((masks.bits == 2**32 - 1).all() for masks in engine.masks)
    assert all(said == continuation(PROMPT, 3) for said in engine.outputs.values())


class Wrong(Waiting):
    def fill(self, matchers: Any, bits: NDArray[np.uint32]) -> None:
        raise ArithmeticError("no mask")


def test_who_waits_for_masks_goes_on_if_they_cannot_be_filled() -> None:
    engine = six(Wrong())
    with pytest.raises(ArithmeticError, match="no mask"):
        engine.run()
    engine.core.clear()
    assert not engine.core.has_work


class Breaking(SymbolicWorker):
    """The third step fails."""

    def run(self, plan: StepPlan) -> StepResult:
        if plan.step == 3:
            raise RuntimeError("broken")
        return super().run(plan)


def test_a_step_that_fails_leaves_none_undrawn() -> None:
    """The one behind it is launched and waits for masks, which then nobody can make."""
    grammars, script = Waiting(), Script()
    engine = Engine(grammars=grammars, depth=2, lazy=True)
    engine.use(Breaking)
    engine.add("a", PROMPT, count=6, params=bound(6))
    engine.add("b", PROMPT, count=6)
    grammars.begun[0].set_result(script)
    engine.run()
    assert engine.outputs["a"] == engine.outputs["b"] == continuation(PROMPT, 6) == script.seen
    assert sum(len(plan.constrained) > 0 for plan in engine.plans) == len(engine.masks)
    assert sum(not len(masks.rows) for masks in engine.masks) == 1 and not engine.core.step_queue.undrawn
