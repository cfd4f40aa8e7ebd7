"""A soak test: mixed traffic on the default model for half an hour. Nothing grows, slows down or breaks.
`QUIRE_TEST_SOAK_S` sets its seconds, `QUIRE_TEST_SOAK_SEED` the traffic."""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
import pytest
from default_model import default_model
from serve_process import ServeProcess, eventually

SECONDS = float(os.environ.get("QUIRE_TEST_SOAK_S", "1800"))
SEED = int(os.environ.get("QUIRE_TEST_SOAK_SEED", "0"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * SECONDS + 1200)]

LONGEST, NUM_BLOCKS, STREAMS, VOCAB = 512, 321, 64, 49_000
FLAGS = (
    *("--max-model-len", str(LONGEST), "--max-num-seqs", str(STREAMS), "--block-size", "16"),
    *("--num-gpu-blocks-override", str(NUM_BLOCKS), "--served-model-name", "soaked"),
    *("--disable-uvicorn-access-log",),
)
PHASE_S = min(max(SECONDS / 24, 3.0), 30.0)
PROBE_TOKENS, PROBES = 32, 3
SLACK_BYTES, GROWTH, SLOWER = 32 << 20, 1.05, 0.9
ROUTES = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}

BAD: list[dict[str, Any]] = [
    {"prompt": "x", "max_tokens": -1},
    {"prompt": "x", "temperature": -0.5},
    {"prompt": "x", "n": 0},
    {"prompt": "x", "logprobs": 1000},
    {"prompt": [VOCAB + 10**6]},
    {"prompt": [5] * (LONGEST + 1)},
    {"prompt": "x", "top_p": 7},
    {"prompt": "x", "model": "nobody"},
    {"messages": []},
    {"messages": [{"role": 7, "content": "x"}]},
    {"messages": "hello"},
    {"messages": [{"role": "user", "content": None}]},
]
"""Invalid requests, each refused with a client error."""


class Soak:
    """A server and the requests that are sent to it."""

    def __init__(self, server: ServeProcess, client: httpx.AsyncClient) -> None:
        self.server = server
        self.client = client
        self.rng = random.Random(SEED)
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.num_bytes: list[dict[str, int]] = []
        """Resident bytes by process, after each phase."""
        self.rates: list[float] = []
        """Tokens per second of one stream, after each phase."""

    # ---- requests

    def prompt(self, most: int) -> list[int]:
        return [self.rng.randrange(10, VOCAB) for _ in range(self.rng.randint(1, most))]

    def body(self) -> dict[str, Any]:
        """Return a typical valid request."""
        rng = self.rng
        fields: dict[str, Any] = {"model": "soaked", "max_tokens": rng.randint(1, 32)}
        if rng.random() < 0.4:
            words = " ".join(rng.choice(["tell", "me", "a", "story", "of", "rain"]) for _ in range(9))
            fields["messages"] = [{"role": "user", "content": words}]
        else:
            fields["prompt"] = self.prompt(rng.choice([8, 64, 300]))
        extras: list[dict[str, Any]] = [
            {"temperature": 0},
            {"temperature": 0.8, "top_p": 0.9, "seed": rng.randrange(99)},
            {"n": rng.randint(2, 4), "temperature": 1.0},
            {"logprobs": True, "top_logprobs": 3} if "messages" in fields else {"logprobs": 3},
            {"stop": ["the", "."], "temperature": 0.5},
            {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
            {"top_k": 20, "min_p": 0.05, "logit_bias": {"30": 2.0}, "min_tokens": 1},
        ]
        return fields | rng.choice(extras)

    async def whole(self) -> None:
        fields = self.body()
        reply = await self.post(fields)
        if reply.status_code != 200 or len(reply.json()["choices"]) != fields.get("n", 1):
            self.wrong.append(f"{reply.status_code} for {fields}: {reply.text[:200]}")
        self.counts["whole"] += 1

    async def streamed(self) -> None:
        last = ""
        async with aclosing(self.lines(self.body())) as lines:
            async for line in lines:
                last = line
        if last != "data: [DONE]":
            self.wrong.append(f"a stream ended with {last[:200]!r}")
        self.counts["streamed"] += 1

    async def aborted(self) -> None:
        left = self.rng.randint(0, 6)
        async with aclosing(self.lines(self.body() | {"max_tokens": 200})) as lines:
            async for _ in lines:
                left -= 1
                if left < 0:
                    break
        self.counts["aborted"] += 1

    async def refused(self) -> None:
        fields = {"model": "soaked"} | self.rng.choice(BAD)
        reply = await self.post(fields)
        if not 400 <= reply.status_code < 500:
            self.wrong.append(f"{reply.status_code} for {fields}")
        self.counts["refused"] += 1

    async def post(self, body: dict[str, Any]) -> httpx.Response:
        return await self.client.post(route(body), json=body)

    async def lines(self, body: dict[str, Any]) -> Any:
        async with self.client.stream("POST", route(body), json=body | {"stream": True}) as reply:
            if reply.status_code != 200:
                self.wrong.append(f"{reply.status_code} for {body}: {(await reply.aread())[:200]!r}")
                return
            async for line in reply.aiter_lines():
                if line:
                    yield line

    # ---- phases

    async def phase(self, num_streams: int, seconds: float) -> None:
        """Run this many clients. Each sends one request after the other, until all requests are answered."""
        end = time.monotonic() + seconds
        kinds: list[Callable[[], Awaitable[None]]] = [self.whole, self.streamed, self.aborted, self.refused]

        async def client() -> None:
            while time.monotonic() < end:
                await self.rng.choices(kinds, weights=(4, 4, 2, 1))[0]()

        await asyncio.gather(*(client() for _ in range(num_streams)))
        await self.idle()

    async def idle(self) -> None:
        """Wait until no request runs, not even one whose client has disconnected."""
        for _ in range(1500):
            busy = (await asyncio.to_thread(self.server.metrics))["num_requests_running"]
            if not busy:
                return
            await asyncio.sleep(0.02)
        self.wrong.append("requests run although nobody asks")

    async def measure(self) -> None:
        """Measure one stream alone, the best of several, and the memory of every process."""
        body = {"model": "soaked", "prompt": [100, 200, 300], "temperature": 0, "ignore_eos": True}
        rates = []
        for _ in range(PROBES):
            at = []
            async with aclosing(self.lines(body | {"max_tokens": PROBE_TOKENS})) as lines:
                async for _ in lines:
                    at.append(time.monotonic())
            rates.append(PROBE_TOKENS / (at[-1] - at[0]))
        self.rates.append(max(rates))
        pids = {"core": self.server.core, "API": self.server.with_role("APIServer")[0]}
        self.num_bytes.append({name: psutil.Process(pid).memory_info().rss for name, pid in pids.items()})

    async def watch(self) -> None:
        while True:
            reply = await self.client.get("/health")
            if reply.status_code != 200:
                self.wrong.append(f"/health said {reply.status_code}")
            self.counts["health"] += 1
            await asyncio.sleep(0.5)

    async def warm_up(self) -> None:
        """Fill the whole cache, and run batches of every size."""
        for _ in range(NUM_BLOCKS * 16 // (LONGEST - 8) + 2):
            long = [self.rng.randrange(10, VOCAB) for _ in range(LONGEST - 8)]
            reply = await self.post({"model": "soaked", "prompt": long, "max_tokens": 1})
            assert reply.status_code == 200, reply.text
        lengths = [{"model": "soaked", "prompt": [9, n], "max_tokens": 4 + 2 * n} for n in range(STREAMS)]
        await asyncio.gather(*(self.post(body | {"ignore_eos": True}) for body in lengths))
        await self.phase(STREAMS, PHASE_S)
        await self.measure()
        self.num_bytes.clear(), self.rates.clear()

    async def run(self) -> None:
        await self.warm_up()
        watching = asyncio.create_task(self.watch())
        end = time.monotonic() + SECONDS
        while time.monotonic() < end or len(self.rates) < 4:
            await self.phase(round(STREAMS ** self.rng.random()), PHASE_S)
            await self.measure()
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


def route(body: dict[str, Any]) -> str:
    return next(path for key, path in ROUTES.items() if key in body)


async def soak(server: ServeProcess) -> Soak:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:
        made = Soak(server, client)
        await made.run()
        return made


def quarters(values: list[float]) -> tuple[float, float]:
    """Return the medians of the first quarter and of the last."""
    size = max(len(values) // 4, 1)
    return median(values[:size]), median(values[-size:])


def test_half_an_hour_of_mixed_traffic_leaks_nothing(tmp_path: Path) -> None:
    """Catches memory that grows with requests, lost rows or blocks, and a stream that never ends."""
    default_model()
    with ServeProcess(None, *FLAGS, log=tmp_path / "log") as server:
        server.until_healthy()
        result = asyncio.run(soak(server))
        print(dict(result.counts), [f"{rate:.1f}" for rate in result.rates], result.num_bytes)
        assert not result.wrong, result.wrong[:10]
        assert all(result.counts[kind] for kind in ("whole", "streamed", "aborted", "refused", "health"))
        for name in ("core", "API"):
            first, last = quarters([counts[name] for counts in result.num_bytes])
            assert last < GROWTH * first + SLACK_BYTES, f"{name} grew from {first} to {last} bytes"
        first, last = quarters(result.rates)
        assert last > SLOWER * first, f"one stream: {first:.1f} tokens a second, then {last:.1f}"
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            eventually(f"{name} is 0", lambda name=name: server.metrics()[name] == 0)  # type: ignore[misc]
        server.end_cleanly()
