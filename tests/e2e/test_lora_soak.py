"""A soak test of LoRA adapters: loaded, unloaded and reloaded under the traffic of 16 clients.
`QUIRE_TEST_ADAPTER_SOAK_S` sets its seconds."""

import asyncio
import itertools
import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from statistics import median

import httpx
import psutil
import pytest
from serve_process import ServeProcess, Start, eventually, greedy
from tiny_adapter import write_adapter
from tiny_text import TextModel

SECONDS = float(os.environ.get("QUIRE_TEST_ADAPTER_SOAK_S", "300"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * SECONDS + 600)]

CLIENTS, LOOK_S, SLACK_BYTES = 16, 20.0, 12 << 20
NAMES = [f"adapter-{letter}" for letter in "abcdef"]
PROMPTS = [
    f"{words} {number}" for number in range(3) for words in ("The quick", "Once upon a time there was")
]
FLAGS = ("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "3", "--max-lora-rank", "8")


class Soak:
    """Clients that check the answers of each adapter, and one that loads and unloads adapters."""

    def __init__(self, server: ServeProcess, folder: Path, client: httpx.AsyncClient) -> None:
        self.server, self.folder, self.client = server, folder, client
        self.rng = random.Random(0)
        self.alone: dict[tuple[str, str], str] = {}
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.num_bytes: list[int] = []
        """Resident bytes of all processes, measured every `LOOK_S` seconds."""

    async def ask(self, model: str, prompt: str) -> httpx.Response:
        body = greedy(model=model, prompt=prompt, max_tokens=16)
        return await self.client.post("/v1/completions", json=body)

    async def change(self, route: str, name: str, **more: object) -> int:
        body = {"lora_name": name, **more}
        reply = await self.client.post(f"/v1/{route}_lora_adapter", json=body)
        if reply.status_code >= 500:
            self.wrong.append(f"{reply.status_code} to {route} {name}: {reply.text[:200]}")
        self.counts[f"{route} {reply.status_code}"] += 1
        return reply.status_code

    async def load(self, name: str, **more: object) -> int:
        return await self.change("load", name, lora_path=str(self.folder / name), **more)

    async def record_expected(self) -> None:
        """Record the answer of each adapter to each prompt while no other request runs."""
        for name, prompt in itertools.product(["tiny", *NAMES], PROMPTS):
            self.alone[name, prompt] = (await self.ask(name, prompt)).json()["choices"][0]["text"]
        assert len({self.alone[name, PROMPTS[0]] for name in ("tiny", *NAMES)}) == len(NAMES) + 1

    async def client_until(self, end: float) -> None:
        while time.monotonic() < end:
            name, prompt = self.rng.choice(["tiny", *NAMES]), self.rng.choice(PROMPTS)
            reply = await self.ask(name, prompt)
            self.counts[f"answer {reply.status_code}"] += 1
            if reply.status_code == 404 and name != "tiny":  # unloaded at the time
                continue
            if reply.status_code != 200:
                self.wrong.append(f"{reply.status_code} of {name}: {reply.text[:200]}")
            elif reply.json()["choices"][0]["text"] != self.alone[name, prompt]:
                self.wrong.append(f"{name} said of {prompt!r} {reply.text[:200]}")

    async def change_until(self, end: float) -> None:
        while time.monotonic() < end:
            name = self.rng.choice(NAMES)
            if self.rng.random() < 0.5:
                await self.load(name, load_inplace=True)
            else:
                await self.change("unload", name)
                await asyncio.sleep(0.05)
                await self.load(name)
            await asyncio.sleep(0.05)

    async def look_until(self, end: float) -> None:
        while time.monotonic() < end:
            self.num_bytes.append(sum(_resident(member) for member in self.server.members()))
            await asyncio.sleep(min(LOOK_S, SECONDS / 8))

    async def run(self) -> None:
        for name in NAMES:
            assert await self.load(name) == 200
        await self.record_expected()
        await self.client_until(time.monotonic() + min(SECONDS / 10, 10.0))
        end = time.monotonic() + SECONDS
        clients = (self.client_until(end) for _ in range(CLIENTS))
        changers = (self.change_until(end) for _ in range(2))
        await asyncio.gather(*clients, *changers, self.look_until(end))
        for name in NAMES:
            await self.change("unload", name)


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


async def soak(server: ServeProcess, folder: Path) -> Soak:
    headers = {"connection": "close"}  # new connections: the server may close a kept one just as it is reused
    async with httpx.AsyncClient(base_url=server.url, timeout=600, headers=headers) as client:
        made = Soak(server, folder, client)
        await made.run()
        return made


def test_adapters_are_loaded_and_unloaded_under_traffic(
    start: Start, tiny: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an adapter that answers for another, a lost slot or load, and memory that grows."""
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    model = json.loads((tiny.path / "config.json").read_text())
    for seed, name in enumerate(NAMES, 1):
        write_adapter(tmp_path / name, model, seed)
    server = start(*FLAGS, "--lora-roots", str(tmp_path))
    server.until_healthy()
    result = asyncio.run(soak(server, tmp_path))
    print(dict(result.counts), [f"{num_bytes / 1e6:.0f} MB" for num_bytes in result.num_bytes])
    assert not result.wrong, (len(result.wrong), result.wrong[:10])
    assert all(result.counts[kind] for kind in ("answer 200", "load 200", "unload 200"))
    half = len(result.num_bytes) // 2
    first, last = median(result.num_bytes[:half]), median(result.num_bytes[half:])
    assert last < first + SLACK_BYTES, f"grew from {first} to {last} bytes"
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        eventually(f"{gauge} is 0", lambda gauge=gauge: server.metrics()[gauge] == 0)  # type: ignore[misc]
    assert server.client.get("/v1/models").json()["data"][-1]["id"] == "also-tiny"
    server.end_cleanly()
