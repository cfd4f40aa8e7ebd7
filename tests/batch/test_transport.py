"""Tests of both transports to an engine."""

import asyncio
import json
from typing import Any

from fake_openai import FakeServer

from quire.batch.transport import AsgiTransport, BatchAnswer, HttpTransport
from quire.remote.http import HttpClient


def test_over_http() -> None:
    with FakeServer() as server:
        client = HttpClient(server.url)

        async def main() -> BatchAnswer:
            answer = await HttpTransport(client).send("/v1/completions", b'{"prompt": "hi"}', "r1")
            client.close()
            return answer

        answer = asyncio.run(main())
        assert server.requests[0]["_headers"]["x-request-id"] == "r1"
    assert answer.status == 200 and json.loads(answer.body)["choices"][0]["text"] == "echo hi"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Return the request; wait for a disconnect meanwhile, as servers do."""
    message = await receive()
    hang_up = asyncio.create_task(receive())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not hang_up.done(), "the client seemed to disconnect"
    hang_up.cancel()
    headers = {name.decode(): value.decode() for name, value in scope["headers"]}
    echo = {
        "path": scope["path"],
        "method": scope["method"],
        "headers": headers,
        "body": message["body"].decode(),
    }
    content = json.dumps(echo).encode()
    await send({"type": "http.response.start", "status": 202, "headers": []})
    await send({"type": "http.response.body", "body": content[:10], "more_body": True})
    await send({"type": "http.response.body", "body": content[10:]})


def test_into_an_asgi_application() -> None:
    answer = asyncio.run(AsgiTransport(app).send("/v1/completions", b'{"prompt": 1}', "r1"))
    result = json.loads(answer.body)
    assert (answer.status, result["path"], result["method"]) == (202, "/v1/completions", "POST")
    assert result["body"] == '{"prompt": 1}'
    assert result["headers"]["x-request-id"] == "r1"
    assert (
        result["headers"]["content-type"] == "application/json"
        and result["headers"]["content-length"] == "13"
    )


def test_into_fastapi() -> None:
    """A real framework accepts the scope."""
    from fastapi import FastAPI

    api = FastAPI()

    @api.post("/v1/completions")
    async def answer(body: dict[str, Any]) -> dict[str, Any]:
        return {"echo": body["prompt"]}

    result = asyncio.run(AsgiTransport(api).send("/v1/completions", b'{"prompt": "x"}', "r1"))
    assert (result.status, json.loads(result.body)) == (200, {"echo": "x"})
