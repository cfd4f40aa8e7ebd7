"""Tests of the log lines."""

import io
import logging
import os
import socket
from pathlib import Path
from typing import TextIO

import pytest
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


def log_into(stream: TextIO) -> logging.Logger:
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


@pytest.mark.parametrize("is_socket", [False, True])
def test_full_pipe_drops_lines_and_blocks_neither_this_process_nor_the_descriptor(is_socket: bool) -> None:
    """Catches a server that stops when nothing reads its log."""
    if is_socket:
        reader, writer = (end.detach() for end in socket.socketpair())
    else:
        reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as log, open(writer, "w") as stream:
        logger = log_into(stream)
        for number in range(20_000):
            logger.info("line %05d %s", number, "x" * 100)
        assert os.get_blocking(writer), "other processes may share this descriptor"
        first = log.read(1 << 20)
        assert first.startswith(b"INFO line 00000 x") and len(first) < 20_000 * 100
        os.set_blocking(reader, False)
        while log.read(1 << 20):
            pass
        logger.info("read again")
        last = log.read(1 << 20).decode()
        num_dropped = int(last.split()[0])
        assert last.endswith(" log lines were dropped: the pipe was full\nINFO read again\n")
        assert 0 < num_dropped < 20_000 - first.count(b"\n") + 1


def test_log_follows_a_redirected_descriptor(tmp_path: Path) -> None:
    """Catches lines that still go to the pipe of a parent process."""
    reader, writer = os.pipe()
    with open(reader, "rb"), open(writer, "w") as stream:
        logger = log_into(stream)
        logger.info("into the pipe")
        with (tmp_path / "log").open("w") as other:
            os.dup2(other.fileno(), writer)
        logger.info("into the file")
    assert (tmp_path / "log").read_text() == "INFO into the file\n"
