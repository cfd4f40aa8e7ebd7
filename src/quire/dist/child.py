"""A child process that is kept running: started, listened to, started again when it dies."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.process import BaseProcess

from quire.errors import ConfigError
from quire.logs import get_logger

log = get_logger(__name__)

BACKOFF_S = (0.2, 1.0, 2.0, 5.0, 10.0, 30.0)
STEADY_S = 60.0
"""A process that ran this long starts again at the first backoff."""


@dataclass
class Child:
    """A process that is kept running."""

    name: str
    make: Callable[[connection.Connection], BaseProcess]
    process: BaseProcess | None = None
    says: connection.Connection | None = None
    was_up: bool = False
    started_at: float = 0.0
    num_failures: int = 0
    restart_at: float | None = field(default=None)

    def start(self) -> None:
        self.says, theirs = connection.Pipe(duplex=False)
        self.process = self.make(theirs)
        self.process.start()
        theirs.close()
        self.started_at = time.monotonic()
        self.restart_at = None

    def listen(self) -> None:
        """None when it is up, or why it cannot be: if it never was, that is the end."""
        while self.says is not None and self.says.poll():
            try:
                problem = self.says.recv()
            except EOFError:
                self.says = None
                return
            if problem is None:
                self.was_up = True
            elif self.num_failures == 0:
                raise ConfigError(problem)
            else:
                log.error("%s cannot start: %s", self.name, problem)

    def note_death(self) -> None:
        assert self.process is not None
        if time.monotonic() - self.started_at > STEADY_S:
            self.num_failures = 0
        delay = BACKOFF_S[min(self.num_failures, len(BACKOFF_S) - 1)]
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

    def end(self, how: int, timeout_s: float) -> None:
        """Ask it to end, and insist."""
        if self.process is None or not self.process.is_alive():
            return
        os.kill(self.process.pid or 0, how)
        self.process.join(timeout_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
