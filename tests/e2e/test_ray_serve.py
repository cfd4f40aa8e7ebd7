"""Tests of Ray Serve on this machine: the same answers as one engine, killed and replaced replicas, scaling,
and cache hits.

They need `pip install 'quire[ray-serve]'`; `pytest -m slow tests/e2e/test_ray_serve.py -s` prints the
figures."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from ports import free_port
from serve_process import eventually
from tiny_adapter import write_adapter
from tiny_text import TextModel

from quire import LLM, SamplingParams

pytestmark = pytest.mark.slow

MAX_MODEL_LEN = 8192
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": MAX_MODEL_LEN,
    "hf_overrides": {"max_position_embeddings": MAX_MODEL_LEN},
    "block_size": 16,
    "max_num_seqs": 32,
    "num_gpu_blocks_override": 513,
    "served_model_name": "tiny",
    "enable_prompt_tokens_details": True,
}
FLEET: dict[str, Any] = {"num_cpus": 0.1, "ingress_num_cpus": 0.1, "drain_s": 60}
RAY_ENV = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_raylet_start_wait_time_s": "180",
    "RAY_worker_register_timeout_seconds": "180",
}
TIMEOUT_S = 120.0
"""Maximum pause of a stream in seconds."""
PROMPTS = [[5 + k, 40, 300 - k, *range(10, 60 + k)] for k in range(16)]


class Fleet:
    """The Ray Serve application of this module, which is deployed anew for each group of tests."""

    def __init__(self, tiny: TextModel) -> None:
        from ray import serve

        self.serve = serve
        self.path = str(tiny.path)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        serve.start(http_options={"port": self.port})

    def deploy(self, **args: Any) -> None:
        from quire.entrypoints.ray_serve import build

        models = {} if "models" in args else {"model": self.path}
        random.seed()  # Ray draws the version of the code; with the seed of tests it would be an old one
        app = build({**SETTINGS, **FLEET, **models, **args})
        self.serve.run(app, name="quire", route_prefix="/")

    def remove(self) -> None:
        self.serve.delete("quire")

    def num_replicas(self) -> int:
        states = self.serve.status().applications["quire"].deployments["Engine"].replica_states
        return sum(count for state, count in states.items() if str(state).endswith("RUNNING"))

    def replicas(self, deployment: str = "Engine") -> list[psutil.Process]:
        name = f"ray::ServeReplica:quire:{deployment}"
        everything = [item for item in psutil.process_iter(["cmdline"]) if item.info["cmdline"]]
        return [item for item in everything if item.info["cmdline"][0].startswith(name)]


@pytest.fixture(scope="module")
def fleet(tiny: TextModel) -> Iterator[Fleet]:
    pytest.importorskip("ray.serve")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RAY_ENV.items():
            patch.setenv(name, value)
        import ray

        ray.init(num_cpus=8, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=True)
        yield Fleet(tiny)
        ray.shutdown()


def body(number: int, max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": PROMPTS[number % len(PROMPTS)],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
        "seed": number,
        **fields,
    }


async def stream(
    client: httpx.AsyncClient, fields: dict[str, Any], seen: list[int] | None = None
) -> list[int]:
    """Return the token ids of a streamed completion; `seen` has them as they arrive."""
    tokens: list[int] = [] if seen is None else seen
    async with client.stream("POST", "/v1/completions", json=fields | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        is_done = False
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                is_done = True
            elif line.startswith("data: "):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                for choice in chunk["choices"]:
                    tokens += choice["token_ids"] or []
        assert is_done, "the stream was cut off"
    return tokens


def streams(
    fleet: Fleet,
    num: int,
    max_tokens: int,
    meanwhile: Callable[[], object] = lambda: None,
    begun: int = 8,
    **fields: Any,
) -> list[list[int]]:
    """Return the tokens of concurrent streams, with `fields` in their bodies. When all have begun,
    `meanwhile` runs, then new streams begin."""

    async def everything() -> list[list[int]]:
        seen: list[list[int]] = [[] for _ in range(num)]
        async with httpx.AsyncClient(base_url=fleet.url, timeout=TIMEOUT_S) as client:
            tasks = [
                asyncio.create_task(stream(client, body(k, max_tokens, temperature=k % 2, **fields), seen[k]))
                for k in range(num)
            ]
            while not all(len(tokens) >= begun for tokens in seen):
                await asyncio.sleep(0.01)
                assert not any(task.done() for task in tasks)
            await asyncio.to_thread(meanwhile)
            short = [stream(client, body(k, 2, temperature=0, **fields)) for k in range(8)]
            assert all(len(tokens) == 2 for tokens in await asyncio.gather(*short))
            return list(await asyncio.gather(*tasks))

    return asyncio.run(everything())


@pytest.fixture(scope="module")
def pair(fleet: Fleet) -> Fleet:
    fleet.deploy(min_replicas=2)
    return fleet


def test_answers_are_those_of_one_engine(pair: Fleet) -> None:
    settings = {name: value for name, value in SETTINGS.items() if name != "enable_prompt_tokens_details"}
    llm = LLM(pair.path, use_tqdm_on_load=False, **settings)
    expected = [
        llm.generate(
            {"prompt_token_ids": PROMPTS[k]},
            SamplingParams(temperature=k % 2, max_tokens=40, ignore_eos=True, seed=k, logprobs=2),
            use_tqdm=False,
        )[0].outputs[0]
        for k in range(16)
    ]
    assert streams(pair, 16, 40) == [output.token_ids for output in expected]
    with httpx.Client(base_url=pair.url, timeout=TIMEOUT_S) as client:
        answer = client.post("/v1/completions", json=body(2, 40, temperature=0, logprobs=2)).json()
        logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
        tokens = expected[2].token_ids
        first = [
            position[token].logprob for position, token in zip(expected[2].logprobs, tokens, strict=True)
        ]
        assert logprobs == pytest.approx(first, abs=1e-4)
        message = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
        assert client.post("/v1/chat/completions", json=message).json()["usage"]["completion_tokens"] == 8
        assert client.post("/v1/messages", json=message).json()["usage"]["output_tokens"] == 8
        assert client.get("/health").status_code == 200
        assert client.post("/v1/completions", json=body(0, 4, model="other")).status_code == 404
        assert "vllm:request_success_total" in client.get("/metrics").text


def test_killed_replica_ends_no_stream(pair: Fleet) -> None:
    expected = streams(pair, 16, 400)
    killed = []

    def kill() -> None:
        process = pair.replicas()[0]
        killed.append(process.pid)
        os.kill(process.pid, signal.SIGKILL)

    assert streams(pair, 16, 400, kill) == expected
    with httpx.Client(base_url=pair.url, timeout=TIMEOUT_S) as client:
        metrics = client.get("/metrics").text
    (line,) = [line for line in metrics.splitlines() if "request_resumed_total{" in line]
    num_resumed = float(line.split()[-1])
    assert 0 < num_resumed < 16, "the requests of the other replica went on"
    print(f"\nkill -9 of a replica under 16 streams: all complete and equal, {num_resumed:g} resumed")
    eventually("a replica takes the place of the dead one", lambda: pair.num_replicas() == 2)
    assert killed[0] not in [process.pid for process in pair.replicas()]


def test_update_drains_the_old_replicas(pair: Fleet) -> None:
    """New settings start new replicas one after the other while streams run."""
    before = {process.pid for process in pair.replicas()}
    expected = streams(pair, 8, 600)
    assert streams(pair, 8, 600, lambda: pair.deploy(min_replicas=2, max_num_seqs=16)) == expected
    eventually("the old replicas are gone", lambda: not before & {item.pid for item in pair.replicas()})


def agent_run(fleet: Fleet, folder: Path) -> dict[str, Any]:
    """Return the result of 12 agent sessions without pauses, which grow to some 30,000 tokens together."""
    flags = ["--backend", "openai", "--base-url", fleet.url, "--model", "tiny"]
    flags += ["--dataset-name", "agent", "--agent-num-sessions", "12"]
    flags += ["--agent-turns", "6:8", "--agent-scale", "0.03", "--agent-time-scale", "0", "--seed", "7"]
    flags += ["--agent-hint", "none", "--random-vocab", "300"]
    flags += ["--save-result", "--result-dir", str(folder), "--result-filename", "result.json"]
    subprocess.run([sys.executable, "-m", "quire", "bench", "serve", *flags], check=True)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def test_agent_sessions_find_their_prefixes(fleet: Fleet, tmp_path: Path) -> None:
    """Check that each of two replicas caches its own sessions: one cache, of 20,480 tokens, is too small for
    all of them."""
    rates = {}
    for name in ("quire.entrypoints.ray_fleet:PrefixRouter", DEFAULT_ROUTER):
        fleet.deploy(min_replicas=2, num_gpu_blocks_override=1281, request_router=name)
        result = agent_run(fleet, tmp_path)
        rates[name] = result["agent_hit_rate"]
        print(
            f"\n{name}: hit rate {result['agent_hit_rate']:.1f} % of {result['agent_perfect_hit_rate']:.1f} %"
        )
        print({key: round(value, 1) for key, value in result.items() if key.endswith("ttft_ms")})
        fleet.remove()
    ours, default = rates.values()
    assert ours > default + 5


DEFAULT_ROUTER = "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter"


def test_fleet_grows_and_shrinks_under_load(fleet: Fleet) -> None:
    """Scale from 1 to 3 and back while clients send requests, none of which fails."""
    fleet.deploy(
        min_replicas=1,
        max_replicas=3,
        max_num_seqs=2,
        scaling_interval_s=1,
        upscale_delay_s=1,
        downscale_delay_s=3,
    )
    counts = [fleet.num_replicas()]
    answers = asyncio.run(_load(fleet, counts))
    expected: dict[int, list[int]] = {}
    for number, tokens in answers:
        assert expected.setdefault(number, tokens) == tokens and len(tokens) == 200
    print(f"\nreplicas over time: {counts}; {len(answers)} requests without an error")
    assert counts[0] == 1 and max(counts) == 3 and counts[-1] == 1
    fleet.remove()


async def _load(fleet: Fleet, counts: list[int]) -> list[tuple[int, list[int]]]:
    """Send requests from 12 clients until there are three replicas, then from one until there is one."""
    answers: list[tuple[int, list[int]]] = []
    async with httpx.AsyncClient(base_url=fleet.url, timeout=TIMEOUT_S) as client:
        has_grown, has_shrunk = asyncio.Event(), asyncio.Event()

        async def ask(number: int, end: asyncio.Event) -> None:
            while not end.is_set():
                answers.append((number, await stream(client, body(number, 200, temperature=0))))

        many = [asyncio.create_task(ask(number, has_grown)) for number in range(1, 12)]
        one = asyncio.create_task(ask(0, has_shrunk))
        deadline = time.monotonic() + 400
        while not has_shrunk.is_set() and time.monotonic() < deadline:
            await asyncio.sleep(0.5)
            count = await asyncio.to_thread(fleet.num_replicas)
            if count != counts[-1]:
                counts.append(count)
            if count == 3:
                has_grown.set()
            elif count == 1 and has_grown.is_set():
                has_shrunk.set()
        has_grown.set()
        has_shrunk.set()
        await asyncio.gather(one, *many)
    return answers


def test_prompts_and_answers_have_replicas_of_their_own(fleet: Fleet) -> None:
    """Check that prefixes move, that the answers are those of one fleet, and that the death of the replica
    that computes prompts ends no stream."""
    fleet.deploy()
    expected = streams(fleet, 8, 400)
    fleet.remove()
    fleet.deploy(min_replicas=2, prefill={"max_num_seqs": 4})
    assert streams(fleet, 8, 400) == expected
    with httpx.Client(base_url=fleet.url, timeout=TIMEOUT_S) as client:
        fields = body(0, 4, prompt=[7 + at % 200 for at in range(300)])
        usage = client.post("/v1/completions", json=fields).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens_by_tier"]["remote"] == 288

    def kill() -> None:
        os.kill(fleet.replicas("Prefill")[0].pid, signal.SIGKILL)

    assert streams(fleet, 8, 400, kill, cache_salt="these prompts are not cached") == expected
    fleet.remove()


def test_models_adapters_and_tensor_parallel_ranks(fleet: Fleet, tmp_path: Path) -> None:
    """Two models by name, one of them with two ranks in a placement group, and an adapter of it."""
    config = json.loads((Path(fleet.path) / "config.json").read_text())
    write_adapter(tmp_path / "styled", config, 1)
    first = {
        "model": fleet.path,
        "served_model_name": "wide",
        "tensor_parallel_size": 2,
        "enable_lora": True,
        "lora_modules": [f"styled={tmp_path}/styled"],
    }
    fleet.deploy(models=[first, {"model": fleet.path, "served_model_name": "tiny"}])
    with httpx.Client(base_url=fleet.url, timeout=TIMEOUT_S) as client:
        names = [card["id"] for card in client.get("/v1/models").json()["data"]]
        assert names == ["wide", "styled", "tiny"]
        tokens = {}
        for name in names:
            answer = client.post("/v1/completions", json=body(3, 16, model=name, temperature=0)).json()
            tokens[name] = answer["choices"][0]["token_ids"]
        assert tokens["wide"] == tokens["tiny"] != tokens["styled"]
        assert client.post("/v1/completions", json=body(3, 4, model="none")).status_code == 404
    ranks = [item for item in psutil.process_iter(["cmdline"]) if "ray::RayRank" in str(item.info["cmdline"])]
    assert len(ranks) == 2
    fleet.remove()
