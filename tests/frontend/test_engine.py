"""Tests of an API process's engine over core processes that die, hang and restart."""

import asyncio
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from fake_inputs import MARKS, FakeProcessor, inputs, media, picture
from fast_core import engine_over, run_fast_core

from quire.data.outputs import RequestOutput
from quire.data.params import RequestOutputKind, SamplingParams
from quire.data.stats import StepStats
from quire.data.step_plan import FinishReason
from quire.data.wire import Heartbeat, ToCore, encode
from quire.errors import EngineDead, RequestError
from quire.frontend import engine as engine_module
from quire.frontend.engine import AsyncEngine
from quire.frontend.engine_link import EngineLink
from quire.frontend.in_flight import failure
from quire.frontend.inputs import Prompt
from quire.metrics.engine import EngineMetrics
from quire.multimodal.processor_cache import ProcessorCache
from quire.server.openai.streams import MergedOutputs, Pauses
from quire.system.event_loop_turns import TurnBudget
from quire.system.shared_arena import SharedArena

CONTEXT = multiprocessing.get_context("forkserver")
"""Forks cores from a process that has imported their modules, so that each starts at once."""
CONTEXT.set_forkserver_preload(
    ["quire.frontend.engine", "quire.metrics.engine", "quire.sched.mm_receiver_cache"]
)
LONGEST = 10**7
PATIENCE_S = 120.0
"""Timeout of a test that hangs."""
HEALTH_TIMEOUT_S = 1000.0
"""Longer than any test, so that a core is late only if the test advances the clock."""
FINAL = {"ignore_eos": True, "output_kind": RequestOutputKind.FINAL_ONLY, "detokenize": False}
ENDLESS = SamplingParams(max_tokens=LONGEST - 10, **FINAL)
SHORT = SamplingParams(max_tokens=3, **FINAL)
STREAM = SamplingParams(max_tokens=LONGEST - 10, **FINAL | {"output_kind": RequestOutputKind.DELTA})


class Clock:
    """The real time, which a test can advance."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class Cores:
    """Cores that can be killed and restarted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = Clock()
        """Token of the engine that uses the cores."""
        self.processes: dict[int, BaseProcess] = {}

    def address(self, rank: int) -> str:
        return f"ipc://{self.folder}/core{rank}"

    def start(self, rank: int) -> None:
        process = CONTEXT.Process(target=run_fast_core, args=(self.address(rank), 50, LONGEST), daemon=True)
        process.start()
        self.processes[rank] = process

    def pid(self, rank: int) -> int:
        return self.processes[rank].pid or 0

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].join()


Test = Callable[[AsyncEngine, Cores], Coroutine[Any, Any, None]]
Run = Callable[..., None]


@pytest.fixture
def with_cores(tmp_path: Path) -> Iterator[Run]:
    """Run a test with an engine and its cores, and stop them all."""
    cores = Cores(tmp_path)

    def run(test: Test, num: int = 1, **options: Any) -> None:
        for rank in range(num):
            cores.start(rank)

        async def go() -> None:
            addresses = [cores.address(rank) for rank in range(num)]
            engine = engine_over(
                *addresses,
                vocab=100,
                max_model_len=LONGEST,
                health_timeout_s=HEALTH_TIMEOUT_S,
                clock=cores.clock,
                **options,
            )
            engine.start()
            try:
                await asyncio.wait_for(engine.ready(), PATIENCE_S)
                await test(engine, cores)
            finally:
                engine.close()

        asyncio.run(go())

    yield run
    for rank in cores.processes:
        cores.kill(rank)


async def whole(engine: AsyncEngine, id: str, **options: Any) -> RequestOutput:
    return await anext(engine.generate(Prompt([5, 6]), SHORT, id, **options))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.01)


def running(engine: AsyncEngine) -> list[int]:
    """Return the number of this process's sequences at each core."""
    return [core.num_local for core in engine._router.cores]


def test_without_resume_a_streamed_output_fails_with_its_core(with_cores: Run) -> None:
    """Check for 503, which clients retry, instead of 500; for read and forwarded streams."""

    async def test(engine: AsyncEngine, cores: Cores) -> None:
        read = engine.generate(Prompt([5]), STREAM, "read")
        forwarded = engine.generate(Prompt([5]), STREAM, "forwarded")
        seen: list[RequestOutput] = []
        task = asyncio.create_task(forwarded.forward(seen.append))
        await anext(read)
        await until(lambda: bool(seen))
        cores.kill(0)
        with pytest.raises(EngineDead, match="died while it worked on this request"):
            async for _ in read:
                pass
        with pytest.raises(EngineDead, match="died while it worked on this request"):
            await asyncio.wait_for(task, PATIENCE_S)
        await read.aclose()
        await forwarded.aclose()
        assert engine.num_in_flight == 0
        with pytest.raises(EngineDead, match="is being restarted"):
            engine.check()
        with pytest.raises(EngineDead, match="is being restarted"):
            engine.generate(Prompt([5]), STREAM, "new")

    with_cores(test, resumes=False)


def test_streams_pause_until_their_core_is_back(with_cores: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check for lost and duplicate tokens in read and forwarded streams, and that new requests wait, too."""
    length = 4000
    params = SamplingParams(max_tokens=length, **FINAL | {"output_kind": RequestOutputKind.DELTA})

    async def test(engine: AsyncEngine, cores: Cores) -> None:
        read = engine.generate(Prompt([5]), params, "read")
        forwarded = engine.generate(Prompt([5]), params, "forwarded")
        seen: list[RequestOutput] = []
        task = asyncio.create_task(forwarded.forward(seen.append))
        actual = [await anext(read)]
        await until(lambda: bool(seen))
        cores.kill(0)
        await until(lambda: engine._links[0].core is None)
        with pytest.raises(EngineDead, match="is being restarted"):
            engine.check()
        waiting = asyncio.create_task(whole(engine, "new"))
        await until(lambda: engine.num_in_flight == 3)
        with monkeypatch.context() as patch, pytest.raises(EngineDead, match="is being restarted"):
            patch.setattr(engine_module, "MAX_WAITING", 3 / engine.facts.max_num_seqs)
            engine.generate(Prompt([5]), params, "one too many")
        assert not task.done() and not waiting.done()
        cores.start(0)
        assert (await asyncio.wait_for(waiting, PATIENCE_S)).outputs[0].token_ids == [50] * 3
        actual += [output async for output in read]
        await asyncio.wait_for(task, PATIENCE_S)
        for outputs in (actual, seen):
            assert sum(len(output.outputs[0].token_ids) for output in outputs) == length
            assert outputs[-1].outputs[0].finish_reason == "length"
        engine.check()
        assert engine.num_in_flight == 0 and running(engine) == [0]
        assert engine.metrics.pages.value("request_resumed") == 2
        assert engine.metrics.pages.value("request_success:length") == 3

    with_cores(test)


def test_unseen_requests_are_resent_when_the_core_is_back(with_cores: Run) -> None:
    """Check that requests without streamed output survive, and that counters return to zero."""

    async def test(engine: AsyncEngine, cores: Cores) -> None:
        long = engine.generate(Prompt([5]), ENDLESS, "long")
        waiting = asyncio.create_task(anext(long))
        await until(lambda: running(engine) == [1])
        os.kill(cores.pid(0), signal.SIGSTOP)
        short = asyncio.create_task(whole(engine, "short"))
        await until(lambda: running(engine) == [2])
        cores.kill(0)
        await until(lambda: engine._links[0].core is None)
        assert engine.num_in_flight == 2 and running(engine) == [0]
        cores.start(0)
        output = await asyncio.wait_for(short, PATIENCE_S)
        assert output.outputs[0].token_ids == [50] * 3
        waiting.cancel()
        await long.aclose()
        assert engine.num_in_flight == 0 and running(engine) == [0]
        assert engine.metrics.pages.value("request_success:error") == 0

    with_cores(test)


def test_missing_core_is_waited_for_up_to_the_health_limit(with_cores: Run) -> None:
    async def test(engine: AsyncEngine, cores: Cores) -> None:
        waiting = asyncio.create_task(anext(engine.generate(Prompt([5]), ENDLESS, "a")))
        await until(lambda: engine.num_in_flight == 1)
        cores.kill(0)
        await until(lambda: engine._links[0].core is None)
        cores.clock.ahead_s += 0.5 * HEALTH_TIMEOUT_S
        engine._send_waiting()
        assert engine.num_in_flight == 1 and not waiting.done(), "the request waits until the time limit"
        cores.clock.ahead_s += HEALTH_TIMEOUT_S
        with pytest.raises(EngineDead, match="was not restarted"):
            await asyncio.wait_for(waiting, PATIENCE_S)
        assert engine.num_in_flight == 0
        with pytest.raises(EngineDead, match="is being restarted"):  # a new request does not wait as long
            engine.generate(Prompt([5]), SHORT, "new")
        assert engine.metrics.pages.value("request_success:error") == 1

    with_cores(test)


def test_another_core_takes_over_from_a_dead_one(with_cores: Run) -> None:
    """Check that health is 200 while one core serves, and 503 if another stays dead."""

    async def test(engine: AsyncEngine, cores: Cores) -> None:
        os.kill(cores.pid(1), signal.SIGSTOP)
        tasks = [asyncio.create_task(whole(engine, str(i))) for i in range(8)]
        await until(lambda: sum(task.done() for task in tasks) + running(engine)[1] == 8)
        assert running(engine)[0] == 0 < running(engine)[1]
        cores.kill(1)
        outputs = await asyncio.gather(*tasks)
        assert all(output.outputs[0].token_ids == [50] * 3 for output in outputs)
        engine.check()
        with pytest.raises(
            RequestError, match="data_parallel_rank 2 is out of range: there are ranks 0 to 1"
        ):
            await whole(engine, "a", rank=2)
        cores.clock.ahead_s += 2 * HEALTH_TIMEOUT_S
        await until(lambda: engine._links[0].silent_s < HEALTH_TIMEOUT_S)
        with pytest.raises(EngineDead, match="engine 1"):
            engine.check()
        assert (await whole(engine, "b")).finished, "the other still answers"
        cores.start(1)
        await until(lambda: engine._links[1].core is not None)
        engine.check()
        assert (await whole(engine, "c", rank=1)).finished
        assert running(engine) == [0, 0]
        assert [engine.metrics.pages.value("request_success:length", place) for place in (0, 1)] == [9, 1]

    with_cores(test, num=2)


def test_a_call_with_many_requests_takes_many_turns(with_cores: Run) -> None:
    """Catches a client that blocks the event loop with the beginning, or the hang-up, of a call with a
    thousand prompts: `/health` and all streams wait for it. Here each message to the core takes 1 ms."""

    async def test(engine: AsyncEngine, cores: Cores) -> None:
        now, turn, sent, reads = 0.0, 0, Counter[int](), Counter[int]()
        link = engine._links[0]
        send = link.send

        def send_slowly(message: ToCore) -> None:
            nonlocal now
            now += 0.001
            sent[turn] += 1
            send(message)

        on_outputs = engine.on_outputs

        def count_read(link: EngineLink) -> None:
            reads[turn] += 1
            on_outputs(link)

        async def count_turns() -> None:
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        link.send = send_slowly  # type: ignore[method-assign]
        engine.on_outputs = count_read  # type: ignore[method-assign]
        engine._sending = TurnBudget(0.004, lambda: now)
        engine._abandoned._budget = TurnBudget(0.004, lambda: now)
        os.kill(cores.pid(0), signal.SIGSTOP)
        streams = {str(i): engine.generate(Prompt([5]), ENDLESS, str(i)) for i in range(300)}
        turns = asyncio.create_task(count_turns())
        merged = MergedOutputs(streams, Pauses())
        reading = asyncio.create_task(anext(merged))
        await until(lambda: sent.total() >= 300)
        assert engine.num_in_flight == 300 == sum(running(engine)) and max(sent.values()) <= 16
        assert max(reads.values()) <= 4, "the socket is read once after all messages of a turn"
        sent.clear()
        reading.cancel()
        await merged.aclose()
        assert engine.num_in_flight == 0
        await until(lambda: engine.metrics.pages.value("request_success:abort", 0) == 300)
        assert max(sent.values()) <= 16 and sent.total() < 20, "aborts are sent together"
        turns.cancel()

    with_cores(test)


def test_silent_core_is_skipped(with_cores: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    silent_s = HEALTH_TIMEOUT_S / 4
    monkeypatch.setattr(engine_module, "SILENT_S", silent_s)

    async def test(engine: AsyncEngine, cores: Cores) -> None:
        stopped, beating = engine._links
        os.kill(cores.pid(0), signal.SIGSTOP)
        # The second time no message is in transit that the core sent before it was stopped.
        for _ in range(2):
            cores.clock.ahead_s += 2 * silent_s
            await until(lambda: beating.silent_s < silent_s)
        assert stopped.silent_s > silent_s
        for i in range(4):
            assert (await asyncio.wait_for(whole(engine, str(i)), PATIENCE_S)).finished
        os.kill(cores.pid(0), signal.SIGCONT)
        await until(lambda: stopped.silent_s < silent_s)
        assert (await whole(engine, "a", rank=0)).finished

    with_cores(test, num=2)


def test_core_with_heartbeats_but_no_progress_is_unhealthy(with_cores: Run) -> None:
    """Check that health depends on steps, not only on the heartbeat thread."""

    async def test(engine: AsyncEngine, cores: Cores) -> None:
        (link,) = engine._links
        engine.check()
        link.handle(Heartbeat(StepStats(), stalled_s=0.9 * HEALTH_TIMEOUT_S))
        engine.check()
        link.handle(Heartbeat(StepStats(), stalled_s=1.1 * HEALTH_TIMEOUT_S))
        with pytest.raises(EngineDead, match=r"no progress for 11\d\d\.\d s; the limit is 1000 s"):
            engine.check()
        link.handle(Heartbeat(StepStats()))
        engine.check()

    with_cores(test)


def test_loaded_adapters_follow_core_reports_and_are_empty_if_dead() -> None:
    """Check that a router is not directed to a core that has lost its adapters."""
    engine = engine_over("ipc://nowhere0", "ipc://nowhere1", vocab=64, max_model_len=64)
    engine.metrics = EngineMetrics(engine.metrics.pages, model_name="m", cache_info={}, max_loras=2)

    def told() -> tuple[str, str]:
        (actual,) = [item for item in engine.metrics.snapshot() if item.name == "vllm:lora_requests_info"]
        return actual.labels["running_lora_adapters"], actual.labels["waiting_lora_adapters"]

    first, second = engine._links
    first.handle(Heartbeat(StepStats(running_adapters=["a"], waiting_adapters=["c"])))
    second.handle(Heartbeat(StepStats(running_adapters=["a", "b"])))
    assert told() == ("a,b", "c")
    engine.on_death(first)
    assert told() == ("a,b", "")


def test_unreadable_adapter_is_a_client_error() -> None:
    error = failure(FinishReason("error", "Loading lora x failed: No adapter found for /x"))
    assert isinstance(error, RequestError) and error.param == "model" and "/x" in str(error)
    assert not isinstance(failure(FinishReason("error")), RequestError)


class MediaClient:
    """An engine whose core caches image arrays, with counters of the sent messages."""

    def __init__(self, engine: AsyncEngine, arena: SharedArena | None = None) -> None:
        self.engine = engine
        self.processor_cache = ProcessorCache(1 << 20, replicated=arena is None, arena=arena)
        engine.inputs = inputs(media(processor_cache=self.processor_cache), max_model_len=LONGEST)
        self.sent: list[int] = []
        """Size of each message in bytes."""
        (self.link,) = engine._links
        send = self.link.send

        def counting(message: ToCore) -> None:
            self.sent.append(len(encode(message)))
            send(message)

        self.link.send = counting  # type: ignore[method-assign]

    @property
    def num_processed(self) -> int:
        processor = self.engine.inputs.media._media_processor.processor  # type: ignore[union-attr]
        assert isinstance(processor, FakeProcessor)
        return len(processor.seen)

    async def prompt(self, *pictures: Any) -> Prompt:
        text = "see " + MARKS["image"] * len(pictures)
        prompt = {"prompt": text, "multi_modal_data": {"image": list(pictures)}}
        return await self.engine.inputs.parse_async(prompt)

    async def ask(self, prompt: Prompt) -> int:
        """Run a request and return the number of bytes sent."""
        self.sent.clear()
        answer = self.engine.generate(prompt, SHORT.clone(), f"see{self.num_processed}")
        assert (await asyncio.wait_for(anext(answer), PATIENCE_S)).finished
        return sum(self.sent)


def test_cached_media_is_not_resent_unless_the_core_lost_it(with_cores: Run) -> None:
    """Check that a hit is not processed and takes few bytes, and that a core without it gets it again."""

    async def test(engine: AsyncEngine, cores: Cores) -> None:
        client, cat = MediaClient(engine), picture(64, 64)
        first = await client.ask(await client.prompt(cat, picture(48, 48, seed=1)))
        second = await client.ask(await client.prompt(cat, cat))
        assert first > 64 * 64 * 3 and second < 2000 and client.num_processed == 2

        await client.link.call("reset_mm_cache")  # without notifying this side
        assert await client.ask(await client.prompt(cat)) > 64 * 64 * 3 and client.num_processed == 3
        assert await client.ask(await client.prompt(cat)) < 2000 and client.num_processed == 3

        prompt = await client.prompt(cat)
        os.kill(cores.pid(0), signal.SIGSTOP)
        pending = asyncio.create_task(client.ask(prompt))
        await until(lambda: running(engine) == [1])
        cores.kill(0)
        await until(lambda: client.link.core is None)
        cores.start(0)
        assert await pending > 64 * 64 * 3 and client.num_processed == 4

        lost = await client.prompt(cat)
        await engine.operation.reset_mm_cache()
        assert not len(client.processor_cache)
        assert await client.ask(lost) > 64 * 64 * 3 and client.num_processed == 5
        assert running(engine) == [0] and engine.num_in_flight == 0

    with_cores(test)


def test_media_in_shared_memory_is_never_sent(with_cores: Run) -> None:
    """Check new items, and restarted cores, for which no item is processed again.

    A core releases all shared memory, whatever happens to its requests.
    """

    async def test(engine: AsyncEngine, cores: Cores) -> None:
        arena = SharedArena(1 << 20, 1 << 16)
        client, cat, large = MediaClient(engine, arena), picture(64, 64), picture(160, 160, seed=1)
        for pictures in ([cat], [cat, cat]):
            assert await client.ask(await client.prompt(*pictures)) < 2000 and client.num_processed == 1
        for number in (2, 3):  # larger than shared memory allows
            assert await client.ask(await client.prompt(cat, large)) > 160 * 160 * 3
            assert client.num_processed == number
        await until(lambda: not arena.num_busy)

        prompt = await client.prompt(cat)
        os.kill(cores.pid(0), signal.SIGSTOP)
        pending = asyncio.create_task(client.ask(prompt))
        await until(lambda: running(engine) == [1])
        cores.kill(0)
        await until(lambda: client.link.core is None)
        cores.start(0)
        assert await pending < 4000 and client.num_processed == 3

        answer = engine.generate(prompt, SamplingParams(max_tokens=LONGEST - 100), "given up")
        await asyncio.wait_for(anext(answer), PATIENCE_S)
        assert arena.num_busy == 1
        await answer.aclose()
        del prompt, answer, pending
        await until(lambda: not arena.num_busy)
        await engine.operation.reset_mm_cache()
        assert not arena.num_bytes

    with_cores(test)


def test_item_that_no_cache_has_fails_its_request(with_cores: Run) -> None:
    async def test(engine: AsyncEngine, cores: Cores) -> None:
        client = MediaClient(engine)
        named = {"prompt": MARKS["image"], "multi_modal_uuids": {"image": ["cat"]}}
        full = await engine.inputs.parse_async(named | {"multi_modal_data": {"image": picture()}})
        await client.ask(full)
        empty = await engine.inputs.parse_async(named)
        await client.ask(empty)
        await client.link.call("reset_mm_cache")
        with pytest.raises(RequestError, match="nothing is cached for the uuid 'cat'"):
            await client.ask(empty)
        assert running(engine) == [0] and engine.num_in_flight == 0
        await client.ask(full)

    with_cores(test)


def test_cache_reset_by_another_client_is_applied() -> None:
    """Check several API processes of which one resets: the core notifies the others."""
    engine = engine_over("ipc://nowhere", vocab=64, max_model_len=64)
    processor_cache = ProcessorCache(1 << 20)
    engine.inputs = inputs(media(processor_cache=processor_cache))
    engine.inputs.parse({"prompt": MARKS["image"], "multi_modal_data": {"image": picture()}})
    (link,) = engine._links
    link.handle(Heartbeat(StepStats()))
    assert len(processor_cache) == 1
    link.handle(Heartbeat(StepStats(), num_resets=1))
    assert not len(processor_cache)


def test_request_for_a_core_that_never_started_fails_with_starting(with_cores: Run) -> None:
    """Check that it does not wait and then report that its core died."""

    async def test(engine: AsyncEngine, cores: Cores) -> None:
        late = engine._links[1]
        late.core, late.was_up, late._down_reason = None, False, "engine 1 is starting"
        with pytest.raises(EngineDead, match="^engine 1 is starting$"):
            engine.generate(Prompt([5, 6]), SHORT, "a", rank=1)
        assert (await whole(engine, "b")).finished and (await whole(engine, "c", rank=0)).finished

    with_cores(test, num=2)


def test_connection_continues_after_a_message_handler_fails(
    with_cores: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the connection still receives, so that the core does not appear to hang."""

    async def test(engine: AsyncEngine, cores: Cores) -> None:
        (link,) = engine._links
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        handed = []

        def fail(_: object) -> None:
            handed.append(1)
            raise RuntimeError("a fault while outputs are handed out")

        monkeypatch.setattr(link, "_receive", lambda: False)
        monkeypatch.setattr(engine, "on_outputs", fail)
        await until(lambda: len(handed) > 3)
        monkeypatch.undo()
        assert (await whole(engine, "a")).finished

    with_cores(test)


def test_supervision_continues_after_an_error(with_cores: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: AsyncEngine, cores: Cores) -> None:
        (link,), looks = engine._links, []

        def fail(core: object) -> bool:
            looks.append(1)
            raise OSError("too many open files")

        monkeypatch.setattr(link, "_is_disconnected", fail)
        await until(lambda: len(looks) > 1)
        monkeypatch.undo()
        cores.kill(0)
        await until(lambda: link.core is None)

    with_cores(test)


def test_invalid_address_is_replaced_by_the_next_one(with_cores: Run, tmp_path: Path) -> None:
    """Check that the connection is still supervised."""

    async def test(engine: AsyncEngine, cores: Cores) -> None:
        (link,), file = engine._links, tmp_path / "address"
        cores.kill(0)
        link._address = file
        for wrong in ("tcp://one", "junk", "tcp://a:b", "udp://1.2.3.4:1"):
            file.write_text(wrong)
            await until(lambda: link._connected_to == wrong)  # noqa: B023
            assert link.core is None and link._socket is None
        cores.start(0)
        file.write_text(cores.address(0))
        await until(lambda: link.core is not None)
        assert (await whole(engine, "a")).finished

    with_cores(test)
