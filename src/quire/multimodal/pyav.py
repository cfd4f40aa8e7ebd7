"""Opening of audio and video files with PyAV, if it is installed."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quire.errors import RequestError

_KINDS: tuple[tuple[int, bytes, str], ...] = (
    (4, b"ftyp", "mov"),
    (0, b"\x1aE\xdf\xa3", "matroska"),
    (8, b"AVI ", "avi"),
    (0, b"OggS", "ogg"),
    (0, b"fLaC", "flac"),
    (0, b"FLV", "flv"),
    (0, b"ID3", "mp3"),
    (0, b"\xff\xfb", "mp3"),
    (0, b"\xff\xf3", "mp3"),
    (0, b"\xff\xf2", "mp3"),
    (0, b"\xff\xf1", "aac"),
    (0, b"\xff\xf9", "aac"),
    (0, b"\x00\x00\x01\xba", "mpeg"),
    (0, b"G", "mpegts"),
)
"""Offset and bytes of the signature of each format, and FFmpeg's name for the format. FFmpeg gets the name,
since it would otherwise detect playlists, too, and open the files that they refer to."""


@contextmanager
def opened(data: bytes, what: str) -> Iterator[Any]:
    """Open an audio or video file as a PyAV container. `what` is the modality in error messages."""
    name = next((name for at, mark, name in _KINDS if data.startswith(mark, at)), None)
    if name is None:
        raise RequestError(f"it is not {what}, or its format is not supported")
    try:
        import av
    except ImportError:
        raise RequestError(
            f"it is {what} of the format {name!r}, which needs PyAV: install the server with `quire[media]`"
        ) from None
    try:
        with av.open(
            io.BytesIO(data), format=name, options={"protocol_whitelist": "none"}, metadata_errors="ignore"
        ) as container:
            yield container
    except (av.error.FFmpegError, ValueError, IndexError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"the file is broken or truncated: {error}") from None
