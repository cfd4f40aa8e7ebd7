"""Tests of prefill and decode in different servers, behind a client that does what vLLM's proxies do."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from ports import free_port
from preloaded import Preloaded
from serve_process import PATIENCE_S, SHARED_FLAGS, ServeProcess, events, eventually, greedy, joined
from tiny_adapter import write_adapter
from tiny_text import TextModel

from quire.config.env import Env

LONG = "The quick brown fox jumps over the lazy dog. " * 40


class Pair(NamedTuple):
    """Two servers: the first computes prompts, the second computes the answers."""

    prefill: ServeProcess
    decode: ServeProcess

    def prepared(
        self, body: dict[str, Any], route: str = "/v1/completions", id: str = "one"
    ) -> dict[str, Any]:
        """Let the first server compute the prompt; return the body for the second server."""
        first = {name: value for name, value in body.items() if name != "stream_options"}
        first |= {"stream": False, "max_tokens": 1}
        if "max_completion_tokens" in body:
            first["max_completion_tokens"] = 1
        names = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
        first["kv_transfer_params"] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            **dict.fromkeys(names),
        }
        reply = self.prefill.client.post(route, json=first, headers={"X-Request-Id": id})
        assert reply.status_code == 200, reply.text
        return body | {"kv_transfer_params": reply.json()["kv_transfer_params"]}

    def answer(self, body: dict[str, Any], route: str = "/v1/completions", id: str = "one") -> dict[str, Any]:
        """Return the answer to a body through both servers."""
        reply = self.decode.client.post(
            route, json=self.prepared(body, route, id), headers={"X-Request-Id": id}
        )
        assert reply.status_code == 200, reply.text
        result: dict[str, Any] = reply.json()
        return result

    def num_loaded(self) -> float:
        """Return the number of prompt tokens that the second server got from the first."""
        return self.decode.metrics()["prompt_tokens_by_source_total:external_kv_transfer"]


@contextmanager
def started_pair(tiny: TextModel, preloaded: Preloaded, folder: Path) -> Iterator[Pair]:
    kernels = Env.read(os.environ).cache_root / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (folder / "kernels").symlink_to(kernels)
    write_adapter(folder / "adapter", json.loads((tiny.path / "config.json").read_text()), 1)
    env = {"QUIRE_CACHE_ROOT": str(folder), "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    flags = (*SHARED_FLAGS, "--max-num-batched-tokens", "256", "--enable-prompt-tokens-details")
    flags += ("--enable-lora", "--max-lora-rank", "64", "--lora-modules", f"adapter={folder / 'adapter'}")
    with ExitStack() as stack:
        servers = []
        for role in ("kv_producer", "kv_consumer"):
            config = json.dumps({"kv_connector": "NixlConnector", "kv_role": role})
            server = ServeProcess(
                str(tiny.path),
                *(*flags, "--kv-transfer-config", config),
                log=folder / role,
                env=env,
                preloaded=preloaded,
            )
            servers.append(stack.enter_context(server))
        for server in servers:
            server.until_healthy()
        yield Pair(*servers)


@pytest.fixture(scope="module")
def pair(tiny: TextModel, preloaded: Preloaded, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with started_pair(tiny, preloaded, tmp_path_factory.mktemp("pair")) as pair:
        yield pair


def strip(answer: dict[str, Any]) -> Any:
    """Return the parts of an answer that are the same for equal requests."""
    return answer["choices"], answer["usage"]["completion_tokens"]


def check_equal(actual: Any, expected: Any) -> None:
    """Check that answers are equal, except for the last digits of logprobs, which depend on how many tokens
    torch computes together."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            check_equal(actual[name], value)
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            check_equal(one, other)
    else:
        assert actual == (pytest.approx(expected, abs=1e-4) if isinstance(expected, float) else expected)


@pytest.mark.parametrize("model", ["tiny", "adapter"])
def test_answers_are_those_of_one_server(pair: Pair, model: str) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", greedy(model=model, prompt=LONG, max_tokens=12)),
        ("/v1/completions", greedy(model=model, prompt=f"b {LONG}", max_tokens=6, logprobs=3, seed=3)),
        (
            "/v1/chat/completions",
            {
                "model": model,
                "messages": [{"role": "user", "content": f"Repeat: {LONG}"}],
                "max_completion_tokens": 8,
                "temperature": 0,
                "logprobs": True,
                "top_logprobs": 2,
                "cache_salt": "salt",
            },
        ),
    ]
    for number, (route, body) in enumerate(bodies):
        expected = pair.prefill.client.post(route, json=body).json()
        before = pair.num_loaded()
        answer = pair.answer(body, route, f"{model}-{number}")
        check_equal(strip(answer), strip(expected))
        details = answer["usage"]["prompt_tokens_details"]
        assert details["cached_tokens_by_tier"]["remote"] == details["cached_tokens"] > 256
        assert answer["usage"]["prompt_tokens"] - details["cached_tokens"] <= 16
        assert pair.num_loaded() == before + details["cached_tokens"]
        assert answer["kv_transfer_params"] is None
    body = greedy(model=model, prompt=f"c {LONG}", max_tokens=12)
    expected = pair.prefill.client.post("/v1/completions", json=body).json()
    prepared = pair.prepared(body) | {"stream": True, "stream_options": {"include_usage": True}}
    with pair.decode.client.stream("POST", "/v1/completions", json=prepared) as reply:
        assert reply.status_code == 200, reply.read()
        assert joined([*events(reply.iter_lines())]) == expected["choices"][0]["text"]


def test_many_requests_at_once(pair: Pair) -> None:
    bodies = [greedy(prompt=f"{number} {LONG[: 200 + 50 * number]}", max_tokens=8) for number in range(16)]
    with ThreadPoolExecutor(16) as threads:
        expected = [*threads.map(lambda body: pair.prefill.complete(**body), bodies)]
        answers = [*threads.map(lambda body: pair.answer(body, id=body["prompt"][:4]), bodies)]
    assert [strip(answer) for answer in answers] == [strip(answer) for answer in expected]
    eventually("all blocks are free", lambda: not pair.prefill.metrics()["kv_cache_usage_perc"])
    metrics = pair.decode.metrics()
    assert not metrics["nixl_num_failed_transfers_total"] and metrics["nixl_xfer_time_seconds_count"] >= 16
    assert metrics["nixl_bytes_transferred_sum"] > 0 and metrics["nixl_num_descriptors_sum"] > 0


def test_tokens_in_and_out(pair: Pair) -> None:
    ids = [5 + number % 50 for number in range(100)]
    body = {"model": "tiny", "token_ids": ids, "sampling_params": {"max_tokens": 5, "temperature": 0}}
    route = "/inference/v1/generate"
    first = body | {"sampling_params": {"max_tokens": 1}, "kv_transfer_params": {"do_remote_decode": True}}
    transfer = pair.prefill.client.post(route, json=first).json()["kv_transfer_params"]
    assert transfer["remote_num_tokens"] == 96
    before = pair.num_loaded()
    answer = pair.decode.client.post(route, json=body | {"kv_transfer_params": transfer}).json()
    expected = pair.prefill.client.post(route, json=body).json()
    assert answer["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
    assert pair.num_loaded() == before + 96


def test_responses_and_messages_move_their_prefix(pair: Pair) -> None:
    message = {"role": "user", "content": f"f {LONG}"}
    bodies: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("/v1/responses", {"input": f"g {LONG}", "temperature": 0}, {"max_output_tokens": 8}),
        ("/v1/messages", {"messages": [message], "temperature": 0}, {"max_tokens": 8}),
    ]
    for route, body, limit in bodies:
        body["model"] = "tiny"
        expected = pair.prefill.client.post(route, json=body | limit).json()
        first = body | dict.fromkeys(limit, 1) | {"kv_transfer_params": {"do_remote_decode": True}}
        transfer = pair.prefill.client.post(route, json=first).json()["kv_transfer_params"]
        before = pair.num_loaded()
        answer = pair.decode.client.post(route, json=body | limit | {"kv_transfer_params": transfer}).json()
        assert pair.num_loaded() == before + transfer["remote_num_tokens"] > before + 256
        name = "output" if route == "/v1/responses" else "content"
        texts = [
            [part.get("text") for part in (result[name][0].get("content") or result[name])]
            for result in (answer, expected)
        ]
        assert texts[0] == texts[1] != [""] and "kv_transfer_params" not in answer


def test_a_refused_request_releases_its_prefix(pair: Pair) -> None:
    def is_used() -> bool:
        return bool(pair.prefill.metrics()["kv_cache_usage_perc"])

    wrong: list[dict[str, Any]] = [{"max_tokens": -1}, {"logprobs": 1000}, {"model": "unknown"}]
    for number, change in enumerate(wrong):
        good = pair.prepared(greedy(prompt=f"h{number} {LONG}", max_tokens=2))
        assert is_used()
        assert pair.decode.client.post("/v1/completions", json=good | change).status_code in (400, 404)
        eventually("the prefix is released", lambda: not is_used())


def test_bad_transfers_are_refused(pair: Pair) -> None:
    good = pair.prepared(greedy(prompt="d" + LONG, max_tokens=2))
    transfer = good["kv_transfer_params"]
    changes: list[Any] = [{"remote_port": 22}, {"remote_host": "169.254.169.254"}, {"remote_port": "x"}]
    for wrong in [*(transfer | change for change in changes), {"do_remote_decode": True}]:
        reply = pair.decode.client.post("/v1/completions", json=good | {"kv_transfer_params": wrong})
        assert reply.status_code == 400 and "kv_transfer_params" in reply.text, reply.text
    reply = pair.decode.client.post("/v1/completions", json=good | {"kv_transfer_params": "text"})
    assert reply.status_code == 400
    assert pair.decode.client.post("/v1/completions", json=good).status_code == 200


def test_a_dead_prefill_server_costs_only_time(tiny: TextModel, preloaded: Preloaded, tmp_path: Path) -> None:
    with started_pair(tiny, preloaded, tmp_path) as pair:
        bodies = [greedy(prompt=f"e{number} {LONG}", max_tokens=8) for number in range(3)]
        expected = [pair.prefill.complete(**body) for body in bodies]
        prepared = [pair.prepared(body) for body in bodies]
        os.kill(pair.prefill.core, 9)
        pair.prefill.process.kill()
        failed = pair.decode.metrics()["nixl_num_failed_transfers_total"]
        with ThreadPoolExecutor(3) as threads:
            replies = [
                *threads.map(
                    lambda body: httpx.post(
                        f"{pair.decode.url}/v1/completions", json=body, timeout=PATIENCE_S
                    ),
                    prepared,
                )
            ]
        assert [strip(reply.json()) for reply in replies] == [strip(answer) for answer in expected]
        assert pair.decode.metrics()["nixl_num_failed_transfers_total"] == failed + 3
        assert "and is computed here: it cannot be reached" in pair.decode.text()
        pair.decode.end_cleanly()
