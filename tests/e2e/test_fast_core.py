"""A core that is faster than any API process: everybody still gets his turn. On a GPU that is usual."""

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
from fast_core import engine_over, run_fast_core
from tiny_text import TextModel

from quire.remote.http import HttpClient
from quire.remote.openai import Chunk, stream
from quire.server.main import serve
from quire.server.settings import make_settings
from quire.text.tokenizer import load_tokenizer

LONGEST = 131072
NUM_STREAMS = 64
NUM_TOKENS = 4000


def run_server(model: Path, address: str, listener: socket.socket) -> None:
    """An API process without a supervisor."""

    async def answer() -> None:
        tokenizer = load_tokenizer(model, "hf")
        engine = engine_over(address, vocab=340, max_model_len=LONGEST, tokenizer=tokenizer)
        engine.start()
        await engine.ready()
        await serve(make_settings({"disable_uvicorn_access_log": True}), engine, [listener], announce=False)

    asyncio.run(answer())


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
            context.Process(target=run_fast_core, args=(address, 50, LONGEST), daemon=True),
            context.Process(target=run_server, args=(model, address, listener), daemon=True),
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
    """The time, in chunks that have arrived at all clients together: a busy machine does not change it."""

    def __init__(self) -> None:
        self.now = 0


@dataclass
class Seen:
    """What one client saw of its stream."""

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


async def crowd(server: Server, clock: ChunkClock) -> tuple[list[Seen], list[int], list[int]]:
    """Streams, and beside them how long /health takes and what memory the server has."""
    client = HttpClient(server.url, timeout_s=280.0)
    wanted = {"max_tokens": NUM_TOKENS, "stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps({"prompt": [20] * 16, "ignore_eos": True, **wanted}).encode()
    seen = [Seen(clock) for _ in range(NUM_STREAMS)]
    waits, sizes = [], []

    async def watch() -> None:
        while True:
            before = clock.now
            assert (await client.request("GET", "/health")).status == 200
            waits.append(clock.now - before)
            sizes.append(server.process.memory_info().rss)
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(stream(client, "/v1/completions", body, each.take) for each in seen))
    watching.cancel()
    client.close()
    return seen, waits, sizes


def test_streams_flow_and_health_answers_while_the_core_floods(tiny: TextModel, tmp_path: Path) -> None:
    """A process that reads until nothing is left would show nothing before the core is done."""
    with serving(tiny.path, tmp_path) as server:
        clock = ChunkClock()
        seen, waits, sizes = asyncio.run(crowd(server, clock))
    assert all(each.num_tokens == NUM_TOKENS for each in seen), "nothing is lost"
    assert min(len(each.arrivals) for each in seen) > 20, "the flood is long enough to tell"
    assert len(waits) > 5
    # Nothing waits for the end of the flood: not the first chunk of a stream, not the next one, not /health.
    assert max(each.arrivals[0] for each in seen) < clock.now / 4
    assert max(each.longest_gap for each in seen) < clock.now / 4
    assert max(waits) < clock.now / 4
    assert all(len(each.arrivals) < NUM_TOKENS for each in seen), "what comes at once goes out at once"
    assert sizes[-1] - sizes[len(sizes) // 4] < 100 << 20
