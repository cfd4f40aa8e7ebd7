"""The pause and sleep state of a core, and the version of its weights."""

from collections.abc import Iterable

from quire.data.control import DEFAULT_VERSION, MEMORY
from quire.data.request import Request
from quire.data.step_plan import FinishReason


class PauseState:
    """Whether steps are planned. Open: yes. Shut: none. Draining: only those of running requests. Requests
    that arrive meanwhile wait outside, in order."""

    def __init__(self) -> None:
        self.is_open = True
        self.drains = False
        self.outside: dict[str, Request] = {}
        self.level = 0
        """Sleep level: 1, weights are in host memory; 2, weights are dropped."""
        self.asleep: set[str] = set()
        """Parts of the workers' memory that are asleep."""
        self.is_unsure = False
        """Whether going to sleep failed, so that workers may be in different states."""
        self.weight_version = DEFAULT_VERSION
        """Version of the workers' weights, which the trainer names."""

    @property
    def is_shut(self) -> bool:
        return not self.is_open and not self.drains

    @property
    def settled_level(self) -> int:
        """Return the level at which all memory of all workers sleeps; 0 if some of it may be awake."""
        return self.level if self.asleep == set(MEMORY) and not self.is_unsure else 0

    def drop(self, request_ids: Iterable[str]) -> dict[str, FinishReason]:
        """Abort the requests with these ids that wait outside."""
        dropped = [id for id in request_ids if self.outside.pop(id, None) is not None]
        return {id: FinishReason("abort") for id in dropped}
