"""Check of the number of blocks in a GIF before it is decoded."""

from quire.errors import RequestError

_MAX_FRAMES = 10_000
_MAX_BLOCKS = 1 << 21
_MAX_COMMENT_BLOCKS = 256
"""Maximum number of comment blocks, since decoders concatenate them in quadratic time."""
_IMAGE, _EXTENSION, _END = 0x2C, 0x21, 0x3B
_COMMENT = 0xFE


def count_frames(data: bytes) -> int:
    """Return the number of frames of a GIF file; raise a RequestError for too many frames or blocks.
    Truncated files are not detected."""
    place = 13 + _table_bytes(data[10:11])
    frames = blocks = comments = 0
    while place < len(data) and data[place] != _END:
        kind = data[place]
        if kind == _IMAGE:
            frames += 1
            place += 11 + _table_bytes(data[place + 9 : place + 10])
        elif kind == _EXTENSION:
            place += 2
        else:
            place += 1
            continue
        is_comment = kind == _EXTENSION and data[place - 1] == _COMMENT if place <= len(data) else False
        while place < len(data) and data[place]:
            place += data[place] + 1
            blocks += 1
            comments += is_comment
            if blocks > _MAX_BLOCKS or comments > _MAX_COMMENT_BLOCKS:
                raise RequestError("the GIF has too many blocks")
        place += 1
        if frames > _MAX_FRAMES:
            raise RequestError(f"the GIF has more than {_MAX_FRAMES} frames")
    return frames


def _table_bytes(flags: bytes) -> int:
    """Return the size in bytes of the colour table that a byte of flags declares; 0 if it declares none."""
    return 3 << (flags[0] & 7) + 1 if flags and flags[0] & 0x80 else 0
