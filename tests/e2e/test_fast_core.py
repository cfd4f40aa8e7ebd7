"""Tests of an engine core that is faster than any API process, as is usual on a GPU: all clients still make
progress."""

import asyncio
import json
import multiprocessing
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from fast_core import run_fast_core
from fast_server import run_server
from tiny_text import TextModel

from quire.remote.http import HttpClient
from quire.remote.openai import Chunk, stream

LONGEST = 131072
NUM_STREAMS = 64
NUM_TOKENS = 2000


@dataclass
class Server:
    url: str
    process: psutil.Process


@contextmanager
def serving(model: Path, folder: Path) -> Iterator[Server]:
    context = multiprocessing.get_context("spawn")
    address = f"ipc://{folder}/core"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        processes = [
            context.Process(target=run_fast_core, args=(address, 50, LONGEST, NUM_STREAMS), daemon=True),
            context.Process(target=run_server, args=(model, address, listener, LONGEST), daemon=True),
        ]
        for process in processes:
            process.start()
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            httpx.get(url + "/health", timeout=120).raise_for_status()
            yield Server(url, psutil.Process(processes[1].pid))
        finally:
            for process in processes:
                process.kill()
                process.join()


class ChunkClock:
    """A clock that counts the chunks that all clients have received, so that the load of the machine does not
    matter."""

    def __init__(self) -> None:
        self.now = 0


@dataclass
class StreamRecord:
    """The chunks that one client has received, by the clock's number at their arrival."""

    clock: ChunkClock
    arrivals: list[int] = field(default_factory=list)
    num_tokens: int = 0

    def take(self, chunk: Chunk) -> None:
        if chunk.choices:
            self.clock.now += 1
            self.arrivals.append(self.clock.now)
        if chunk.usage is not None:
            self.num_tokens = chunk.usage.completion_tokens

    @property
    def longest_gap(self) -> int:
        return max(after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False))


async def run_streams(server: Server, clock: ChunkClock) -> tuple[list[StreamRecord], list[int], list[int]]:
    """Run streams; meanwhile, record how long /health takes and how much memory the server uses."""
    client = HttpClient(server.url, timeout_s=280.0)
    wanted = {"max_tokens": NUM_TOKENS, "stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps({"prompt": [20] * 16, "ignore_eos": True, **wanted}).encode()
    seen = [StreamRecord(clock) for _ in range(NUM_STREAMS)]
    waits, sizes = [], []

    async def watch() -> None:
        while True:
            before = clock.now
            try:
                assert (await client.request("GET", "/health")).status == 200
            finally:
                waits.append(clock.now - before)
            sizes.append(server.process.memory_info().rss)
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(stream(client, "/v1/completions", body, item.take) for item in seen))
    watching.cancel()
    client.close()
    return seen, waits, sizes


def test_streams_flow_and_health_answers_under_a_flood_of_tokens(tiny: TextModel, tmp_path: Path) -> None:
    """A process that reads until nothing is left would send nothing before the core is done."""
    with serving(tiny.path, tmp_path) as server:
        clock = ChunkClock()
        seen, waits, sizes = asyncio.run(run_streams(server, clock))
    assert all(item.num_tokens == NUM_TOKENS for item in seen), "no token is lost"
    assert min(len(item.arrivals) for item in seen) > 20, "the flood is long enough"
    # Nothing waits for the end of the flood: neither the first chunk of a stream, nor the next one, nor
    # /health.
    assert max(item.arrivals[0] for item in seen) < clock.now / 4
    assert max(item.longest_gap for item in seen) < clock.now / 4
    assert max(waits) < clock.now / 4
    assert all(len(item.arrivals) < NUM_TOKENS for item in seen), "simultaneous tokens are merged"
    assert sizes[-1] - sizes[len(sizes) // 4] < 100 << 20
