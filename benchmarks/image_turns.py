"""Time the first token of a chat turn with a new image, and of the next turn, over HTTP.

python benchmarks/image_turns.py URL MODEL SIDE [SIDE ...]
"""

import base64
import io
import json
import sys
import time
import urllib.request
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

ROUNDS = 6


def image(side: int, seed: int) -> dict[str, Any]:
    """Return a chat message part with an image of blurred noise, unique per seed, of `side` pixels a side;
    its file is as large as a photograph's."""
    small = np.random.default_rng(seed).integers(0, 255, (side // 16, side // 16, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((side, side)).save(file, "JPEG", quality=90)
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}}


def ask(url: str, model: str, messages: list[Any]) -> tuple[float, str]:
    """Send a chat request; return the seconds until the first text of the answer, and its whole text."""
    body = {"model": model, "messages": messages, "max_tokens": 16, "stream": True, "temperature": 0}
    data = json.dumps(body | {"ignore_eos": True}).encode()
    started, first, text = time.perf_counter(), 0.0, ""
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as stream:
        for line in stream:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
                    first = first or (time.perf_counter() - started if text else 0.0)
    return first, text


def main(url: str, model: str, *sides: str) -> None:
    for side in map(int, sides):
        firsts, seconds = [], []
        for seed in range(ROUNDS):
            question = {"type": "text", "text": "What is it?"}
            messages: list[Any] = [{"role": "user", "content": [image(side, seed + side), question]}]
            first, text = ask(url, model, messages)
            messages += [{"role": "assistant", "content": text}]
            messages += [{"role": "user", "content": "And now shorter, please."}]
            second, _ = ask(url, model, messages)
            firsts.append(1e3 * first)
            seconds.append(1e3 * second)
        one, two = median(firsts[1:]), median(seconds[1:])
        print(f"{side} pixels a side: first turn {one:.1f} ms, second {two:.1f}, {one / two:.1f} x")


if __name__ == "__main__":
    main(*sys.argv[1:])
