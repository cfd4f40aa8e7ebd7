"""Server-sent events of a body that arrives in arbitrary chunks."""

import re

_BLANK_LINE = re.compile(rb"\r?\n\r?\n")


class EventSplitter:
    """Splits bytes into the data of complete events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        # Nearly every chunk is exactly one event of one line.
        if (
            data.endswith(b"\n\n")
            and data.startswith(b"data: ")
            and data.count(b"\n") == 2
            and not self._rest
        ):
            return [data[6:-2]]
        *events, self._rest = _BLANK_LINE.split(self._rest + data)
        return [content for event in events if (content := _data(event)) is not None]


def _data(event: bytes) -> bytes | None:
    """Return the data lines of one event; None if it has none, such as a keep-alive comment."""
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
