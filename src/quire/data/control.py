"""What operators can ask of an engine, by the names that vLLM's users know."""

from collections.abc import Sequence
from typing import Any

from quire.errors import RequestError

MODES = ("abort", "wait", "keep")
"""What becomes of the requests inside: they end, they are waited for, or they stay and go on later."""
LEVELS = (0, 1, 2)
"""Of sleep: 0, nothing runs; 1, weights go to host memory, the cache is dropped; 2, both are dropped."""
MEMORY = ("weights", "kv_cache")
"""What a worker gives back and takes again."""
TAGS = (*MEMORY, "scheduling")
"""What can be woken up."""


def check_choice(name: str, value: Any, known: Sequence[Any]) -> None:
    if value not in known:
        choices = ", ".join(map(str, known))
        raise RequestError(f"unknown {name} {value!r:.80}; known: {choices}", param=name)
