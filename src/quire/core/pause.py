"""Gate: whether a core takes steps, and what of its workers is awake."""

from collections.abc import Iterable

from quire.data.control import MEMORY
from quire.data.plan import FinishReason
from quire.data.request import Request


class PauseState:
    """Open, steps are taken. Shut, none is planned; draining, those who are inside go on to their end. Who
    comes while it is not open waits outside, in order."""

    def __init__(self) -> None:
        self.is_open = True
        self.drains = False
        self.outside: dict[str, Request] = {}
        self.level = 0
        """How deep the workers sleep: 1, their weights are in host memory; 2, they are gone."""
        self.asleep: set[str] = set()
        """What of the workers is not awake."""
        self.is_unsure = False
        """Whether falling asleep failed, so that some workers may hold what others have given back."""

    @property
    def is_shut(self) -> bool:
        return not self.is_open and not self.drains

    @property
    def settled_level(self) -> int:
        """The level at which all memory of all workers sleeps; 0 if some of it may be awake."""
        return self.level if self.asleep == set(MEMORY) and not self.is_unsure else 0

    def drop(self, request_ids: Iterable[str]) -> dict[str, FinishReason]:
        """Those of them who wait outside end there."""
        found = [id for id in request_ids if self.outside.pop(id, None) is not None]
        return {id: FinishReason("abort") for id in found}
