"""Pausing and resuming a core, its sleep state, and the version of its weights."""

from collections.abc import Iterable

from quire.data.control import DEFAULT_VERSION, MEMORY, MODES, check_choice
from quire.data.request import Request
from quire.data.step_plan import FinishReason
from quire.errors import RequestError


class PauseState:
    """State that decides which steps the core may plan. If it is open, the core plans all steps; if it is
    shut, none; while it drains, only steps of admitted requests. Requests that arrive while it is not open
    wait outside the scheduler, in order."""

    def __init__(self) -> None:
        self.is_open = True
        self.drains = False
        self.outside: dict[str, Request] = {}
        self.level = 0
        """Sleep level: 0, awake; 1, weights are in host memory; 2, weights are dropped."""
        self.asleep: set[str] = set()
        """Parts of the workers' memory that are asleep: weights, KV cache, or both."""
        self.is_unsure = False
        """Whether a call to sleep has not succeeded, so that workers may be in different states."""
        self.weight_version = DEFAULT_VERSION
        """Version of the workers' weights, named by the trainer."""

    def pause(self, mode: str) -> None:
        """Admit no more requests, and plan no step; with mode `wait`, plan the steps of admitted requests."""
        check_choice("mode", mode, MODES)
        self.is_open, self.drains = False, mode == "wait"

    def resume(self) -> list[Request]:
        """Plan steps again; return the requests that have arrived during the pause, in order."""
        if self.asleep:
            raise RequestError(f"{' and '.join(sorted(self.asleep))} are asleep: call wake_up first")
        self.level, self.is_open, self.drains = 0, True, False
        outside, self.outside = self.outside, {}
        return [*outside.values()]

    @property
    def is_shut(self) -> bool:
        return not self.is_open and not self.drains

    @property
    def settled_level(self) -> int:
        """Return the level at which all memory of all workers sleeps; 0 if some memory may be awake."""
        return self.level if self.asleep == set(MEMORY) and not self.is_unsure else 0

    def drop(self, request_ids: Iterable[str]) -> dict[str, FinishReason]:
        """Abort the requests with these ids that have arrived during the pause; return the finish reasons by
        id."""
        dropped = [id for id in request_ids if self.outside.pop(id, None) is not None]
        return {id: FinishReason("abort") for id in dropped}
