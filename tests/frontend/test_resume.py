"""Tests of requests whose core dies, in the API process: the content of resent requests."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from fast_core import engine_over
from tiny_text import text_model

from quire.data.outputs import RequestOutput
from quire.data.params import RequestOutputKind, SamplingParams
from quire.data.pooling import PoolingParams
from quire.data.request import Request
from quire.data.routed_experts import RoutedRows
from quire.data.step_plan import FinishReason, FirstRun, RowLogprobs, StepOutput
from quire.data.wire import Abort, Add, Missing, Ready, StepDone, ToCore, decode_to_core, encode
from quire.errors import EngineDead, EngineError
from quire.frontend.core_calls import STARTS
from quire.frontend.engine import AsyncEngine
from quire.frontend.in_flight import MAX_DEATHS, MAX_SENT, PROGRESS
from quire.frontend.inputs import Prompt
from quire.text.tokenizer import Tokenizer, load_tokenizer

DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
PROMPT = [5, 6, 7]
HEALTH_TIMEOUT_S = 30.0


class Cores:
    """Cores without processes: the test reads sent messages and sends replies."""

    def __init__(self, num: int = 1, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        self.now = 100.0
        addresses = [f"ipc://nowhere{place}" for place in range(num)]
        self.engine: AsyncEngine = engine_over(
            *addresses,
            vocab=320,
            max_model_len=1000,
            tokenizer=tokenizer,
            health_timeout_s=HEALTH_TIMEOUT_S,
            clock=lambda: self.now,
            **options,
        )
        self.sent: list[list[ToCore]] = [[] for _ in range(num)]
        for place, link in enumerate(self.engine._links):
            link.send = self._recorder(place)  # type: ignore[method-assign]
            self.come(place)

    def _recorder(self, place: int) -> Callable[[ToCore], None]:
        return lambda message: self.sent[place].append(decode_to_core(encode(message)))

    def come(self, place: int = 0, start_s: float = 0.0) -> None:
        self.engine._links[place].handle(Ready(1, 1000, 10, 160, start_s))

    def die(self, place: int = 0) -> None:
        self.sent[place].clear()
        self.engine._links[place]._handle_death()

    def requests(self, place: int = 0) -> dict[str, Request]:
        """Return the requests sent to a core, by the test's request name."""
        adds = [message for message in self.sent[place] if isinstance(message, Add)]
        return {item.id.rpartition("-")[0]: item for message in adds for item in message.all()}

    def step(self, tokens: dict[str, int], place: int = 0, **fields: Any) -> None:
        """Return a core's step output with the test's request ids."""
        known = self.requests(place)
        message = {
            name: {known[id].id: value for id, value in values.items()} for name, values in fields.items()
        }
        ids = [known[id].id for id in tokens]
        output = StepOutput(ids, list(tokens.values()), at=self.now, **message)
        self.engine._links[place].handle(StepDone(output))
        self.engine.on_outputs(self.engine._links[place])

    def count(self, name: str) -> float:
        return self.engine.metrics.pages.value(name)

    def ask(self, id: str, **fields: Any) -> "Reader":
        params = SamplingParams(**{"max_tokens": 8, "output_kind": DELTA, "detokenize": False} | fields)
        return Reader(self.engine, self.engine.generate(Prompt(list(PROMPT)), params, id))


class Reader:
    """Reads a stream as it arrives."""

    def __init__(self, engine: AsyncEngine, answer: Any) -> None:
        self.engine, self.answer = engine, answer
        self.outputs: list[RequestOutput] = []
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for output in self.answer:
            self.outputs.append(output)

    def token_ids(self, index: int = 0) -> list[int]:
        parts = [item for output in self.outputs for item in output.outputs if item.index == index]
        return [token for item in parts for token in item.token_ids]

    @property
    def text(self) -> str:
        return "".join(item.text for output in self.outputs for item in output.outputs)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def experts(*ids: int) -> RoutedRows:
    """Return the experts of consecutive tokens in a single layer, one each."""
    return RoutedRows.of(np.array(ids, np.uint8).reshape(-1, 1, 1))


FIRST = FirstRun(2, 90.0, 91.0)


def test_next_core_gets_the_output_so_far() -> None:
    """Check for a growing prompt, another seed, repeated cached-token counts and a failure count."""

    async def test() -> None:
        cores = Cores()
        reader = cores.ask("a", temperature=1.0)
        await settle()
        before = cores.requests()["a"]
        cores.step({"a": 50}, admitted={"a": FIRST}, routed={"a": experts(0, 0, 7)})
        cores.step({"a": 51}, routed={"a": experts(8)})
        cores.die()
        await settle()
        assert reader.token_ids() == [50, 51] and not reader.task.done()
        assert cores.count("request_resumed") == 0
        cores.come()
        second = cores.requests()["a"]
        assert second.tokens == [*PROMPT, 50, 51] and second.prompt_len == len(PROMPT)
        assert (second.seed, second.limit, second.arrived_at) == (
            before.seed,
            before.limit,
            before.arrived_at,
        )
        assert second.has_run and second.num_cached == FIRST.num_cached and second.num_routed == 4
        cores.step({"a": 52}, routed={"a": experts(9)}, finished={"a": FinishReason("stop")})
        await reader.task
        assert reader.token_ids() == [50, 51, 52]
        routed = reader.outputs[-1].outputs[0].routed_experts
        assert routed is not None and routed.ravel().tolist() == [0, 0, 7, 8, 9]
        assert reader.outputs[-1].num_cached_tokens == FIRST.num_cached
        assert reader.outputs[-1].prompt_token_ids == PROMPT
        assert cores.count("request_resumed") == 1 and cores.count("generation_tokens") == 3
        assert cores.engine.num_in_flight == 0

    run(test())


def test_another_core_takes_over_at_once() -> None:
    async def test() -> None:
        cores = Cores(num=2)
        readers = [cores.ask(id) for id in ("a", "b")]
        await settle()
        (first,) = [place for place in (0, 1) if "a" in cores.requests(place)]
        cores.step({"a": 50}, first, admitted={"a": FIRST})
        cores.die(first)
        other = 1 - first
        assert cores.requests(other)["a"].tokens == [*PROMPT, 50]
        cores.step({"a": 51, "b": 60}, other, finished={"a": FinishReason("stop"), "b": FinishReason("stop")})
        await asyncio.gather(*(reader.task for reader in readers))
        assert [reader.token_ids() for reader in readers] == [[50, 51], [60]]

    run(test())


def test_only_unfinished_samples_are_resent() -> None:
    async def test() -> None:
        cores = Cores()
        reader = cores.ask("a", n=3, seed=9)
        await settle()
        cores.step({"0_a": 50, "1_a": 60}, admitted={"0_a": FIRST, "1_a": FIRST})
        cores.step({"0_a": 51, "1_a": 61}, finished={"0_a": FinishReason("stop")})
        cores.die()
        cores.come()
        second = cores.requests()
        assert {id: item.tokens[len(PROMPT) :] for id, item in second.items()} == {"1_a": [60, 61], "2_a": []}
        assert [item.seed for item in second.values()] == [10, 11]
        assert [item.has_run for item in second.values()] == [True, False]
        cores.step(
            {"1_a": 62, "2_a": 70}, finished={"1_a": FinishReason("stop"), "2_a": FinishReason("stop")}
        )
        await reader.task
        assert [reader.token_ids(k) for k in range(3)] == [[50, 51], [60, 61, 62], [70]]

    run(test())


def logprob(token_id: int) -> list[RowLogprobs]:
    return [RowLogprobs([token_id], [-0.5], 1)]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_logprobs_come_once_after_resume(cut: int) -> None:
    """Check prompt logprobs in two pieces, with a death after the first, the second and a token."""

    async def test() -> None:
        cores = Cores()
        reader = cores.ask("a", logprobs=0, prompt_logprobs=0)
        await settle()
        steps: list[tuple[dict[str, int], dict[str, Any]]] = [
            ({}, {"prompt_logprobs": {"a": logprob(6)}, "admitted": {"a": FIRST}}),
            ({"a": 50}, {"prompt_logprobs": {"a": logprob(7)}, "logprobs": {"a": logprob(50)}}),
            ({"a": 51}, {"logprobs": {"a": logprob(51)}}),
            ({"a": 52}, {"logprobs": {"a": logprob(52)}, "finished": {"a": FinishReason("stop")}}),
        ]
        for tokens, fields in steps[:cut]:
            cores.step(tokens, **fields)
        cores.die()
        cores.come()
        assert cores.requests()["a"].num_prompt_logprobs == min(cut, 2)
        for tokens, fields in steps[cut:]:
            cores.step(tokens, **fields)
        await reader.task
        of_prompt = [output.prompt_logprobs for output in reader.outputs if output.prompt_logprobs]
        assert [len(item) for item in of_prompt] == [3]
        actual = [position for output in reader.outputs for position in output.outputs[0].logprobs or ()]
        assert [list(position) for position in actual] == [[50], [51], [52]]
        assert reader.outputs[-1].outputs[0].cumulative_logprob == -1.5

    run(test())


def test_text_and_stop_strings_continue_after_resume(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Check a stop string of which one half comes before the death and one after it."""
    tokenizer = load_tokenizer(text_model(tmp_path_factory.getbasetemp()).path, "hf")

    async def test() -> None:
        cores = Cores(tokenizer=tokenizer)
        reader = cores.ask("a", stop=["xy"], detokenize=True)
        await settle()
        a, x, y = (tokenizer.encode(text, add_special_tokens=False)[0] for text in "axy")
        cores.step({"a": a}, admitted={"a": FIRST})
        cores.step({"a": x})
        cores.die()
        cores.come()
        cores.step({"a": y})
        await reader.task
        assert reader.text == "a" and reader.outputs[-1].outputs[0].stop_reason == "xy"
        assert isinstance(cores.sent[0][-1], Abort), "the new core is told to stop"

    run(test())


def test_resent_requests_keep_their_order() -> None:
    """Check that the oldest is sent last, since a core puts each started request in front of all others."""

    async def test() -> None:
        cores = Cores()
        readers = [cores.ask(id) for id in "abcd"]
        await settle()
        cores.step({"a": 50, "b": 60}, admitted={"a": FIRST, "b": FIRST})
        cores.die()
        cores.come()
        assert list(cores.requests()) == ["c", "d", "b", "a"]
        assert [request.has_run for request in cores.requests().values()] == [False, False, True, True]
        assert cores.requests()["c"].tokens == PROMPT
        assert cores.count("request_resumed") == 2
        for reader in readers:
            reader.task.cancel()

    run(test())


def test_outputs_before_the_death_are_not_generated_again() -> None:
    """Check a request that ended in a message that was read but not yet delivered."""

    async def test() -> None:
        cores = Cores()
        reader = cores.ask("a")
        await settle()
        id = cores.requests()["a"].id
        output = StepOutput([id], [50], finished={id: FinishReason("stop")}, at=cores.now)
        cores.engine._links[0].handle(StepDone(output))
        cores.die()
        cores.come()
        await reader.task
        assert reader.token_ids() == [50] and not cores.sent[0]

    run(test())


def test_without_resume_only_unseen_requests_are_resent() -> None:
    async def test() -> None:
        cores = Cores(resumes=False)
        shown, hidden = cores.ask("a"), cores.ask("b", output_kind=FINAL)
        await settle()
        cores.step({"a": 50, "b": 60}, admitted={"a": FIRST, "b": FIRST})
        await settle()
        cores.die()
        with pytest.raises(EngineDead, match="died while it worked on this request"):
            await shown.task
        cores.come()
        assert list(cores.requests()) == ["b"] and cores.requests()["b"].tokens == PROMPT
        assert not cores.requests()["b"].has_run and cores.count("request_resumed") == 0
        cores.step({"b": 61}, finished={"b": FinishReason("stop")})
        await hidden.task
        assert hidden.token_ids() == [61]

    run(test())


def test_slow_restart_is_waited_for_up_to_a_limit() -> None:
    async def test() -> None:
        cores = Cores()
        cores.die()
        cores.come(start_s=40.0)
        reader = cores.ask("a")
        await settle()
        cores.step({"a": 50}, admitted={"a": FIRST})
        cores.die()
        cores.now += HEALTH_TIMEOUT_S + STARTS * 40.0 - 1.0
        cores.engine._send_waiting()
        await settle()
        assert not reader.task.done()
        cores.now += 2.0
        cores.engine._send_waiting()
        with pytest.raises(EngineDead, match="was not restarted"):
            await reader.task
        assert reader.token_ids() == [50] and cores.engine.num_in_flight == 0
        assert cores.count("request_success:error") == 1 and cores.count("request_resumed") == 0

    run(test())


def test_client_that_disconnects_in_the_pause_is_forgotten() -> None:
    async def test() -> None:
        cores = Cores()
        reader = cores.ask("a")
        await settle()
        cores.step({"a": 50}, admitted={"a": FIRST})
        cores.die()
        reader.task.cancel()
        await reader.answer.aclose()
        await settle()
        assert cores.engine.num_in_flight == 0 and not len(cores.engine._links[0].outputs)
        assert cores.count("request_success:abort") == 1
        cores.come()
        assert not cores.sent[0]

    run(test())


@pytest.mark.parametrize(("num_tokens", "num_deaths"), [(1, 2), (PROGRESS - 1, 2), (PROGRESS, MAX_SENT)])
def test_request_alone_at_deaths_without_progress_fails(num_tokens: int, num_deaths: int) -> None:
    """Check that a request with progress between the deaths survives many."""

    async def test() -> None:
        cores = Cores()
        reader = cores.ask("a", max_tokens=900)
        await settle()
        for _ in range(num_deaths):
            await settle()
            assert not reader.task.done()
            for _ in range(num_tokens):
                cores.step({"a": 50})
            cores.die()
            cores.come()
        with pytest.raises(EngineDead, match="died while it worked on this request"):
            await reader.task
        assert len(reader.token_ids()) == num_tokens * num_deaths
        assert cores.count("request_success:error") == 1

    run(test())


@pytest.mark.parametrize("poison", ["a", "c", "e"])
def test_request_that_kills_its_cores_is_isolated(poison: str) -> None:
    """Check that other requests do not fail with it, and that it does not kill cores forever."""

    async def test() -> None:
        cores = Cores()
        readers = {name: cores.ask(name, max_tokens=900) for name in "abcde"}
        num_deaths = 0
        for _ in range(200):
            await settle()
            cores.engine._send_waiting()
            running = [
                flight.requests[0].id.rpartition("-")[0]
                for flight in cores.engine._flights.values()
                if flight.link is not None
            ]
            if poison in running:
                num_deaths += 1
                cores.die()
                cores.come()
            elif running:
                cores.step(dict.fromkeys(running, 50))
        assert num_deaths == MAX_DEATHS
        for name, reader in readers.items():
            if name == poison:
                with pytest.raises(EngineDead):
                    await reader.task
            else:
                assert not reader.task.done() and len(reader.token_ids()) > 50
                reader.task.cancel()

    run(test())


def test_resumed_request_with_missing_media_keeps_its_output() -> None:
    """Check that the output does not start over because arrays were missing."""

    async def test() -> None:
        cores = Cores()
        reader = cores.ask("a", n=2)
        await settle()
        cores.step({"0_a": 50, "1_a": 60}, finished={"0_a": FinishReason("stop")})
        cores.die()
        cores.come()
        lacking = cores.requests()["1_a"].id
        cores.sent[0].clear()
        cores.engine._links[0].handle(Missing(lacking))
        assert cores.requests()["1_a"].tokens == [*PROMPT, 60]
        assert cores.count("request_resumed") == 1
        cores.step({"1_a": 61}, finished={"1_a": FinishReason("stop")})
        await reader.task
        assert [reader.token_ids(k) for k in range(2)] == [[50], [60, 61]]

    run(test())


def test_failed_request_is_not_resent() -> None:
    async def test() -> None:
        cores = Cores()
        reader = cores.ask("a")
        await settle()
        cores.step({}, finished={"a": FinishReason("error")})
        cores.die()
        cores.come()
        with pytest.raises(EngineError, match="failed on this request"):
            await reader.task
        assert not cores.sent[0] and cores.engine.num_in_flight == 0

    run(test())


def test_pooling_request_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        cores = Cores()
        request = Request(
            id="e-x",
            tokens=PROMPT,
            params=SamplingParams(),
            prompt_len=3,
            limit=4,
            seed=0,
            pooling=PoolingParams(),
        )
        monkeypatch.setattr(cores.engine.inputs, "pooling_request", lambda *args, **fields: request)
        answer = cores.engine.encode(Prompt(PROMPT), PoolingParams(), "e")
        task = asyncio.create_task(anext(answer))
        await settle()
        cores.die()
        cores.come()
        second = cores.requests()["e"]
        assert second.pooling is not None and second.tokens == PROMPT and not second.has_run
        task.cancel()

    run(test())
