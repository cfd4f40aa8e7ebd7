"""A supervised child process: it is started, monitored, and restarted when it dies."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess

from quire.errors import ConfigError
from quire.logs import get_logger
from quire.system.process import interrupts_held, main_left_out

log = get_logger(__name__)

BACKOFF_S = (0.2, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds to wait before a restart, by number of failures in a row. For a process that had been up, the
second value is the maximum."""
STEADY_S = 60.0
"""Seconds of running after which the backoff begins at its first value again."""
_POLL_S = 0.01


@dataclass
class Child:
    """A supervised process. It sends None through a pipe when it is ready to serve ("up"), or the reason for
    which it cannot start."""

    name: str
    make: Callable[[connection.Connection], BaseProcess]
    process: BaseProcess | None = None
    says: connection.Connection | None = None
    is_up: bool = False
    was_up: bool = False
    """Whether the process has ever been up; a process that never was up is not restarted."""
    started_at: float = 0.0
    num_failures: int = 0
    restart_at: float | None = None

    def start(self) -> None:
        self.says, child_end = connection.Pipe(duplex=False)
        try:
            self.process = self.make(child_end)
            if self.process.pid is None:  # otherwise it runs already
                with main_left_out(), interrupts_held():
                    self.process.start()
        finally:
            child_end.close()
        self.started_at = time.monotonic()
        self.restart_at = None

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.is_alive()

    def listen(self) -> None:
        """Read the messages of the process without waiting. Raise a ConfigError if it cannot start and
        never was up."""
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
        """Wait, by polling, until the process is up; raise a ConfigError if it ends before that. (A
        waiting thread would survive a cancellation, and read a pipe that `end` has closed.)"""
        import asyncio  # here, since a supervisor has no event loop

        while not self.is_up:
            if self.says is None:
                raise ConfigError(f"{self.name} could not start; see the log")
            self.listen()
            await asyncio.sleep(_POLL_S)

    def look(self) -> bool:
        """Read the messages of the process; return whether it has ended. Raise a ConfigError if it ended
        before it was ever up."""
        code = self.process.exitcode if self.process is not None else None
        self.listen()  # after reading the exit code, so that no last message is missed
        if code is None:
            return False
        if not self.was_up:
            raise ConfigError(f"{self.name} could not start (exit code {code}); see the log")
        self._note_death()
        return True

    def _note_death(self) -> None:
        assert self.process is not None
        if time.monotonic() - self.started_at > STEADY_S:
            self.num_failures = 0
        longest = 1 if self.is_up else len(BACKOFF_S) - 1  # requests wait for a process that was up
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
        """End the process by the signal number `how`, and kill it if it still runs after `timeout_s`
        seconds; wait until it has ended."""
        if self.process is not None and self.process.is_alive():
            os.kill(self.process.pid or 0, how)
            self.process.join(timeout_s)
            if self.process.is_alive():
                self.process.kill()
                self.process.join()
        if self.says is not None:
            self.says.close()
            self.says = None
