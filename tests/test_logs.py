"""Tests of the log lines."""

import io
import logging

from tqdm import tqdm

from quire import logs


def shown_lines(text: str) -> list[str]:
    """Return the lines that a terminal shows: text after a carriage return overwrites the line."""
    lines = []
    for line in text.split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines


def log_into(stream: io.StringIO) -> logging.Logger:
    logger = logging.Logger("test")
    handler = logs._Handler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
    return logger


def test_line_does_not_begin_behind_a_progress_bar() -> None:
    stream = io.StringIO()
    logger = log_into(stream)
    logger.info("before")
    with tqdm(total=2, file=stream, desc="Processed prompts", mininterval=0) as bar:
        bar.update()
        logger.warning("a request is preempted")
        bar.update()
    logger.info("after")
    lines = shown_lines(stream.getvalue())
    assert [line for line in lines if "Processed" not in line] == [
        "INFO before",
        "WARNING a request is preempted",
        "INFO after",
        "",
    ]
    assert sum("Processed prompts: 100%" in line for line in lines) == 1
