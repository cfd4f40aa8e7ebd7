"""A child process that is kept running: started, listened to, started again when it dies."""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess

from quire.errors import ConfigError
from quire.logs import get_logger

log = get_logger(__name__)

BACKOFF_S = (0.2, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Pauses before a process is started again. Only one that cannot come up gets beyond the second."""
STEADY_S = 60.0
"""A process that ran this long starts again at the first backoff."""
_HEAR_S = 0.01


@contextmanager
def main_left_out() -> Iterator[None]:
    """Processes that are spawned meanwhile do not run the user's script, which has nothing for them, and no
    `if __name__ == "__main__"` perhaps."""
    main = sys.modules["__main__"]
    before = {name: getattr(main, name, None) for name in ("__spec__", "__file__")}
    for name in before:
        setattr(main, name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(main, name, value)


@dataclass
class Child:
    """A process that is kept running. It says None when it is up, or in one line why it cannot be."""

    name: str
    make: Callable[[connection.Connection], BaseProcess]
    process: BaseProcess | None = None
    says: connection.Connection | None = None
    is_up: bool = False
    was_up: bool = False
    """In this life or an earlier one: a process that never was up is not started again."""
    started_at: float = 0.0
    num_failures: int = 0
    restart_at: float | None = None

    def start(self) -> None:
        self.says, theirs = connection.Pipe(duplex=False)
        try:
            self.process = self.make(theirs)
            with main_left_out():
                self.process.start()
        finally:
            theirs.close()
        self.started_at = time.monotonic()
        self.restart_at = None

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.is_alive()

    def listen(self) -> None:
        """Hear what it has said so far. Why it cannot be up ends everything, if it never was."""
        while self.says is not None and self.says.poll():
            try:
                problem: str | None = self.says.recv()
            except EOFError:
                self.says.close()
                self.says = None
                return
            if problem is None:
                self.is_up = self.was_up = True
            elif not self.was_up:
                raise ConfigError(problem)
            else:
                log.error("%s %s: %s", self.name, "failed" if self.is_up else "cannot start", problem)

    async def await_up(self) -> None:
        """Wait for its first word. Not in a thread: whoever gives up would leave it behind, listening to what
        `end` closes."""
        while not self.is_up:
            if self.says is None:
                raise ConfigError(f"{self.name} could not start; the log says why")
            self.listen()
            await asyncio.sleep(_HEAR_S)

    def look(self) -> bool:
        """Hear it, and see whether it has ended; the death of one that never was up ends everything."""
        code = self.process.exitcode if self.process is not None else None
        self.listen()  # after the look at the exit code: what it said last is then there to be heard
        if code is None:
            return False
        if not self.was_up:
            raise ConfigError(f"{self.name} could not start (exit code {code}); the log says why")
        self._note_death()
        return True

    def _note_death(self) -> None:
        assert self.process is not None
        if time.monotonic() - self.started_at > STEADY_S:
            self.num_failures = 0
        longest = 1 if self.is_up else len(BACKOFF_S) - 1  # requests wait for a process that came up
        delay = BACKOFF_S[min(self.num_failures, longest)]
        self.num_failures += 1
        self.restart_at = time.monotonic() + delay
        log.error(
            "%s (pid %s) ended with exit code %s; starting it again in %.1f s",
            self.name,
            self.process.pid,
            self.process.exitcode,
            delay,
        )
        self.process = None
        self.is_up = False

    def end(self, how: int, timeout_s: float) -> None:
        """Ask it to end, and insist."""
        if self.process is not None and self.process.is_alive():
            os.kill(self.process.pid or 0, how)
            self.process.join(timeout_s)
            if self.process.is_alive():
                self.process.kill()
                self.process.join()
        if self.says is not None:
            self.says.close()
            self.says = None
