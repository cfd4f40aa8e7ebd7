"""CoreCalls: calls of methods of all engine cores, and their answers."""

import asyncio
from collections.abc import Sequence
from typing import Any

from quire.errors import EngineDead
from quire.frontend.core_client import CALL_TIMEOUT_S
from quire.frontend.engine_link import EngineLink


class CoreCalls:
    """Calls methods of the engine cores by name."""

    def __init__(self, links: Sequence[EngineLink], health_timeout_s: float) -> None:
        self._links, self._health_timeout_s = links, health_timeout_s

    def check_any(self) -> None:
        """Raise EngineDead unless some core is available."""
        problems = [link.problem(self._health_timeout_s) for link in self._links]
        if None not in problems:
            raise EngineDead(str(problems[0]))

    async def of_ready(self, method: str, **args: Any) -> list[Any]:
        """Call a method of all cores that are ready; return their answers in order."""
        self.check_any()
        up = [link for link in self._links if link.core is not None]
        answers = await asyncio.gather(*(link.call_all(method, args, CALL_TIMEOUT_S) for link in up))
        return sum(answers, [])

    async def of_all(
        self, method: str, args: dict[str, Any], timeout_s: float | None = CALL_TIMEOUT_S
    ) -> list[Any]:
        """Call a method of all cores, all of which must be available; raise the first error at the end."""
        for link in self._links:
            if (problem := link.problem(self._health_timeout_s)) is not None:
                raise EngineDead(problem)
        calls = (link.call_all(method, args, timeout_s) for link in self._links)
        answers: list[Any] = []
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer
            answers += answer
        return answers
