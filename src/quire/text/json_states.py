"""Positions in JSON texts that follow a schema. Texts at equal positions may continue in the same ways, so
that the token mask of a grammar, once computed, can be remembered for its position.

A position describes all that later text depends on: the enclosing objects and arrays, the keys that are
used, the bytes of an unfinished number. Whether the text is valid is not checked: the grammar does that.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from quire.text.json_nodes import ANY, SchemaNode, SchemaReader

MaskKey = tuple[int, ...]
"""Key of a remembered token mask. Positions with equal keys, in any text of the process, allow the same
tokens."""

MAX_POSITIONS, MAX_STEPS = 1 << 12, 1 << 14
"""Maximum number of positions of one schema that are kept, and of steps (tokens that lead from one to
another); beyond that, all are dropped."""
_POSITION_BYTES, _STEP_BYTES = 1 << 10, 256
"""Estimated bytes of memory for a position, and for a step (a token that leads from one position to
another)."""
MAX_RAW_BYTES = 48
"""Maximum number of bytes so far of a number, an enum, a key or the like, at which masks are remembered. Such
values are described by all of their bytes, and longer ones hardly ever occur twice."""
MAX_NEW_STEPS = 2048
"""Number of steps that no text took before, after which it is checked whether positions recur. If more than
three of four steps were new, texts of the schema are no longer followed."""
_LONG = b"." * (MAX_RAW_BYTES + 1)
"""Bytes in place of longer ones than MAX_RAW_BYTES, at which masks are not remembered."""
MAX_DEPTH = 64
"""Maximum number of nested objects and arrays; deeper texts are not followed."""
_PLAIN = re.compile(r'[^"\\\x00-\x1F\x7F]+')
_SPACES = {32: b" ", 9: b" ", 13: b"\n", 10: b"\n"}
"""White space characters by the representative that is kept of each: the grammar's patterns of white space
treat space and tab alike, and both line breaks alike."""
_QUOTE, _BACKSLASH, _COMMA, _COLON = b'",:'[0], b"\\"[0], b","[0], b":"[0]
_OPEN_OBJECT, _CLOSE_OBJECT, _OPEN_ARRAY, _CLOSE_ARRAY = b"{}[]"
_OPENING, _CLOSING = frozenset(b"{["), frozenset(b"}]")

# Where a position is: before a value, in a plain string, in another scalar (or its string), in a value that
# is only known by its bytes, before a key, in a key, before a colon, after a value, after the whole text.
_VALUE, _STRING, _SCALAR, _OPAQUE, _KEY, _IN_KEY, _COLON_NEXT, _AFTER, _END = range(9)


class TokenSpellings(dict[int, tuple[bytes, int] | None]):
    """Spelling of each token, by id: its bytes, and the number of its characters if all of them are plain
    characters of JSON strings, otherwise 0. None stands for a special token, which is not text."""

    def __init__(self, tokens: Sequence[bytes], special_ids: Collection[int]) -> None:
        super().__init__(dict.fromkeys(special_ids))
        self._tokens = tokens
        lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
        self.max_bytes = int(lengths.max(initial=0))
        """Number of bytes of the longest token."""
        spelled = np.frombuffer(b"".join(tokens), np.uint8)
        is_other = (spelled < 0x20) | (spelled >= 0x7F) | (spelled == _QUOTE) | (spelled == _BACKSLASH)
        num_others = np.concatenate([[0], np.cumsum(is_other)])
        ends = np.cumsum(lengths)
        self._is_ascii = (num_others[ends] == num_others[ends - lengths]).tolist()
        """Whether all characters of a token are plain ASCII characters of a JSON string."""

    def __missing__(self, token_id: int) -> tuple[bytes, int] | None:
        known = None
        if 0 <= token_id < len(self._tokens):
            data = self._tokens[token_id]
            known = data, len(data) if self._is_ascii[token_id] else _num_plain(data)
        self[token_id] = known
        return known


def _num_plain(data: bytes) -> int:
    """Return the number of characters of a token if all of them are plain characters of JSON strings,
    otherwise 0."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return 0
    return len(text) if _PLAIN.fullmatch(text) else 0


class _Frame(NamedTuple):
    """An object or array that encloses a position."""

    node: SchemaNode
    is_array: bool
    keys: tuple[bytes | None, ...] = ()
    """Keys of an object's properties so far. One None stands for consecutive keys that the schema does not
    name."""


class _Place(NamedTuple):
    """Description of a position, without the numbers of items of the arrays that enclose it. `where` is the
    kind of the position, such as before a key."""

    where: int
    node: SchemaNode
    """Part of the schema that describes the value in which the position is, or the one before or after it."""
    frames: tuple[_Frame, ...]
    raw: bytes
    """Bytes of an unfinished number, key, escape or the like, which later text depends on."""
    num_chars: int = 0
    num_escapes: int = 0
    """Numbers of plain characters and of escapes so far in a string whose length the schema limits."""
    depth: int = 0
    is_in_string: bool = False


class Position:
    """A position in texts of a schema, with the positions that follow it, as far as some text has reached
    them."""

    __slots__ = ("after", "after_chars", "arrays", "is_forced", "is_plain", "mask_id", "place")

    def __init__(self, place: _Place, mask_id: int | None, reach: int) -> None:
        self.place = place
        self.mask_id = mask_id
        """First number of the mask's key; the limits of enclosing arrays are the others. None: the mask is
        not remembered here."""
        self.is_forced = False
        """Whether the grammar allows only one text next. llguidance's mask then depends on the last token,
        too, which becomes part of the key."""
        self.after: dict[int, tuple[Position, tuple[int, ...]]] = {}
        """Position after a token, by token id, with the changes of arrays that `JsonStates.after`
        describes."""
        self.after_chars: dict[int, Position] = {}
        """In a plain string: position after further plain characters, by their number."""
        self.is_plain = place.where == _STRING and not place.raw
        """Whether the position is between two characters of a plain string."""
        self.arrays = tuple(
            (depth, node, reach // ((node.others or ANY).min_bytes + 1) + 2)
            for depth, node in enumerate(frame.node for frame in place.frames if frame.is_array)
            if node.is_counted
        )
        """Enclosing arrays whose length the schema limits: depth, part of the schema, and the maximum number
        of items that one token can begin."""


class JsonStates:
    """The positions in texts of one schema, which all of these texts share. They are correct for texts that
    the grammar accepts; invalid texts are mostly not detected."""

    def __init__(self, schema: Mapping[str, Any], tokens: TokenSpellings) -> None:
        self.tokens = tokens
        self._reach = tokens.max_bytes
        """Number of bytes of the longest token: a mask depends on continuations of at most this length."""
        self._positions: dict[_Place, Position] = {}
        self._mask_ids: dict[object, int] = {}
        self._num_steps = 0
        self.num_tokens, self._num_new = 0, 0
        """Number of tokens of all texts, and of steps that no text took before, since the last check of
        `is_useful`."""
        self.is_useful = True
        """Whether texts reach the same positions again and again. If not, they are no longer followed."""
        self._start = _Place(_VALUE, SchemaReader(schema).read(schema), (), b"")

    def start(self) -> "TextPosition":
        """Return the position at the beginning of a new text."""
        return TextPosition(self, self._position(self._start), [])

    @property
    def num_bytes(self) -> int:
        """Estimate the bytes of all positions."""
        return _POSITION_BYTES * len(self._positions) + _STEP_BYTES * self._num_steps

    def after(
        self, position: Position, token_id: int, data: bytes
    ) -> tuple[Position, tuple[int, ...]] | None:
        """Return the position after a token with the bytes `data`, and a list of changes of the enclosing
        arrays: 1 for the begin of an array, 0 for one more item of the innermost array, -1 for its end. None:
        the token does not fit here (a draft token may be any), or the nesting is too deep."""
        place, changes = position.place, list[int]()
        try:
            for byte in data:
                place = _STEPS[place.where](place, byte, changes)
        except IndexError:  # the end of an object or array that has not begun
            return None
        if len(place.frames) > MAX_DEPTH:
            return None
        after = position.after[token_id] = self._position(place), tuple(changes)
        self._num_steps += 1
        self._num_new += 1
        if self._num_new >= MAX_NEW_STEPS:
            self.is_useful = 4 * self._num_new <= 3 * self.num_tokens
            self.num_tokens, self._num_new = 0, 0
            if not self.is_useful:
                self._forget()
        return after

    def after_chars(self, position: Position, num_chars: int) -> Position:
        """Return the position in a plain string after more plain characters."""
        place = position.place
        if place.node.is_counted:
            place = place._replace(num_chars=place.num_chars + num_chars)
        after = position.after_chars[num_chars] = self._position(place)
        self._num_steps += 1
        return after

    def _position(self, place: _Place) -> Position:
        position = self._positions.get(place)
        if position is None:
            if len(self._positions) >= MAX_POSITIONS or self._num_steps >= MAX_STEPS:
                self._forget()
            mask_id = None
            if place.where not in (_OPAQUE, _END) and len(place.raw) <= MAX_RAW_BYTES:
                summary = _summary(place, self._reach)
                mask_id = self._mask_ids.get(summary)
                if mask_id is None:
                    mask_id = self._mask_ids[summary] = new_mask_id()
            position = self._positions[place] = Position(place, mask_id, self._reach)
        return position

    def _forget(self) -> None:
        """Drop all positions to free memory. Texts continue from their own positions, which no longer have
        steps."""
        for position in list(self._positions.values()):  # threads that compile may add to them
            position.after.clear()
            position.after_chars.clear()
        self._positions.clear()
        self._mask_ids.clear()
        self._num_steps = 0


_mask_ids = count()


def new_mask_id() -> int:
    """Return the first number of a new `MaskKey`."""
    return next(_mask_ids)


class TextPosition:
    """The present position of one text that follows the schema, and the key of its token mask."""

    __slots__ = ("_counts", "_last", "_limits", "_position", "_states", "_tokens", "mask_key")

    def __init__(self, states: JsonStates, position: Position, counts: list[int], last: int = -1) -> None:
        self._states, self._tokens = states, states.tokens
        self._position = position
        self._counts = counts
        """Number of complete items of each enclosing array, the outermost first."""
        self._last = last
        """Id of the text's last token; -1 at the beginning."""
        self._find_limits()
        self.mask_key: MaskKey | None = None
        """Key of the mask of the next token; None if the mask is not remembered."""
        self._name_mask()

    def advance(self, token_id: int) -> bool:
        """Move to the position after the next token. Return False if the text is no longer followed."""
        token = self._tokens[token_id]
        if token is None or not self._states.is_useful:
            return False
        self._states.num_tokens += 1
        self._last = token_id
        data, num_plain = token
        if num_plain and self._position.is_plain:
            after = self._position.after_chars.get(num_plain)
            self._position = after or self._states.after_chars(self._position, num_plain)
        else:
            step = self._position.after.get(token_id) or self._states.after(self._position, token_id, data)
            if step is None:
                return False
            self._position, changes = step
            if changes:
                self._change_arrays(changes)
        self._name_mask()
        return True

    def _change_arrays(self, changes: tuple[int, ...]) -> None:
        for change in changes:
            if change > 0:
                self._counts.append(0)
            elif change < 0:
                self._counts.pop()
            else:
                self._counts[-1] += 1
        self._find_limits()

    def _find_limits(self) -> None:
        """Compute how many more items each enclosing array with limits needs at least and allows at most."""
        limits = (_left(node, self._counts[depth], reach) for depth, node, reach in self._position.arrays)
        self._limits = tuple(limit for pair in limits for limit in pair)

    def _name_mask(self) -> None:
        mask_id = self._position.mask_id
        if self._position.is_forced and mask_id is not None:
            self.mask_key = mask_id, *self._limits, self._last
        else:
            self.mask_key = None if mask_id is None else (mask_id, *self._limits)

    def force(self) -> None:
        """Make the last token a part of the mask's key, since the grammar allows only one text next."""
        self._position.is_forced = True
        self._name_mask()

    def copy(self) -> "TextPosition":
        return TextPosition(self._states, self._position, list(self._counts), self._last)


def _left(node: SchemaNode, count: int, reach: int) -> tuple[int, int]:
    """Return the minimum and maximum number of further characters or items, given `count` of them so far.
    Both are cut to `reach`, beyond which they make no difference to the next token."""
    return (
        min(max(node.min - count, 0), reach),
        reach if node.max is None else min(max(node.max - count, 0), reach),
    )


def _summary(place: _Place, reach: int) -> object:
    """Return all that the mask at a position depends on, except for the enclosing arrays. Positions with
    equal summaries share a mask."""
    if place.where != _STRING or not place.node.is_counted or place.num_escapes:
        return place
    return place._replace(num_chars=0), _left(place.node, place.num_chars, reach + 1)


# ---- one byte


def _more(place: _Place, byte: int, max_bytes: int = MAX_RAW_BYTES) -> _Place:
    raw = place.raw + bytes((byte,))
    if len(raw) > max_bytes or place.where == _OPAQUE:
        raw = _LONG + b"\\" * _is_escaped(raw)
    return place._replace(raw=raw)


def _space(place: _Place, byte: int) -> _Place:
    return place._replace(raw=place.raw + _SPACES.get(byte, b"?"))


def _after_value(place: _Place) -> _Place:
    if not place.frames:
        return _Place(_END, ANY, (), b"")
    return _Place(_AFTER, ANY, place.frames, b"")


def _before_value(place: _Place, byte: int, changes: list[int]) -> _Place:
    node, frames = place.node, place.frames
    if byte in _SPACES:
        return _space(place, byte)
    if byte == _CLOSE_ARRAY:  # of an empty array
        return _after_end(place, changes)
    if byte == _QUOTE and node.kind in ("string", "any"):
        return _Place(_STRING, node, frames, b"")
    if byte == _OPEN_OBJECT and node.kind in ("object", "any"):
        return _Place(_KEY, ANY, (*frames, _Frame(node, False)), b"{")
    if byte == _OPEN_ARRAY and node.kind in ("array", "any"):
        changes.append(1)
        return _Place(_VALUE, node.others or ANY, (*frames, _Frame(node, True)), b"[")
    raw = bytes((byte,))
    if byte in _OPENING:
        return _Place(_OPAQUE, node, frames, raw, depth=1)
    return _Place(_SCALAR, node, frames, raw, is_in_string=byte == _QUOTE)


def _in_string(place: _Place, byte: int, changes: list[int]) -> _Place:
    raw = place.raw
    if not raw and byte == _QUOTE:
        return _after_value(place)
    if raw[:1] == b"\\":
        return _in_escape(place, byte, changes)
    if not raw and byte == _BACKSLASH:
        return place._replace(raw=b"\\", num_escapes=place.num_escapes + place.node.is_counted)
    raw += bytes((byte,))
    return place._replace(raw=raw) if _is_cut(raw) else _one_char(place)


def _one_char(place: _Place) -> _Place:
    return place._replace(raw=b"", num_chars=place.num_chars + place.node.is_counted)


def _in_escape(place: _Place, byte: int, changes: list[int]) -> _Place:
    """Return the place after one more byte of an escape. In a string with limits, all bytes of an escaped
    code point are kept, since it is not known here how the grammar counts its characters."""
    raw = place.raw + bytes((byte,))
    if place.node.is_counted and raw[1:2] == b"u":
        return place._replace(where=_SCALAR, raw=b"%d:%d:" % place[4:6] + raw, is_in_string=True)
    if len(raw) == 7 and byte != _BACKSLASH:
        return _in_string(place._replace(raw=b""), byte, changes)
    is_pair = raw[2:4].lower() in _HIGH_SURROGATES and raw[7:8] in (b"", b"u")
    if raw[1:2] == b"u" and len(raw) < (12 if is_pair else 6):
        return place._replace(raw=raw)
    return place._replace(raw=b"")


_HIGH_SURROGATES = frozenset((b"d8", b"d9", b"da", b"db"))


def _is_cut(raw: bytes) -> bool:
    """Return whether the bytes are an incomplete character of UTF-8."""
    first = raw[0]
    return len(raw) < (1 if first < 0xC0 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4)


def _in_scalar(place: _Place, byte: int, changes: list[int]) -> _Place:
    if place.is_in_string:
        if byte == _QUOTE and not _is_escaped(place.raw):
            return _after_value(place)
    elif byte in _SPACES or byte in _CLOSING or byte == _COMMA:
        after = _after_value(place)
        return _STEPS[after.where](after, byte, changes)
    return _more(place, byte)


def _is_escaped(raw: bytes) -> bool:
    return (len(raw) - len(raw.rstrip(b"\\"))) % 2 == 1


def _in_opaque(place: _Place, byte: int, changes: list[int]) -> _Place:
    if place.is_in_string:
        ends = byte == _QUOTE and not _is_escaped(place.raw)
        return _more(place, byte)._replace(is_in_string=not ends)
    depth = place.depth + (byte in _OPENING) - (byte in _CLOSING)
    if not depth:
        return _after_value(place)
    return _more(place, byte)._replace(depth=depth, is_in_string=byte == _QUOTE)


def _before_key(place: _Place, byte: int, changes: list[int]) -> _Place:
    if byte == _CLOSE_OBJECT:
        return _after_end(place, changes)
    return _space(place, byte) if byte in _SPACES else _Place(_IN_KEY, ANY, place.frames, bytes((byte,)))


def _in_key(place: _Place, byte: int, changes: list[int]) -> _Place:
    frame = place.frames[-1]
    if byte != _QUOTE or _is_escaped(place.raw):
        return _more(place, byte, max(MAX_RAW_BYTES, frame.node.max_key_bytes))
    key, child = frame.node.property(place.raw + b'"')
    if frame.node.kind == "object" and frame.keys[-1:] != (key,):
        frame = frame._replace(keys=(*frame.keys, key))
    return _Place(_COLON_NEXT, child, (*place.frames[:-1], frame), b"")


def _before_colon(place: _Place, byte: int, changes: list[int]) -> _Place:
    return place._replace(where=_VALUE, raw=b":") if byte == _COLON else _space(place, byte)


def _after(place: _Place, byte: int, changes: list[int]) -> _Place:
    if byte in _CLOSING:
        return _after_end(place, changes)
    if byte != _COMMA:
        return _space(place, byte)
    frame = place.frames[-1]
    if not frame.is_array:
        return _Place(_KEY, ANY, place.frames, b",")
    changes.append(0)
    return _Place(_VALUE, frame.node.others or ANY, place.frames, b",")


def _after_end(place: _Place, changes: list[int]) -> _Place:
    """Return the place after the end of the innermost object or array."""
    if place.frames[-1].is_array:
        changes.append(-1)
    return _after_value(place._replace(frames=place.frames[:-1]))


_STEPS = (
    _before_value,
    _in_string,
    _in_scalar,
    _in_opaque,
    _before_key,
    _in_key,
    _before_colon,
    _after,
    lambda place, byte, _: _space(place, byte),
)
