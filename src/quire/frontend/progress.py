"""Progress bars of offline calls."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from tqdm import tqdm

from quire.data.outputs import RequestOutput
from quire.frontend.outputs import AnyOutput
from quire.logs import get_logger

log = get_logger(__name__)

T = TypeVar("T")
Progress = bool | Callable[..., Any]
"""Whether to show a progress bar, or the factory of the bar (by default `tqdm`)."""


def _bar_factory(use_tqdm: Progress) -> Callable[..., Any] | None:
    if callable(use_tqdm):
        return use_tqdm
    return tqdm if use_tqdm and log.isEnabledFor(logging.INFO) else None


def with_bar(items: Sequence[T], title: str, use_tqdm: Progress) -> Iterable[T]:
    make = _bar_factory(use_tqdm)
    # Show a bar only for many items.
    return make(items, desc=title) if make is not None and len(items) > 64 else items


class TokenBar:
    """Progress bar that counts finished requests and shows input and output tokens per second."""

    def __init__(self, total: int, use_tqdm: Progress) -> None:
        make = _bar_factory(use_tqdm)
        self._bar = make and make(
            total=total, desc="Processed prompts", dynamic_ncols=True, postfix=_speed(0, 0, 1.0)
        )
        self._num_in = self._num_out = 0

    def __enter__(self) -> "TokenBar":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, output: AnyOutput) -> None:
        if self._bar is None:
            return
        completions = output.outputs if isinstance(output, RequestOutput) else []
        self._num_in += len(output.prompt_token_ids or ()) * max(len(completions), 1)
        self._num_out += sum(len(completion.token_ids) for completion in completions)
        elapsed = max(float(self._bar.format_dict["elapsed"]), 1e-6)
        self._bar.postfix = _speed(self._num_in, self._num_out, elapsed)
        self._bar.update(1)


def _speed(num_in: int, num_out: int, seconds: float) -> str:
    return f"est. speed input: {num_in / seconds:.2f} toks/s, output: {num_out / seconds:.2f} toks/s"
