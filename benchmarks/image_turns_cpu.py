"""Measure the CPU time of an API process in chat turns about a known image.

    python benchmarks/image_turns_cpu.py [SIDE ...]

A tiny Qwen2.5-VL with the published processor runs against a core without a model in a process of its own,
so the figure covers the way from the socket to the core and back. A SIDE of 0 is a turn of text; a negative
one is a PNG of noise, with a request body of megabytes. TURNS_PROFILE=FILE writes a profile of the last side.
"""

import asyncio
import base64
import cProfile
import http.client
import io
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import test_helpers  # noqa: F401, I001
import uvloop
from fast_core import FastCore
from image_turns import image
from PIL import Image
from tiny_qwen import made

from quire.configure import configure
from quire.entrypoints.api_process import make_engine
from quire.metrics.engine import MetricsLayout, MetricsPages
from quire.sched.mm_receiver_cache import ReceiverCache
from quire.server.main import serve
from quire.server.settings import make_settings
from quire.system.process import tune_allocator, tune_garbage_collector

ROUNDS, TURNS = 15, 20
MAX_LEN = 4096
TEMPLATE = """{% for message in messages %}<s>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == "text" %}{{ part.text }}{% else %}<begin><image><end>{% endif %}{% endfor %}{% endif %}
{% endfor %}<s>assistant
"""
PROCESSOR = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 3136}


def noise(side: int) -> dict[str, Any]:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(side).integers(0, 256, (side, side, 3), np.uint8)).save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def run_core(address: str) -> None:
    core = FastCore(address, token_id=50, max_model_len=MAX_LEN)
    core.receiver_cache = ReceiverCache(4 << 30, core.borrower.take)
    while True:
        core.listen()
        core.step()
        core.beat()


def run_client(port: int, side: int, pipe: Any) -> None:
    """Send the length of a request body, then send as many second turns as each message on the pipe
    requests."""
    parts: list[Any] = [{"type": "text", "text": "What is it?"}]
    if side:
        parts = [image(side, 1) if side > 0 else noise(-side), *parts]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "A picture of noise."},
        {"role": "user", "content": "And now shorter, please."},
    ]
    body = {"messages": messages, "max_tokens": 1, "stream": True, "temperature": 0, "ignore_eos": True}
    data = json.dumps(body).encode()
    pipe.send(len(data))
    while (turns := pipe.recv()) is not None:
        client = http.client.HTTPConnection("127.0.0.1", port)
        for _ in range(turns):
            client.request("POST", "/v1/chat/completions", data, {"Content-Type": "application/json"})
            reply = client.getresponse().read()
            assert b"[DONE]" in reply and b"error" not in reply, reply
        client.close()
        pipe.send(None)


async def measure(port: int, side: int, profile: cProfile.Profile | None) -> None:
    context, loop = multiprocessing.get_context("spawn"), asyncio.get_running_loop()
    ours, theirs = context.Pipe()
    client = context.Process(target=run_client, args=(port, side, theirs), daemon=True)
    client.start()
    num_bytes = await loop.run_in_executor(None, ours.recv)

    async def turns(count: int) -> float:
        began = time.process_time()
        ours.send(count)
        await loop.run_in_executor(None, ours.recv)
        return 1e3 * (time.process_time() - began) / count

    await turns(5)
    found = [await turns(TURNS) for _ in range(ROUNDS)]
    if profile is not None:
        profile.enable()
        await turns(100)
        profile.disable()
    ours.send(None)
    await loop.run_in_executor(None, client.join)
    print(f"{side:6} pixels a side, {num_bytes:8} bytes: {min(found):.2f} ms of CPU a turn", flush=True)


async def main(folder: Path, sides: list[int]) -> None:
    path, _ = made("Qwen2_5_VL", folder)
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | {"max_pixels": 12845056}))
    (folder / "template").write_text(TEMPLATE)
    config = configure(
        {"model": str(path), "max_model_len": MAX_LEN, "chat_template": str(folder / "template")}
    )
    address = f"ipc://{folder}/core"
    core = multiprocessing.get_context("spawn").Process(target=run_core, args=(address,), daemon=True)
    core.start()
    pages = MetricsPages(MetricsLayout.of(config), num_engines=1)
    engine = make_engine(config, addresses={0: address}, token="", metrics=pages, health_timeout_s=30)
    engine.start()
    await engine.ready()
    tune_garbage_collector()
    stop, file = asyncio.Event(), os.environ.get("TURNS_PROFILE")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = make_settings({"disable_uvicorn_access_log": True})
        serving = asyncio.create_task(serve(settings, engine, [listener], stop=stop, announce=False))
        for side in sides:
            profile = cProfile.Profile() if file and side == sides[-1] else None
            await measure(listener.getsockname()[1], side, profile)
            if profile is not None:
                profile.dump_stats(str(file))
        stop.set()
        await serving
    engine.close()
    core.kill()


if __name__ == "__main__":
    tune_allocator()
    with tempfile.TemporaryDirectory() as name:
        uvloop.run(main(Path(name), [*map(int, sys.argv[1:])] or [0, 336, 1024, 1536, -1536]))
