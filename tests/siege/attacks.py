"""Expensive requests of a hostile client with one valid key, over every route.

Each attack is a coroutine that sends one round of requests and returns the statuses of the answers. The
siege runs several copies of it in a loop for some seconds. This file runs as a separate process, so that the
work of making the attacks is not measured as a delay of the server:

    python attacks.py HOST PORT KEY SECONDS_PER_ATTACK ROUNDS [NAME ...]

It prints one JSON line for each attack: its name, when it began and ended, and the number of each status."""

import asyncio
import contextlib
import io
import json
import random
import string
import sys
import time
import zlib
from base64 import b64encode
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

Status = int | str
COPIES = 4
"""Number of concurrent copies of one attack."""
PATIENCE_S = 20.0
"""Time limit for an answer."""


class Target:
    """The server under attack."""

    def __init__(self, host: str, port: int, key: str) -> None:
        self.host, self.port, self.key = host, port, key

    def head(self, method: str, path: str, length: int, *lines: str) -> bytes:
        first = [f"{method} {path} HTTP/1.1", f"Host: {self.host}", f"Authorization: Bearer {self.key}"]
        body = ["Content-Type: application/json", f"Content-Length: {length}"] if length else []
        return "\r\n".join([*first, *body, *lines, "", ""]).encode()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.wait_for(asyncio.open_connection(self.host, self.port), PATIENCE_S)

    async def send(self, data: bytes, read_s: float = PATIENCE_S) -> Status:
        """Send raw bytes on a new connection and read the answer for at most `read_s` seconds."""
        try:
            reader, writer = await self.connect()
        except (OSError, TimeoutError):
            return "not connected"
        status: Status = "no answer"
        try:
            async with asyncio.timeout(read_s):
                writer.write(data)
                sending = asyncio.ensure_future(writer.drain())
                sending.add_done_callback(lambda task: task.cancelled() or task.exception())
                line = await reader.readline()
                status = int(line.split()[1]) if line.startswith(b"HTTP/") else "closed"
                while await reader.read(1 << 16):
                    pass
                await sending
        except TimeoutError:
            pass
        except (OSError, ValueError):
            status = "reset" if status == "no answer" else status
        finally:
            writer.close()
        return status

    async def post(self, path: str, body: Any, *lines: str, read_s: float = PATIENCE_S) -> Status:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.send(self.head("POST", path, len(data), "Connection: close", *lines) + data, read_s)


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "Once upon a time", "temperature": 1.0, "ignore_eos": True, "max_tokens": 64} | fields


def text_of(num_chars: int) -> str:
    words = ("".join(random.choices(string.ascii_lowercase, k=random.randint(2, 9))) for _ in iter(int, 1))
    parts: list[str] = []
    length = 0
    while length < num_chars:
        parts.append(next(words))
        length += len(parts[-1]) + 1
    return " ".join(parts)[:num_chars]


# ---- generation


async def many_answers(target: Target) -> list[Status]:
    return [await target.post("/v1/completions", completion(n=128, max_tokens=512, stream=True), read_s=6)]


async def many_prompts(target: Target) -> list[Status]:
    prompts = [f"Prompt number {number}" for number in range(1000)]
    return [await target.post("/v1/completions", completion(prompt=prompts, max_tokens=1), read_s=6)]


async def long_prompts(target: Target) -> list[Status]:
    body = completion(prompt=[text_of(2500) for _ in range(8)], max_tokens=2, prompt_logprobs=20, logprobs=20)
    return [await target.post("/v1/completions", body, read_s=8)]


async def many_logprobs(target: Target) -> list[Status]:
    return [await target.post("/v1/completions", completion(logprobs=20, n=8, echo=True), read_s=8)]


async def beams(target: Target) -> list[Status]:
    body = completion(use_beam_search=True, n=10, max_tokens=32, temperature=0)
    return [await target.post("/v1/completions", body, read_s=8)]


async def aborts(target: Target) -> list[Status]:
    body = completion(max_tokens=1000, stream=True, prompt=text_of(400))
    tasks = [target.post("/v1/completions", body, read_s=random.random() * 0.2) for _ in range(16)]
    return list(await asyncio.gather(*tasks))


async def large_parameters(target: Target) -> list[Status]:
    ids = list(range(40_000))
    bodies: list[dict[str, Any]] = [
        {"stop_token_ids": ids, "n": 16},
        {"logit_bias": {str(token_id): 1.0 for token_id in ids}},
        {"bad_words": [f"word{number}" for number in range(5000)]},
        {"allowed_token_ids": ids},
        {"stop": ["x" * 100_000] * 4},
        {"cache_salt": "s" * 1_000_000},
        {"request_id": "r\n" * 10_000},
        {"truncate_prompt_tokens": -1, "prompt": text_of(200_000)},
        {"repetition_detection": {"max_pattern_size": 10**6, "min_pattern_size": 1, "min_count": 2}},
        {"repetition_detection": {"max_pattern_size": 256, "min_pattern_size": 1, "min_count": 1000}},
        {"priority": -(2**31)},
    ]
    return [await target.post("/v1/completions", completion(**body), read_s=3) for body in bodies]


async def grammars(target: Target) -> list[Status]:
    def nested(depth: int) -> dict[str, Any]:
        inner = {"type": "string"} if depth == 0 else nested(depth - 1)
        return {"type": "object", "properties": {f"p{n}": inner for n in range(3)}, "required": ["p0"]}

    words = [text_of(12) for _ in range(3000)]
    prompts = ["x"] * 256
    hostile: list[dict[str, Any]] = [
        {"regex": "|".join(words)},
        {"regex": "(a|a?)+" * 20 + "b"},
        {"regex": "(x{1,1000}){1,1000}"},
        {"choice": [f"common beginning {word}" for word in words]},
        {"json": nested(7)},
        {"json": {"type": "array", "items": {"$ref": "#"}, "maxItems": 100_000}},
        {"grammar": "start: " + "(" * 500 + '"a"' + ")" * 500},
    ]
    bodies = [completion(structured_outputs=fields, prompt=prompts, max_tokens=2) for fields in hostile]
    return [await target.post("/v1/completions", body, read_s=4) for body in bodies]


async def conversations(target: Target) -> list[Status]:
    messages = [{"role": ("user", "assistant")[number % 2], "content": "hi"} for number in range(4001)]
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": {"type": "object"}}}
        for n in range(500)
    ]
    question = [{"role": "user", "content": "hi"}]
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
    references = [{"type": "item_reference", "id": "rs_1"}] * 20_000
    return [
        await target.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}, read_s=5),
        await target.post(
            "/v1/chat/completions", {"messages": question, "tools": tools, "tool_choice": "none"}, read_s=5
        ),
        await target.post("/v1/chat/completions", {"messages": question, "chat_template": endless}, read_s=5),
        await target.post("/v1/responses", {"input": references}, read_s=5),
        await target.post("/v1/responses", {"input": text_of(500_000)}, read_s=5),
        await target.post("/v1/messages", {"messages": messages, "max_tokens": 1}, read_s=5),
    ]


# ---- other routes


async def tokenizing(target: Target) -> list[Status]:
    text = text_of(4 << 20)
    return [
        await target.post("/tokenize", {"prompt": text, "return_token_strs": True}),
        await target.post("/detokenize", {"tokens": [5] * 1_000_000}),
        await target.post("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": text}]}),
    ]


async def operators_routes(target: Target) -> list[Status]:
    paths = [
        *("/reset_prefix_cache?reset_running_requests=true", "/reset_mm_cache", "/reset_encoder_cache"),
        *("/sleep?level=2", "/pause", "/collective_rpc", "/abort_requests", "/start_profile"),
    ]
    return [await target.post(path, b"") for path in paths]


async def adapters(target: Target) -> list[Status]:
    path = {"lora_name": "mine", "lora_path": "/etc"}
    return [
        await target.post("/v1/load_lora_adapter", path),
        await target.post("/v1/unload_lora_adapter", {"lora_name": "mine"}),
        *[await target.post("/v1/completions", completion(model=f"none-{number}")) for number in range(20)],
    ]


def _png(width: int, height: int) -> bytes:
    """Return a 16-bit grey image that is small as a file and large when decoded."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    packer, packed = zlib.compressobj(9), io.BytesIO()
    row = b"\0" * (1 + 2 * width)
    for _ in range(height):
        packed.write(packer.compress(row))
    packed.write(packer.flush())
    header = chunk(b"IHDR", size + b"\x10\0\0\0\0")
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", packed.getvalue()) + chunk(b"IEND", b"")


_BOMBS: list[bytes] = []


async def media(target: Target) -> list[Status]:
    if not _BOMBS:
        _BOMBS.extend([_png(6000, 6000), _png(13_000, 13_000)])
    urls = [f"data:image/png;base64,{b64encode(bomb).decode()}" for bomb in _BOMBS]
    urls += ["http://169.254.169.254/latest", "http://localhost:1/", "file:///etc/passwd", "http://[::1]/"]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    bodies = [{"messages": [{"role": "user", "content": [part] * 4}], "max_tokens": 1} for part in parts]
    return [await target.post("/v1/chat/completions", body) for body in bodies]


async def other_models_routes(target: Target) -> list[Status]:
    texts = [text_of(1000) for _ in range(500)]
    return [
        await target.post("/v1/embeddings", {"input": texts}),
        await target.post("/score", {"text_1": texts[:1], "text_2": texts}),
        await target.post("/v1/rerank", {"query": "q", "documents": texts}),
        await target.post("/v1/audio/transcriptions", b"x" * (20 << 20)),
    ]


# ---- HTTP itself


async def large_bodies(target: Target) -> list[Status]:
    deep = b'{"prompt": ' + b"[" * 2_000_000
    wide = json.dumps(completion(prompt=[[1]] * 2_000_000)).encode()
    return [
        await target.post("/v1/completions", deep),
        await target.post("/v1/completions", wide),
        await target.post("/v1/completions", b'{"prompt": "' + b"x" * (48 << 20)),
    ]


async def large_heads(target: Target) -> list[Status]:
    many = b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 500_000 + b"\r\n"
    long = b"GET /health HTTP/1.1\r\nHost: x\r\na: " + b"b" * (16 << 20) + b"\r\n\r\n"
    return [await target.send(many), await target.send(long)]


async def slow_clients(target: Target) -> list[Status]:
    """Send heads and bodies that never end, and never read answers."""

    async def one(data: bytes) -> Status:
        try:
            _, writer = await target.connect()
        except (OSError, TimeoutError):
            return "not connected"
        with contextlib.suppress(OSError):
            for byte in data[:40]:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.1)
            writer.write(data[40:])
            await asyncio.sleep(2)
        writer.close()
        return "held"

    body = json.dumps(completion(stream=True, max_tokens=2000)).encode()
    whole = target.head("POST", "/v1/completions", len(body)) + body
    unfinished = [target.head("POST", "/v1/completions", 1000) + b"{", b"GET / HTTP/1.1\r\nHost: x\r\na"]
    tasks = [one(data) for data in [*unfinished * 40, *[whole] * 20]]
    return list(await asyncio.gather(*tasks))


async def many_connections(target: Target) -> list[Status]:
    opened: list[asyncio.StreamWriter] = []
    statuses: list[Status] = []
    for _ in range(500):
        try:
            _, writer = await target.connect()
            opened.append(writer)
            statuses.append("held")
        except (OSError, TimeoutError):
            statuses.append("not connected")
    await asyncio.sleep(2)
    for writer in opened:
        writer.close()
    return statuses


async def pipelining(target: Target) -> list[Status]:
    body = json.dumps(completion(max_tokens=1000)).encode()
    one = target.head("POST", "/v1/completions", len(body)) + body
    return [
        await target.send(one * 8 + target.head("GET", "/health", 0), read_s=1),
        await target.send(target.head("GET", "/v1/models", 0) * 5000, read_s=3),
    ]


async def garbage(target: Target) -> list[Status]:
    body = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    upgrade = target.head("POST", "/v1/completions", len(body), "Connection: Upgrade", "Upgrade: x")
    messages = [random.randbytes(2000), b"\r\n" * 5000, upgrade + body, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
    return [await target.send(message, read_s=1) for message in messages]


Attack = Callable[[Target], Awaitable[list[Status]]]
ATTACKS: dict[str, Attack] = {
    attack.__name__.replace("_", " "): attack
    for attack in (
        *(many_answers, many_prompts, long_prompts, many_logprobs, beams, aborts, large_parameters),
        *(grammars, conversations, tokenizing, operators_routes, adapters, media, other_models_routes),
        *(large_bodies, large_heads, slow_clients, many_connections, pipelining, garbage),
    )
}


async def run(target: Target, attack: Attack, seconds: float) -> Counter[Status]:
    """Run several copies of one attack, each in a loop, for some seconds."""
    until, statuses = time.monotonic() + seconds, Counter[Status]()

    async def repeat() -> None:
        while time.monotonic() < until:
            statuses.update(await attack(target))

    await asyncio.gather(*(repeat() for _ in range(COPIES)))
    return statuses


async def main(host: str, port: str, key: str, seconds: str, rounds: str, *names: str) -> None:
    target = Target(host, int(port), key)
    for _ in range(int(rounds)):
        for name in names or ATTACKS:
            began = time.monotonic()
            statuses = await run(target, ATTACKS[name], float(seconds))
            ended = time.monotonic()
            counts = {str(status): count for status, count in statuses.most_common()}
            print(json.dumps({"name": name, "began": began, "ended": ended, "statuses": counts}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
