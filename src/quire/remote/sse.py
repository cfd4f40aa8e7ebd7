"""Server-sent events out of a body that arrives in arbitrary pieces."""

import re

_BLANK_LINE = re.compile(rb"\r?\n\r?\n")


class EventSplitter:
    """Give it bytes, get the data of the events that are complete."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        # Nearly every piece is exactly one event of one line.
        if (
            data.endswith(b"\n\n")
            and data.startswith(b"data: ")
            and data.count(b"\n") == 2
            and not self._rest
        ):
            return [data[6:-2]]
        *events, self._rest = _BLANK_LINE.split(self._rest + data)
        return [found for event in events if (found := _data(event)) is not None]


def _data(event: bytes) -> bytes | None:
    """The data lines of one event; None where it has none, as a comment that keeps the connection open."""
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
