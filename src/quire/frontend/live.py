"""LiveView: the last moments of the engine, for people who watch it."""

import base64
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from quire.errors import EngineError

WINDOW = 1000
"""Observations that the percentiles are taken over."""


class LiveView:
    """The last moments: rates, percentiles, and a picture of the blocks."""

    def __init__(self) -> None:
        self._first: deque[float] = deque(maxlen=WINDOW)
        self._between: deque[float] = deque(maxlen=WINDOW)
        self._counts: deque[tuple[float, float, float]] = deque(maxlen=12)
        self._map = b""
        self._fetching = False

    def add(self, first_token_s: list[float], between_tokens_s: list[float]) -> None:
        self._first.extend(first_token_s)
        self._between.extend(between_tokens_s)

    async def fetch_map(self, call: Callable[[str], Awaitable[bytes]]) -> None:
        if self._fetching:
            return
        self._fetching = True
        try:
            self._map = await call("block_map")
        except (EngineError, TimeoutError):
            self._map = b""
        finally:
            self._fetching = False

    def view(self, num_prompt: float, num_generated: float) -> dict[str, Any]:
        self._counts.append((time.monotonic(), num_prompt, num_generated))
        since, prompt, generated = self._counts[0]
        elapsed = max(self._counts[-1][0] - since, 1e-3)
        return {
            "prompt_tok_s": (num_prompt - prompt) / elapsed,
            "generation_tok_s": (num_generated - generated) / elapsed,
            "ttft_ms": _percentiles(self._first),
            "itl_ms": _percentiles(self._between),
            "blocks": base64.b64encode(self._map).decode(),
        }


def _percentiles(seconds: deque[float]) -> dict[str, float]:
    if not seconds:
        return {}
    found = np.percentile(np.array(seconds) * 1e3, (50, 90, 99)).tolist()
    return dict(zip(("p50", "p90", "p99"), found, strict=True))
