"""A client that disconnects when a test sets an event."""

import asyncio
import json
from typing import Any

from quire.server.app import Application


async def post(
    application: Application, path: str, body: dict[str, Any], disconnect: asyncio.Event, key: str = ""
) -> int:
    """Return the status; the client disconnects once `disconnect` is set."""
    content, sent = json.dumps(body).encode(), list[dict[str, Any]]()
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await disconnect.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "http_version": "1.1",
        "scheme": "http",
        "server": ("test", 80),
        "client": ("test", 1),
        "root_path": "",
        "headers": headers + [(b"authorization", f"Bearer {key}".encode())] * bool(key),
    }
    await application.asgi(scope, receive, send)
    status: int = sent[0]["status"]
    return status
