"""EngineLink: the connection of an API process to an engine core, or to a fleet of them."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from quire.data.stats import StepStats
from quire.data.wire import Ready, ToCore
from quire.frontend.outputs import OutputProcessor


class Owner(Protocol):
    """Owner of connections to engine cores, which handles the events of the connections."""

    def on_ready(self, link: "EngineLink") -> None: ...
    def on_stats(self, link: "EngineLink", page: bytes | None) -> None:
        """Handle a report of the core's load. `page` is the metrics page of a core on another machine, else
        empty. None: the core is a fleet, which has no page."""

    def on_reset(self) -> None:
        """Clear the cache of processed media."""

    def on_missing(self, request_id: str) -> None:
        """Handle that a core lacks media arrays of a request; `request_id` is that of its first sequence."""

    def on_outputs(self, link: "EngineLink") -> None:
        """Deliver the outputs that were added to `link.outputs`."""

    def on_death(self, link: "EngineLink") -> None: ...


class EngineLink(ABC):
    """A connection to an engine core or a fleet, with the processor of its outputs and the state of the
    core."""

    def __init__(
        self,
        place: int,
        rank: int,
        *,
        name: str,
        outputs: OutputProcessor,
        owner: Owner,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a connection, which `start` opens. `place` is its index among its owner's connections,
        `rank` the data-parallel rank of the core."""
        self.place = place
        self.rank = rank
        self.name = name
        self.outputs = outputs
        self.core: Ready | None = None
        self.stats = StepStats()
        """Last reported gauges of the core."""
        self.num_unreported = 0
        """Prompt tokens sent to the core since its last report."""
        self.was_up = False
        self.start_s = 0.0
        """Seconds that the last start of the core took."""
        self._clock = clock
        self._owner = owner
        self.down_since = clock()
        self._down_reason = f"{name} is starting"
        self._heard_at = clock()

    @property
    def silent_s(self) -> float:
        """Return the seconds since the last message of the core."""
        return self._clock() - self._heard_at

    @property
    def down_s(self) -> float:
        """Return the seconds since the core became unavailable."""
        return self._clock() - self.down_since

    @abstractmethod
    def start(self) -> None:
        """Begin to connect, without waiting; the event loop must be running."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def problem(self, health_timeout_s: float) -> str | None:
        """Return a text that says why the core is unavailable, such as no progress for `health_timeout_s`
        seconds; None if it is available."""

    @abstractmethod
    def send(self, message: ToCore) -> None: ...

    @abstractmethod
    async def call_all(self, method: str, args: dict[str, Any], timeout_s: float | None) -> list[Any]:
        """Call a control method of every core of the connection, and return their answers. `timeout_s` None:
        wait without a limit."""
