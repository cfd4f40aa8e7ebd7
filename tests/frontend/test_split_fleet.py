"""Tests of two fleets as one: the first computes prompts, the second loads their prefixes, without Ray."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest
from test_fleet import Client, Replicas, expected, prompt, run, tokens_of, until

from quire.data.kv_transfer import RemotePrefix
from quire.data.params import SamplingParams
from quire.data.step_plan import FinishReason, StepOutput
from quire.data.wire import Add, StepDone, decode_to_core, encode
from quire.errors import EngineError
from quire.frontend.cached_prefixes import PrefixChanges
from quire.frontend.fleet_link import ReplicaLost
from quire.frontend.fleet_routes import FleetRoutes, Route
from quire.frontend.inputs import Prompt
from quire.frontend.split_fleet import SplitFleet


class Prefills(Replicas):
    """A fleet that keeps the prefixes of the prompts that it computes."""

    async def stream(self, route: Route, data: bytes) -> AsyncGenerator[str | Sequence[bytes]]:
        add = decode_to_core(data)
        assert isinstance(add, Add) and route.routes is not None
        (request,) = add.all()
        assert request.offers and request.limit == request.prompt_len + 1 and request.params.max_tokens == 1
        self.requests.append(request)
        name = next(iter(self.running))
        route.routes.update({name: ((), {})})
        route.routes.assign(route, name)
        yield name
        self.running[name] += 1
        try:
            await self.stops.wait()
            if name in self.dead:
                raise self.dead[name]
            kept = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": request.id}
            kept |= {"remote_host": "10.0.0.1", "remote_port": 5, "remote_num_tokens": request.prompt_len}
            finish = FinishReason("length", kv_transfer=kept)
            yield [encode(StepDone(StepOutput([request.id], [7], finished={request.id: finish})))]
        finally:
            self.running[name] -= 1


class Split:
    """An engine over two fleets."""

    def __init__(self) -> None:
        self.prefill, self.decode = Prefills("p"), Replicas("a")
        self.routes = FleetRoutes(block_size=16, max_num_seqs=8)
        self.client = Client(SplitFleet(self.prefill, self.decode, self.routes))

    async def __aenter__(self) -> "Split":
        await self.client.engine.ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.client.engine.close()

    @property
    def prefixes(self) -> list[RemotePrefix | None]:
        return [request.remote for request in self.decode.requests]


def test_prompts_are_computed_by_the_first_fleet() -> None:
    async def check() -> None:
        async with Split() as split:
            answers = await asyncio.gather(*(split.client.ask(f"r{n}", prompt(n), n=1 + n) for n in range(3)))
            for number, outputs in enumerate(answers):
                for index in range(1 + number):
                    assert tokens_of(outputs, index) == expected(prompt(number))
            assert [request.tokens for request in split.prefill.requests] == [prompt(n) for n in range(3)]
            assert all(prefix is not None and prefix.num_tokens == 40 for prefix in split.prefixes)
            assert len(split.prefixes) == 1 + 2 + 3, "each sequence of a request loads the prefix"
            assert not split.routes._router.cores[0].num_local
            short = await split.client.ask("short", prompt(5, 16))
            assert tokens_of(short) == expected(prompt(5, 16)) and split.prefixes[-1] is None
            await split.client.ask("logprobs", prompt(6), prompt_logprobs=1)
            assert split.prefixes[-1] is None and len(split.prefill.requests) == 3

    run(check())


def test_prompts_are_computed_with_the_answer_by_a_replica_that_has_them_cached() -> None:
    async def check() -> None:
        async with Split() as split:
            split.decode.running["b"] = 0
            client, first, second = split.client, prompt(0, 700), prompt(0, 960)
            turns = [first, first, [*first, *prompt(1, 100)], prompt(2), second]
            for number, (tokens, num_prefills) in enumerate(zip(turns, (1, 1, 1, 2, 2), strict=True)):
                assert tokens_of(await client.ask(f"r{number}", tokens)) == expected(tokens)
                assert len(split.prefill.requests) == num_prefills
            home, other = sorted(split.decode.running, key=lambda name: name != split.decode.placed[0])
            routes = client.engine._links[0].routes  # type: ignore[attr-defined]
            assert split.decode.placed == [home, home, home, other, home]
            route = routes.route("r", second)
            assert routes.num_cached(route) == 928
            routes.update_load(home, num_running=9, num_waiting=9, kv_usage=0.9)
            assert routes.num_cached(route) == 0, "the request would go to the other replica"
            routes.update_load(home, num_running=0, num_waiting=0, kv_usage=0)
            routes.note_cached(home, PrefixChanges(1, removed=route.prefix.keys[20:].tobytes()))
            assert routes.num_cached(route) == route.prefix.depths[19] == 320
            await client.ask("evicted", second)
            assert len(split.prefill.requests) == 3
            await client.ask("longer", [*first[:64], *prompt(3, 560)])
            assert len(split.prefill.requests) == 4, "too many tokens follow the cached prefix"
            routes.forget_prefixes()
            await client.ask("reset", first)
            assert len(split.prefill.requests) == 5

    run(check())


@pytest.mark.parametrize("cause", [ReplicaLost("killed"), EngineError("bug")])
def test_a_prompt_that_cannot_be_computed_elsewhere_is_computed_with_its_answer(cause: Exception) -> None:
    async def check() -> None:
        async with Split() as split:
            split.prefill.dead["p"] = cause
            assert tokens_of(await split.client.ask("r", prompt(0))) == expected(prompt(0))
            assert split.prefixes == [None] and len(split.prefill.requests) == 1

    run(check())


def test_a_stream_continues_on_another_replica_without_the_first_fleet() -> None:
    async def check() -> None:
        async with Split() as split:
            split.decode.running["b"] = 0
            task = asyncio.create_task(split.client.ask("r", prompt(0), 800))
            await until(lambda: split.decode.num_steps > 4)
            split.decode.dead[split.decode.placed[0]] = ReplicaLost("killed")
            assert tokens_of(await task) == expected(prompt(0), 800)
            assert len(split.decode.placed) == 2 and len(split.prefill.requests) == 1

    run(check())


def test_a_request_that_is_closed_early_ends_at_both_fleets() -> None:
    async def check() -> None:
        async with Split() as split:
            split.prefill.stops.clear()
            params = SamplingParams(max_tokens=5, detokenize=False)
            stream = split.client.engine.generate(Prompt(prompt(0)), params, "r")
            task = asyncio.ensure_future(anext(stream))
            await until(lambda: split.prefill.running["p"] == 1)
            task.cancel()
            await stream.aclose()
            await until(lambda: split.prefill.running["p"] == 0)
            assert not split.decode.placed and not split.routes._router.cores[0].num_local

    run(check())


def test_control_calls_reach_both_fleets() -> None:
    async def check() -> None:
        async with Split() as split:
            assert await split.client.fleet.call_all("resume", {}, None) == [True, True]
            assert split.prefill.calls == split.decode.calls == ["resume"]

    run(check())
