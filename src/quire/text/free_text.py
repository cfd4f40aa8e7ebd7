"""Positions in the free text before a trigger, at which a grammar allows the same tokens again and again."""

from collections.abc import Sequence

from quire.text.json_states import MaskKey, TokenSpellings, new_mask_id

MAX_POSITIONS = 1 << 12
"""Most positions of one grammar. Texts that would need more are not followed."""
MAX_STEPS = 1 << 16
"""Most remembered steps between positions of one grammar."""
_POSITION_BYTES, _STEP_BYTES = 600, 100


class _Position:
    """A position, with the positions after tokens that were looked up before."""

    __slots__ = ("after", "mask_key", "tail")

    def __init__(self, tail: bytes | None) -> None:
        self.tail = tail
        """The end of the text that is the beginning of a trigger or of a character; None at the start."""
        self.mask_key: MaskKey = (new_mask_id(),)
        self.after: dict[int, _Position | None] = {}


class FreeText:
    """Positions in free text. A mask there depends only on the beginnings of triggers and characters at the
    end of the text."""

    is_useful = True

    def __init__(self, triggers: Sequence[str], tokens: TokenSpellings, not_first: str = "") -> None:
        """Build it for text that is free until one of the `triggers` or a special token, unless its first
        character is `not_first`."""
        self._triggers = [trigger.encode() for trigger in triggers]
        self._beginnings = sorted(
            {trigger[:length] for trigger in self._triggers for length in range(1, len(trigger))},
            key=len,
            reverse=True,
        )
        self._tokens = tokens
        self._not_first = not_first.encode()
        self._positions: dict[bytes | None, _Position] = {None: _Position(None)}
        self._num_steps = 0

    def start(self) -> "FreeTextPosition":
        """Return the position at the beginning of a new text."""
        return FreeTextPosition(self, self._positions[None])

    @property
    def num_bytes(self) -> int:
        """Estimate the bytes of all positions."""
        return _POSITION_BYTES * len(self._positions) + _STEP_BYTES * self._num_steps

    def after(self, position: _Position, token_id: int) -> _Position | None:
        """Return the position after a token; None if the text is not free there, or ends."""
        spelled = self._tokens[token_id]
        tail = None if spelled is None else self._tail(position.tail, spelled[0])
        after = None
        if tail is not None and (tail in self._positions or len(self._positions) < MAX_POSITIONS):
            after = self._positions.setdefault(tail, _Position(tail))
        if self._num_steps >= MAX_STEPS:
            for other in self._positions.values():
                other.after.clear()
            self._num_steps = 0
        position.after[token_id] = after
        self._num_steps += 1
        return after

    def _tail(self, tail: bytes | None, data: bytes) -> bytes | None:
        """Return the tail of a text with more bytes; None once they complete a trigger."""
        if tail is None and self._not_first and data.startswith(self._not_first):
            return None
        data = (tail or b"") + data
        if any(trigger in data for trigger in self._triggers):
            return None
        trigger = next((part for part in self._beginnings if data.endswith(part)), b"")
        return max(trigger, _cut_char(data), key=len)


def _cut_char(data: bytes) -> bytes:
    """Return the beginning of a UTF-8 character at the end of the data."""
    for length, byte in enumerate(reversed(data[-3:]), 1):
        if byte >= 0xC0:
            return data[-length:] if length < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else b""
        if byte < 0x80:
            break
    return b""


class FreeTextPosition:
    """The position of one text."""

    __slots__ = ("_position", "_states", "mask_key")

    def __init__(self, states: FreeText, position: _Position) -> None:
        self._states = states
        self._position = position
        self.mask_key: MaskKey | None = position.mask_key
        """Name of the mask of the next token; None if it is not remembered."""

    def advance(self, token_id: int) -> bool:
        """Move on by a token. Return False if the text is not followed any more."""
        try:
            after = self._position.after[token_id]
        except KeyError:
            after = self._states.after(self._position, token_id)
        if after is None:
            return False
        self._position, self.mask_key = after, after.mask_key
        return True

    def force(self) -> None:
        """Remember no mask of this position: the grammar forces what follows."""
        self.mask_key = None

    def copy(self) -> "FreeTextPosition":
        return FreeTextPosition(self._states, self._position)
