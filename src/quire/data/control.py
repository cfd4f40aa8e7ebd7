"""Choices of operator calls, under the names of vLLM."""

from collections.abc import Sequence
from typing import Any

from quire.errors import RequestError

MODES = ("abort", "wait", "keep")
"""Handling of running requests on a pause: abort them, wait for them, or keep and resume them later."""
LEVELS = (0, 1, 2)
"""Sleep levels. 0: nothing runs; 1: weights move to host memory, the KV cache is dropped; 2: both are
dropped."""
MEMORY = ("weights", "kv_cache")
"""Memory that a worker releases and allocates again."""
TAGS = (*MEMORY, "scheduling")
"""Tags of `wake_up`."""


def check_choice(name: str, value: Any, known: Sequence[Any]) -> None:
    if value not in known:
        choices = ", ".join(map(str, known))
        raise RequestError(f"unknown {name} {value!r:.80}; known: {choices}", param=name)
