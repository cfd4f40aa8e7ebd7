"""Tests of a fleet without Ray: the choice of replicas, and streams that continue on another replica."""

import asyncio
import contextvars
import pickle
import random
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any

import pytest
from fast_core import engine_over

from quire.data.lora import LoRARequest
from quire.data.outputs import RequestOutput
from quire.data.params import RequestOutputKind, SamplingParams
from quire.data.request import Request
from quire.data.stats import StepStats
from quire.data.step_plan import FinishReason, FirstRun, StepOutput
from quire.data.wire import Add, Missing, Ready, StepDone, decode_to_core, encode
from quire.errors import EngineDead, RequestError
from quire.frontend.cached_prefixes import CachedPrefixes, PrefixChanges
from quire.frontend.fleet_link import Fleet, ReplicaLost
from quire.frontend.fleet_routes import FleetRoutes, Route
from quire.frontend.inputs import Prompt

VOCAB = 320
NAMES = ("a", "b", "c")
NO_REPORT: dict[str, float] = {}


HTTP_REQUEST = contextvars.ContextVar("HTTP_REQUEST", default="")
"""Stands for Ray Serve's variable with the id of the HTTP request."""


def next_token(tokens: Sequence[int]) -> int:
    """Return the token that a replica generates, which depends on everything before it."""
    return 10 + (31 * sum(tokens) + 7 * len(tokens)) % (VOCAB - 10)


class Replicas:
    """A fleet whose replicas compute one token at a time, until the test ends one of them."""

    def __init__(self, *names: str) -> None:
        self.running = dict.fromkeys(names, 0)
        """Number of requests by replica."""
        self.placed: list[str] = []
        """Replica of each request that was sent."""
        self.requests: list[Request] = []
        self.aborted: list[tuple[str, list[str]]] = []
        self.calls: list[str] = []
        self.dead: dict[str, Exception] = {}
        self.caches: dict[str, CachedPrefixes] = {}
        self.stops = asyncio.Event()
        """Set while replicas compute."""
        self.stops.set()
        self.num_steps = 0
        self.is_poisoned = False
        """Whether every request ends its replica."""
        self.missing: set[str] = set()
        """Requests that lack arrays."""
        self.is_healthy = True

    async def ready(self) -> Ready:
        return Ready(1, 1000, 100, 1600)

    async def ping(self) -> None:
        if not self.is_healthy:
            raise EngineDead("hangs")

    async def stream(self, route: Route, data: bytes) -> AsyncGenerator[str | Sequence[bytes]]:
        assert HTTP_REQUEST.get() == "", "Ray Serve never answers two calls with the id of one HTTP request"
        alive = [name for name in self.running if name not in self.dead]
        assert route.routes is not None
        route.routes.update(dict.fromkeys(alive, ((), NO_REPORT)))
        name = route.routes.rank(route, alive)[0]
        route.routes.assign(route, name)
        self.placed.append(name)
        add = decode_to_core(data)
        assert isinstance(add, Add)
        self.requests += add.all()
        yield name
        self.running[name] += 1
        try:
            async for messages in self._compute(name, add.all()):
                yield messages
        finally:
            self.running[name] -= 1

    async def _compute(self, name: str, requests: list[Request]) -> AsyncGenerator[list[bytes]]:
        if requests[0].id.startswith(tuple(self.missing)) and self.missing:
            self.missing.clear()
            yield [encode(Missing(requests[0].id))]
            return
        tokens = {request.id: list(request.tokens) for request in requests}
        admitted = {request.id: FirstRun(0, 50.0, 50.5) for request in requests if not request.has_run}
        while tokens:
            await asyncio.sleep(0)
            await self.stops.wait()
            if self.is_poisoned:
                self.dead[name] = ReplicaLost("crash")
            if name in self.dead:
                raise self.dead[name]
            finished = {}
            output = StepOutput([], [], at=51.0, admitted=admitted, stats=StepStats(self.running[name]))
            for request in requests:
                if request.id in tokens:
                    tokens[request.id].append(next_token(tokens[request.id]))
                    output.request_ids.append(request.id)
                    output.token_ids.append(tokens[request.id][-1])
                    if len(tokens[request.id]) >= request.limit:
                        finished[request.id] = FinishReason("length")
                        del tokens[request.id]
            output.finished, admitted = finished, {}
            self.num_steps += 1
            yield [encode(StepDone(output))]

    async def cached_prefixes(self, route: Route, number: int) -> PrefixChanges | None:
        if route.replica not in self.caches:
            return None
        assert route.routes is not None and route.routes.rank(route, [route.replica]) == [route.replica]
        return self.caches[route.replica].since(number)

    async def abort(self, route: Route, sequence_ids: list[str]) -> None:
        self.aborted.append((route.replica, sequence_ids))

    async def call_all(self, method: str, args: dict[str, Any], timeout_s: float | None) -> list[Any]:
        self.calls.append(method)
        return [True for _ in self.running]


class Client:
    """An engine over a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self.now = 100.0
        self.fleet = fleet
        self.engine = engine_over("", vocab=VOCAB, max_model_len=1000, clock=lambda: self.now, fleet=fleet)
        self.engine.start()

    async def ask(
        self, id: str, prompt: list[int], max_tokens: int = 24, **params: Any
    ) -> list[RequestOutput]:
        HTTP_REQUEST.set(id)
        settings = {"output_kind": RequestOutputKind.DELTA, "detokenize": False, "ignore_eos": True}
        checked = SamplingParams(max_tokens=max_tokens, **(settings | params))
        return [output async for output in self.engine.generate(Prompt(prompt), checked, id)]


def tokens_of(outputs: list[RequestOutput], index: int = 0) -> list[int]:
    parts = [part for output in outputs for part in output.outputs if part.index == index]
    return [token for part in parts for token in part.token_ids]


def expected(prompt: list[int], max_tokens: int = 24) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def prompt(seed: int, length: int = 40) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, VOCAB) for _ in range(length)]


# ---- streams


@pytest.mark.parametrize("cause", [ReplicaLost("killed"), RuntimeError("bug")])
def test_streams_of_a_dead_replica_continue_on_another_one(cause: Exception) -> None:
    async def test() -> None:
        client = Client(fleet := Replicas("a", "b"))
        await client.engine.ready()
        tasks = [asyncio.create_task(client.ask(str(i), prompt(i))) for i in range(16)]
        await until(lambda: fleet.num_steps >= 16 * 4)
        assert sorted(fleet.placed).count("a") == 8, "the load is balanced"
        fleet.dead["a"] = cause
        answers = await asyncio.gather(*tasks)
        assert [tokens_of(answer) for answer in answers] == [expected(prompt(i)) for i in range(16)]
        assert fleet.placed[16:] == ["b"] * 8
        assert all(request.has_run and len(request.tokens) > 40 for request in fleet.requests[16:])
        assert client.engine.metrics.pages.value("request_resumed") == 8
        assert client.engine.num_in_flight == 0 and not client.engine._links[0]._runs  # type: ignore[attr-defined]
        client.engine.close()

    run(test())


def test_request_that_ends_every_replica_fails() -> None:
    """Check that a request without progress is not sent again and again."""

    async def test() -> None:
        client = Client(fleet := Replicas(*NAMES))
        await client.engine.ready()
        fleet.is_poisoned = True
        with pytest.raises(EngineDead, match="please send it again"):
            await client.ask("x", prompt(0))
        assert len(set(fleet.placed)) == len(fleet.placed) == 2
        client.engine.close()

    run(test())


def test_closed_stream_is_aborted_at_its_replica() -> None:
    async def test() -> None:
        client = Client(fleet := Replicas("a"))
        await client.engine.ready()
        stream = client.engine.generate(
            Prompt(prompt(0)), SamplingParams(max_tokens=500, detokenize=False, ignore_eos=True), "x"
        )
        await stream.__anext__()
        assert fleet.running == {"a": 1}
        await stream.aclose()
        await until(lambda: not fleet.running["a"])
        assert client.engine.num_in_flight == 0
        client.engine.close()

    run(test())


def test_samples_of_one_request_are_on_one_replica_and_aborted_alone() -> None:
    async def test() -> None:
        client = Client(fleet := Replicas("a", "b"))
        await client.engine.ready()
        outputs = await client.ask("x", prompt(0), n=2, seed=1)
        assert [tokens_of(outputs, k) for k in range(2)] == [expected(prompt(0))] * 2
        assert len(fleet.placed) == 1
        fleet.stops.clear()
        task = asyncio.create_task(client.ask("y", prompt(1), n=2, seed=1))
        await until(lambda: len(fleet.requests) == 4)
        await asyncio.sleep(0.01)
        from quire.data.wire import Abort

        client.engine._links[0].send(Abort([fleet.requests[-1].id]))
        await until(lambda: fleet.aborted)
        assert fleet.aborted == [(fleet.placed[-1], [fleet.requests[-1].id])]
        fleet.stops.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        client.engine.close()

    run(test())


def test_request_with_missing_arrays_is_sent_again() -> None:
    async def test() -> None:
        client = Client(fleet := Replicas("a"))
        await client.engine.ready()
        fleet.missing.add("x")
        assert tokens_of(await client.ask("x", prompt(0))) == expected(prompt(0))
        assert len(fleet.placed) == 2
        client.engine.close()

    run(test())


def test_health_is_that_of_the_replicas() -> None:
    async def test() -> None:
        fleet = Replicas("a")
        client = Client(fleet)
        with pytest.raises(EngineDead, match="is starting"):
            client.engine.check()
        await client.engine.ready()
        client.engine.check()
        fleet.is_healthy = False
        client.now += 31
        with pytest.raises(EngineDead, match="no replica has answered for 31.0 s; the limit is 30 s"):
            client.engine.check()
        client.engine.close()

    run(test())


def test_control_calls_reach_all_replicas() -> None:
    async def test() -> None:
        client = Client(fleet := Replicas("a", "b"))
        await client.engine.ready()
        await client.ask("x", [*prompt(0, 64), 11])
        assert await client.engine.operation.reset_prefix_cache()
        assert fleet.calls == ["reset_prefix_cache"]
        with pytest.raises(RequestError, match="LoRA is not enabled"):
            await client.engine.operation.add_adapter(LoRARequest("x", 1, "/x"))
        client.engine.close()

    run(test())


# ---- routes


def fleet_routes(*names: str, **options: Any) -> FleetRoutes:
    routes = FleetRoutes(block_size=16, max_num_seqs=64, **options)
    routes.update(dict.fromkeys(names, ((), NO_REPORT)))
    return routes


def place(
    routes: FleetRoutes, id: str, tokens: list[int], among: Sequence[str] = NAMES, **options: Any
) -> str:
    route = routes.route(id, tokens, **options)
    name = routes.rank(route, among)[0]
    routes.assign(route, name)
    return name


def test_session_comes_before_prefix_and_prefix_before_load() -> None:
    routes = fleet_routes(*NAMES)
    home = place(routes, "1", prompt(1, 200), session="s")
    assert place(routes, "2", [*prompt(1, 200), 11, 12]) == home, "the prefix is there"
    other = place(routes, "3", prompt(2, 200), session="t")
    assert other != home, "the load is lower elsewhere"
    assert place(routes, "4", [*prompt(1, 200), 11], session="t") == other, "the session wins"
    routes.update_load(other, num_running=60, num_waiting=9, kv_usage=0.9)
    assert place(routes, "5", prompt(3, 200), session="t") != other, "the replica of the session is too busy"


def test_replicas_come_and_go() -> None:
    routes = fleet_routes("a")
    assert place(routes, "1", prompt(1, 200), ["a"], session="s") == "a"
    routes.update(dict.fromkeys(("b", "c"), ((), NO_REPORT)))
    first = place(routes, "2", prompt(1, 200), ["b", "c"], session="s")
    routes.update(dict.fromkeys(("b", "c", "d"), ((), NO_REPORT)))
    assert place(routes, "3", prompt(1, 200), ["b", "c", "d"], session="s") == first
    others = {place(routes, f"x{i}", prompt(10 + i), ["b", "c", "d"]) for i in range(2)}
    assert others == {"b", "c", "d"} - {first}
    routes.end("1")
    routes.end("1")


def test_reports_count_for_replicas_without_own_requests() -> None:
    """Check that an old report does not replace the newer numbers of outputs."""
    routes = fleet_routes("a", "b")
    report = {"num_running": 9.0, "num_waiting": 0.0, "kv_usage": 0.5}
    routes.update({"a": ((), report), "b": ((), NO_REPORT)})
    assert [place(routes, str(i), prompt(i), "ab") for i in range(3)] == ["b"] * 3
    routes.update_load("b", num_running=12, num_waiting=0, kv_usage=0.1)
    routes.update({"a": ((), report), "b": ((), {"num_running": 0.0, "num_waiting": 0.0, "kv_usage": 0.0})})
    assert place(routes, "x", prompt(50), "ab") == "a"
    routes.lose("b")
    assert place(routes, "y", prompt(51), "ab") == "b"


def test_adapter_goes_to_a_replica_that_has_loaded_it() -> None:
    routes = fleet_routes(*NAMES)
    routes.update({"a": ((), NO_REPORT), "b": (("sql",), NO_REPORT), "c": ((), NO_REPORT)})
    assert {place(routes, str(i), prompt(i), adapter="sql") for i in range(6)} == {"b"}
    assert place(routes, "x", prompt(9)) != "b"
    routes.update_load("b", num_running=50, num_waiting=0, kv_usage=0.1)
    assert place(routes, "y", prompt(10), adapter="sql") != "b", "it is too busy"


def test_pinned_call_goes_to_its_replica_or_nowhere() -> None:
    routes = fleet_routes(*NAMES)
    assert routes.rank(Route(replica="b", routes=routes), NAMES) == ["b"]
    assert routes.rank(Route(replica="gone", routes=routes), NAMES) == []


def test_only_the_adapter_of_a_route_is_sent() -> None:
    route = fleet_routes("a").route("1", prompt(0, 5000), session="s", adapter="sql")
    data = pickle.dumps(route)
    assert len(data) < 1000 and pickle.loads(data).adapter == "sql"
