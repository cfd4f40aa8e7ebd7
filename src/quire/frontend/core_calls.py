"""CoreCalls: calls of methods of all engine cores, and their answers."""

import asyncio
from collections.abc import Sequence
from typing import Any

from quire.errors import EngineDead
from quire.frontend.control import CALL_TIMEOUT_S, check_sendable
from quire.frontend.engine_link import EngineLink

STARTS = 2.0
"""Time that requests wait for a dead core after the health timeout, as a multiple of the core's start
time."""


class CoreCalls:
    """Control calls to all engine cores of an API process, by the name of the method."""

    def __init__(
        self, links: Sequence[EngineLink], health_timeout_s: float, *, cores_return: bool = True
    ) -> None:
        """Create the calls. `cores_return`: whether dead cores are restarted."""
        self._links, self._health_timeout_s = links, health_timeout_s
        self._cores_return = cores_return

    def check_any(self) -> None:
        """Raise EngineDead unless some core is available."""
        problems = [link.problem(self._health_timeout_s) for link in self._links]
        if None not in problems:
            raise EngineDead(str(problems[0]))

    @property
    def patience_s(self) -> float:
        """Return the maximum seconds that requests wait for the restart of a dead core, which takes about as
        long as its start."""
        if not self._cores_return:
            return 0.0
        return self._health_timeout_s + STARTS * max(link.start_s for link in self._links)

    def is_restarting(self) -> bool:
        """Whether a core that was available died, and requests still wait for its restart."""
        patience_s = self.patience_s
        return any(link.core is None and link.was_up and link.down_s < patience_s for link in self._links)

    async def call_all(
        self,
        method: str,
        args: dict[str, Any],
        timeout_s: float | None = CALL_TIMEOUT_S,
        *,
        if_ready: bool = False,
    ) -> list[Any]:
        """Call a control method on all cores and wait for their answers, in the order of the cores. Raise
        EngineDead if a core is unavailable; with `if_ready`, skip cores that are not ready. The first error
        of a core is raised after all calls have ended."""
        check_sendable(args)
        if if_ready:
            self.check_any()
        else:
            for link in self._links:
                if (problem := link.problem(self._health_timeout_s)) is not None:
                    raise EngineDead(problem)
        called = [link for link in self._links if link.core is not None or not if_ready]
        calls = (link.call_all(method, args, timeout_s) for link in called)
        answers: list[Any] = []
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer
            answers += answer
        return answers
