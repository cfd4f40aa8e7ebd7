"""Choices of operator calls, under the names of vLLM."""

from collections.abc import Sequence
from typing import Any

from quire.errors import RequestError

MODES = ("abort", "wait", "keep")
"""Handling of running requests on a pause: abort them, wait for them, or keep and resume them later."""
LEVELS = (0, 1, 2)
"""Sleep levels. 0: no step runs; 1: weights move to host memory, the KV cache is dropped; 2: weights and KV
cache are dropped."""
MEMORY = ("weights", "kv_cache")
"""Kinds of memory that a worker releases when it sleeps, and allocates again when it wakes up."""
TAGS = (*MEMORY, "scheduling")
"""Tags of `wake_up`."""


DEFAULT_VERSION = "default"
"""Version of the weights that an engine starts with."""
MAX_VERSION_CHARS = 200


def check_version(version: Any) -> None:
    """Raise a RequestError if a weight version cannot be the value of a header."""
    is_text = isinstance(version, str) and 0 < len(version) <= MAX_VERSION_CHARS
    if not is_text or not version.isascii() or not version.isprintable() or version != version.strip():
        raise RequestError(
            f"a weight version has 1 to {MAX_VERSION_CHARS} printable ASCII characters, got {version!r:.80}",
            param="weight_version",
        )


def check_choice(name: str, value: Any, known: Sequence[Any]) -> None:
    if value not in known:
        choices = ", ".join(map(str, known))
        raise RequestError(f"unknown {name} {value!r:.80}; known: {choices}", param=name)
