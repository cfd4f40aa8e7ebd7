"""An API process's engine over a core in another process, which dies, stands still and comes back."""

import asyncio
import multiprocessing
from collections.abc import Callable, Coroutine
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from fast_core import engine_over, run_fast_core

from quire.data.params import RequestOutputKind, SamplingParams
from quire.data.stats import StepStats
from quire.data.wire import Beat
from quire.errors import EngineDead
from quire.frontend.engine import AsyncEngine
from quire.frontend.inputs import Prompt

LONGEST = 10**7
ENDLESS = SamplingParams(
    max_tokens=LONGEST - 10, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False
)


Test = Callable[[AsyncEngine, BaseProcess], Coroutine[Any, Any, None]]


@pytest.fixture
def with_core(tmp_path: Path) -> Callable[[Test], None]:
    """Runs a test with an engine and its core, and ends both."""

    def run(test: Test) -> None:
        address = f"ipc://{tmp_path}/core"
        context = multiprocessing.get_context("spawn")
        core = context.Process(target=run_fast_core, args=(address, 50, LONGEST), daemon=True)
        core.start()

        async def go() -> None:
            engine = engine_over(address, vocab=100, max_model_len=LONGEST)
            engine.start()
            try:
                await asyncio.wait_for(engine.ready(), 30)
                await test(engine, core)
            finally:
                engine.close()

        try:
            asyncio.run(go())
        finally:
            core.kill()
            core.join()

    return run


def test_who_waits_for_a_dead_core_is_told_to_come_back(with_core: Any) -> None:
    """503, which clients try again, and not 500; whether the answer is read or forwarded."""

    async def test(engine: AsyncEngine, core: BaseProcess) -> None:
        read = engine.generate(Prompt([5]), ENDLESS, "read")
        forwarded = engine.generate(Prompt([5]), ENDLESS, "forwarded")
        waiting = [asyncio.create_task(anext(read)), asyncio.create_task(forwarded.forward(lambda _: None))]
        await asyncio.sleep(0.1)
        assert engine.num_in_flight == 2
        core.kill()
        for task in waiting:
            with pytest.raises(EngineDead, match="died while it worked on this request"):
                await asyncio.wait_for(task, 10)
        await read.aclose()
        await forwarded.aclose()
        assert engine.num_in_flight == 0
        with pytest.raises(EngineDead, match="is being restarted"):
            engine.check()

    with_core(test)


def test_a_core_that_beats_and_gets_nowhere_is_not_healthy(with_core: Any) -> None:
    """Health follows steps: a thread that still says it is there proves nothing."""

    async def test(engine: AsyncEngine, core: BaseProcess) -> None:
        engine.check()
        engine._handle(Beat(StepStats(), stalled_s=29.0))
        engine.check()
        engine._handle(Beat(StepStats(), stalled_s=31.0))
        with pytest.raises(EngineDead, match=r"no progress for 3\d\.\d s; the limit is 30 s"):
            engine.check()
        engine._handle(Beat(StepStats()))
        engine.check()

    with_core(test)
