"""A small OpenAI-like server in pure asyncio. The prompt selects the answer:

`fail` 500, `refuse` 400, `denied` 401, `drop` closes the connection in mid-stream, `garbage` sends an event
that is not JSON, `error` an error event, `early` ends without a finish reason, `slow` waits 50 ms before each
token. Any other prompt gets `max_tokens` tokens."""

import asyncio
import json
import sys
import threading
from types import TracebackType
from typing import Any

MODEL = "fake-model"
_REFUSED = {"fail": 500, "refuse": 400, "denied": 401}


class FakeServer:
    """Runs in a thread: `with FakeServer() as server: ... server.url`."""

    def __init__(self, *, usage: bool = True, delay_s: float = 0.0) -> None:
        self.usage = usage
        self.delay_s = delay_s
        """Delay before each complete (not streamed) answer."""
        self.num_answers = 0
        self.most_answers = 10**9
        """Number of complete answers that are sent; further requests wait until this is raised."""
        self.requests: list[dict[str, Any]] = []
        """Body of every POST, with its headers under `_headers` and path under `_path`."""
        self.num_connections = 0
        self.peak = self.busy = 0
        """Largest number of concurrent POSTs, and the current one."""
        self.held_until = 0
        """Number of concurrent POSTs at which streams begin."""
        self.close_after = 10**9
        """Number of answers after which the server silently closes an idle connection."""
        self.metrics = ""
        self.version = "0.1"
        self.num_failures = 0
        """Number of answers still to be refused with 503."""

    def __enter__(self) -> "FakeServer":
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(started)), daemon=True)
        self._thread.start()
        started.wait()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _main(self, started: threading.Event, port: int = 0) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", port, backlog=512)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        await self._stop.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        answered = 0
        try:
            while answered < self.close_after and await self._one(reader, writer):
                answered += 1
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        (method, path, _), *lines = (line.split(" ", 2) for line in head.splitlines() if line)
        headers = {line[0].rstrip(":").lower(): " ".join(line[1:]) for line in lines}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if method == "GET":
            self._get(path, writer)
            return True
        request = json.loads(body)
        self.requests.append({**request, "_headers": headers, "_path": path})
        self.busy += 1
        self.peak = max(self.peak, self.busy)
        try:
            return await self._post(path, request, writer)
        finally:
            self.busy -= 1

    def _get(self, path: str, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            whole(writer, 200, {"object": "list", "data": [{"id": MODEL, "root": None}]})
        elif path == "/version":
            whole(writer, 200, {"version": self.version})
        elif path == "/metrics":
            body = self.metrics.encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        else:
            whole(writer, 404, {"detail": "Not Found"})

    async def _post(self, path: str, request: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        chat = path.endswith("/chat/completions")
        prompt = str(request["messages"][-1]["content"] if chat else request["prompt"])
        if self.num_failures:
            self.num_failures -= 1
            whole(writer, 503, {"error": {"message": "not yet"}})
        elif status := next((code for word, code in _REFUSED.items() if word in prompt), 0):
            whole(writer, status, {"error": {"message": f"asked to {prompt}", "code": status}})
        elif request.get("stream"):
            return await self._stream(prompt, request, chat, writer)
        else:
            await asyncio.sleep(self.delay_s)
            while self.num_answers >= self.most_answers:
                await asyncio.sleep(0.01)
            self.num_answers += 1
            text = f"echo {prompt}"
            choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            whole(writer, 200, {"id": "x", "choices": [{"index": 0, "finish_reason": "stop", **choice}]})
        return True

    async def _stream(
        self, prompt: str, request: dict[str, Any], chat: bool, writer: asyncio.StreamWriter
    ) -> bool:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        while self.peak < self.held_until:
            await asyncio.sleep(0.01)
        count = request.get("max_tokens") or request.get("max_completion_tokens") or 4
        if chat:
            event(writer, choices(chat, "", None))
        for number in range(count):
            if "slow" in prompt:
                await asyncio.sleep(0.05)
                await writer.drain()
            if number == 2 and "drop" in prompt:
                await writer.drain()
                return False
            if number == 2 and "garbage" in prompt:
                event(writer, "{no json")
            if number == 2 and "error" in prompt:
                event(writer, json.dumps({"error": {"message": "the engine died"}}))
                break
            last = number == count - 1 and "early" not in prompt
            event(writer, choices(chat, f"t{number} ", "length" if last else None))
            await asyncio.sleep(0)
        if self.usage and request.get("stream_options", {}).get("include_usage"):
            usage = {"prompt_tokens": 7, "completion_tokens": count}
            event(writer, json.dumps({"choices": [], "usage": usage}))
        if "early" not in prompt:
            event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def choices(chat: bool, text: str, reason: str | None) -> str:
    content = {"delta": {"content": text}} if chat else {"text": text}
    return json.dumps({"id": "x", "choices": [{"index": 0, **content, "finish_reason": reason}]})


def event(writer: asyncio.StreamWriter, data: str) -> None:
    body = f"data: {data}\n\n".encode()
    writer.write(b"%x\r\n%s\r\n" % (len(body), body))


def whole(writer: asyncio.StreamWriter, status: int, content: object) -> None:
    body = json.dumps(content).encode()
    writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body)


if __name__ == "__main__":
    asyncio.run(FakeServer()._main(threading.Event(), int(sys.argv[1])))
