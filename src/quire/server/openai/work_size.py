"""Long work runs in a thread; its size is estimated as a number of characters."""

import asyncio
import itertools
from collections.abc import Callable
from types import GeneratorType
from typing import Any, TypeVar

T = TypeVar("T")
LONG = 8192
"""Characters or token ids from which work runs in a thread, as it would block the event loop for
milliseconds: tokenization of 8,000 characters takes about 5 ms."""
VALUE_CHARS = 16
"""Number of characters that a value other than a text counts as, since it takes as long to handle."""
_LISTS = (
    *("logit_bias", "stop", "stop_token_ids", "allowed_token_ids", "bad_words", "logprob_token_ids"),
    *("vllm_xargs", "extra_args"),
)
"""Fields of a body or of SamplingParams that may hold many values."""
_END = object()


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Return the result of `work`, run in a thread if its `size` in characters is at least `LONG`."""
    return work() if size < LONG else await asyncio.to_thread(work)


def num_chars(value: Any) -> int:
    """Count the characters of all texts in a nested value, and `VALUE_CHARS` for each other value; counting
    stops at about `LONG`."""
    return add_sizes(value, len)


def params_size(source: object) -> int:
    """Return the approximate number of characters in the lists and texts of sampling parameters. `source`: a
    body or SamplingParams."""
    return num_chars([getattr(source, name, None) for name in _LISTS])


def add_sizes(value: Any, size_of: Callable[[str], int]) -> int:
    """Add up `size_of` of all texts in a nested value, and `VALUE_CHARS` for each other value, until the sum
    reaches `LONG`."""
    count, pending = 0, [iter((value,))]
    while pending and count < LONG:
        item = next(pending[-1], _END)
        if item is _END:
            pending.pop()
            continue
        count += size_of(item) if isinstance(item, str) else VALUE_CHARS
        if isinstance(item, dict):
            pending.append(itertools.chain(item, item.values()))
        elif isinstance(item, list | tuple | GeneratorType):
            pending.append(iter(item))
    return count
