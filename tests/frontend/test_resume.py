"""Requests whose core dies, as an API process sees them: what is sent to the next core, and what is not."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fast_core import engine_over
from tiny_text import text_model

from quire.data.outputs import RequestOutput
from quire.data.params import RequestOutputKind, SamplingParams
from quire.data.plan import FinishReason, FirstRun, RowLogprobs, StepOutput
from quire.data.pooling import PoolingParams
from quire.data.request import Request
from quire.data.wire import Abort, Add, Missing, Ready, StepDone, ToCore, decode_to_core, encode
from quire.errors import EngineDead, EngineError
from quire.frontend.engine import STARTS, AsyncEngine
from quire.frontend.in_flight import MAX_DEATHS, MAX_SENT, PROGRESS
from quire.frontend.inputs import Prompt
from quire.text.tokenizer import Tokenizer, load_tokenizer

DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
PROMPT = [5, 6, 7]
HEALTH_TIMEOUT_S = 30.0


class Cores:
    """Cores without a process: the test reads what is sent to them, and speaks for them."""

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
        """What was sent to a core, by the name that the test gave it."""
        adds = [message for message in self.sent[place] if isinstance(message, Add)]
        return {each.id.rpartition("-")[0]: each for message in adds for each in message.all()}

    def step(self, tokens: dict[str, int], place: int = 0, **fields: Any) -> None:
        """A step of a core, with the ids that the test uses."""
        known = self.requests(place)
        told = {
            name: {known[id].id: value for id, value in values.items()} for name, values in fields.items()
        }
        ids = [known[id].id for id in tokens]
        output = StepOutput(ids, list(tokens.values()), at=self.now, **told)
        self.engine._links[place].handle(StepDone(output))
        self.engine.on_turn(self.engine._links[place])

    def count(self, name: str) -> float:
        return self.engine.metrics.pages.value(name)

    def ask(self, id: str, **fields: Any) -> "Reader":
        params = SamplingParams(**{"max_tokens": 8, "output_kind": DELTA, "detokenize": False} | fields)
        return Reader(self.engine, self.engine.generate(Prompt(list(PROMPT)), params, id))


class Reader:
    """Reads an answer as it comes."""

    def __init__(self, engine: AsyncEngine, answer: Any) -> None:
        self.engine, self.answer = engine, answer
        self.outputs: list[RequestOutput] = []
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for output in self.answer:
            self.outputs.append(output)

    def token_ids(self, index: int = 0) -> list[int]:
        parts = [each for output in self.outputs for each in output.outputs if each.index == index]
        return [token for each in parts for token in each.token_ids]

    @property
    def text(self) -> str:
        return "".join(each.text for output in self.outputs for each in output.outputs)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


FIRST = FirstRun(2, 90.0, 91.0)


def test_the_next_core_gets_the_output_so_far_and_the_answer_stays_one() -> None:
    """Catches a prompt that grows, another seed, cached tokens that are told anew, and a count that fails."""

    async def test() -> None:
        cores = Cores()
        reader = cores.ask("a", temperature=1.0)
        await settle()
        before = cores.requests()["a"]
        cores.step({"a": 50}, admitted={"a": FIRST})
        cores.step({"a": 51})
        cores.die()
        await settle()
        assert reader.token_ids() == [50, 51] and not reader.task.done()
        assert cores.count("request_resumed") == 0
        cores.come()
        again = cores.requests()["a"]
        assert again.tokens == [*PROMPT, 50, 51] and again.prompt_len == len(PROMPT)
        assert (again.seed, again.limit, again.arrived_at) == (before.seed, before.limit, before.arrived_at)
        assert again.has_run and again.num_cached == FIRST.num_cached
        cores.step({"a": 52}, finished={"a": FinishReason("stop")})
        await reader.task
        assert reader.token_ids() == [50, 51, 52]
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


def test_of_several_sequences_only_those_that_have_not_ended_are_sent() -> None:
    async def test() -> None:
        cores = Cores()
        reader = cores.ask("a", n=3, seed=9)
        await settle()
        cores.step({"0_a": 50, "1_a": 60}, admitted={"0_a": FIRST, "1_a": FIRST})
        cores.step({"0_a": 51, "1_a": 61}, finished={"0_a": FinishReason("stop")})
        cores.die()
        cores.come()
        again = cores.requests()
        assert {id: each.tokens[len(PROMPT) :] for id, each in again.items()} == {"1_a": [60, 61], "2_a": []}
        assert [each.seed for each in again.values()] == [10, 11]
        assert [each.has_run for each in again.values()] == [True, False]
        cores.step(
            {"1_a": 62, "2_a": 70}, finished={"1_a": FinishReason("stop"), "2_a": FinishReason("stop")}
        )
        await reader.task
        assert [reader.token_ids(k) for k in range(3)] == [[50, 51], [60, 61, 62], [70]]

    run(test())


def logprob(token_id: int) -> list[RowLogprobs]:
    return [RowLogprobs([token_id], [-0.5], 1)]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_logprobs_come_once(cut: int) -> None:
    """A prompt whose logprobs come in two pieces, broken off behind the first, the second and a token."""

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
        assert [len(each) for each in of_prompt] == [3]
        found = [position for output in reader.outputs for position in output.outputs[0].logprobs or ()]
        assert [list(position) for position in found] == [[50], [51], [52]]
        assert reader.outputs[-1].outputs[0].cumulative_logprob == -1.5

    run(test())


def test_text_and_stop_strings_go_on_where_they_were(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The stop string has one half in front of the death, and one behind it."""
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


def test_requests_that_have_not_run_keep_their_order_and_the_others_come_before_them() -> None:
    """A core puts each that has run in front of all others, so that the oldest has to be the last."""

    async def test() -> None:
        cores = Cores()
        readers = [cores.ask(id) for id in "abcd"]
        await settle()
        cores.step({"a": 50, "b": 60}, admitted={"a": FIRST, "b": FIRST})
        cores.die()
        cores.come()
        assert list(cores.requests()) == ["c", "d", "b", "a"]
        assert [each.has_run for each in cores.requests().values()] == [False, False, True, True]
        assert cores.requests()["c"].tokens == PROMPT
        assert cores.count("request_resumed") == 2
        for reader in readers:
            reader.task.cancel()

    run(test())


def test_what_came_before_the_death_is_not_made_again() -> None:
    """A request that has ended in a message that is read, and not yet handed out."""

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


def test_without_resumption_only_what_nobody_has_seen_is_sent_again() -> None:
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


def test_a_slow_start_is_waited_for_and_one_that_never_ends_is_not() -> None:
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


def test_a_client_that_hangs_up_in_the_pause_is_forgotten() -> None:
    async def test() -> None:
        cores = Cores()
        reader = cores.ask("a")
        await settle()
        cores.step({"a": 50}, admitted={"a": FIRST})
        cores.die()
        reader.task.cancel()
        await reader.answer.aclose()
        assert cores.engine.num_in_flight == 0 and not len(cores.engine._links[0].outputs)
        assert cores.count("request_success:abort") == 1
        cores.come()
        assert not cores.sent[0]

    run(test())


@pytest.mark.parametrize(("num_tokens", "num_deaths"), [(1, 2), (PROGRESS - 1, 2), (PROGRESS, MAX_SENT)])
def test_a_request_alone_at_deaths_without_progress_ends(num_tokens: int, num_deaths: int) -> None:
    """One that makes progress between the deaths is not what causes them, and lives through many."""

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
def test_a_request_that_ends_its_cores_is_found_among_others(poison: str) -> None:
    """Catches innocent requests that end with it, and a request that ends cores for ever."""

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


def test_a_core_that_lacks_media_gets_the_output_so_far_with_them() -> None:
    """Catches an answer that starts over since its arrays were missing."""

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


def test_a_request_that_failed_by_itself_does_not_go_again() -> None:
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


def test_a_pooling_request_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
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
        again = cores.requests()["e"]
        assert again.pooling is not None and again.tokens == PROMPT and not again.has_run
        task.cancel()

    run(test())
