"""Tests of many clients at once: each gets the answer it would get alone, and a disconnect leaves nothing
behind."""

import asyncio
import json
import socket
import threading
from typing import Any

import httpx
import psutil
from serve_process import PATIENCE_S, ServeProcess, eventually, greedy, joined

PROMPTS = [f"{word} {number}" for number in range(16) for word in ("One", "The dog", "A quire", "Seven")]


def unlimited_client(server: ServeProcess) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, limits=limits)


async def streamed(client: httpx.AsyncClient, **body: Any) -> list[dict[str, Any] | str]:
    results: list[dict[str, Any] | str] = []
    async with client.stream("POST", "/v1/completions", json=greedy(**body, stream=True)) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                results.append(data if data == "[DONE]" else json.loads(data))
    return results


def test_64_streams_equal_their_solo_outputs(server: ServeProcess) -> None:
    """Catches tokens that reach the wrong client, and rows that affect each other in a batch."""
    alone = [server.complete(prompt=prompt, max_tokens=20)["choices"][0]["text"] for prompt in PROMPTS]

    async def together() -> list[list[dict[str, Any] | str]]:
        async with unlimited_client(server) as client:
            return await asyncio.gather(*(streamed(client, prompt=item, max_tokens=20) for item in PROMPTS))

    result = asyncio.run(together())
    assert len(set(alone)) > 32, "prompts with equal outputs prove nothing"
    assert [joined(item) for item in result] == alone
    assert {item[-1] for item in result} == {"[DONE]"}


def test_500_connections_all_finish(server: ServeProcess) -> None:
    """Catches a queue, a backlog or a table of sockets that is too short."""

    async def all_of_them() -> list[httpx.Response]:
        async with unlimited_client(server) as client:
            bodies = [greedy(prompt=[5 + number % 300, 6, 7], max_tokens=3) for number in range(500)]
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

    replies = asyncio.run(all_of_them())
    assert [reply.status_code for reply in replies] == [200] * 500
    assert {reply.json()["usage"]["completion_tokens"] for reply in replies} == {3}


def test_100_disconnected_clients_leave_nothing_behind(server: ServeProcess) -> None:
    """Catches requests that keep computing and blocks that stay allocated after a disconnect."""
    before = server.metrics()
    (api,) = server.with_role("APIServer")
    num_files = psutil.Process(api).num_fds()
    started = threading.Barrier(101, timeout=PATIENCE_S)

    def disconnect() -> None:
        with server.streaming(max_tokens=8000) as stream:
            next(stream)
            started.wait()

    clients = [threading.Thread(target=disconnect) for _ in range(100)]
    for client in clients:
        client.start()
    eventually("100 requests run", lambda: server.metrics()["num_requests_running"] == 100)
    assert server.metrics()["kv_cache_usage_perc"] > 0
    started.wait()
    for client in clients:
        client.join(PATIENCE_S)
    eventually("no request runs", lambda: server.metrics()["num_requests_running"] == 0)
    after = server.metrics()
    assert (after["num_requests_waiting"], after["kv_cache_usage_perc"]) == (0, 0)
    gone = "request_success_total:abort"
    eventually("all aborts are counted", lambda: server.metrics()[gone] - before[gone] == 100)
    assert server.client.get("/load").json() == {"server_load": 0}
    eventually("no file stays open", lambda: psutil.Process(api).num_fds() <= num_files)


def test_disconnect_aborts_a_request_without_stream(server: ServeProcess) -> None:
    """Catches an abort that works for streams only."""
    before = server.metrics()
    body = json.dumps(greedy(max_tokens=8000)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        eventually("the request runs", lambda: server.metrics()["num_requests_running"] == 1)
    gone = "request_success_total:abort"
    eventually("the abort is counted", lambda: server.metrics()[gone] - before[gone] == 1)
    eventually("no request runs", lambda: server.metrics()["num_requests_running"] == 0)
    assert server.metrics()["kv_cache_usage_perc"] == 0
