"""Tests of core steps in which no request can run."""

import threading
from itertools import count

from library import FakeLoader, lora
from symbolic import Engine

from quire.data.params import SamplingParams
from quire.data.request import Request
from quire.data.step_plan import StepOutput
from quire.sched.lora import READ_S, LoRAScheduler

PATIENCE_S = 60.0


def test_adapter_timeout_ends_its_request_in_an_idle_engine() -> None:
    """Check that a caller without its own timeout does not wait forever."""
    moments = count(0.0, READ_S / 4)
    gate = LoRAScheduler(FakeLoader(at_once=False), max_slots=1, max_read=1, clock=lambda: next(moments))
    core = Engine(adapters=gate).core
    params = SamplingParams(max_tokens=4)
    core.add(Request(id="a", tokens=[1, 2, 3], params=params, prompt_len=3, limit=7, seed=0, lora=lora("x")))
    steps: list[StepOutput | None] = []
    stepping = threading.Thread(target=lambda: steps.append(core.step()), daemon=True)
    stepping.start()
    stepping.join(PATIENCE_S)
    (step,) = steps
    assert step is not None and step.finished["a"].reason == "error"
    assert "not read within" in str(step.finished["a"].stop_reason)
