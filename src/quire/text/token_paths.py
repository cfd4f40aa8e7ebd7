"""Positions in texts of any grammar, known by all tokens so far: short texts repeat."""

from quire.text.json_states import MaskKey, new_mask_id

MAX_POSITIONS = 1 << 12
"""Most positions of one grammar. Longer or other texts are not followed."""
MAX_NEW = 1 << 9
"""Number of new positions after which following stops if they were most of all."""
_POSITION_BYTES = 400


class _Position:
    """A position, with those after tokens that texts had there."""

    __slots__ = ("after", "mask_key")

    def __init__(self) -> None:
        self.mask_key: MaskKey = (new_mask_id(),)
        self.after: dict[int, _Position] = {}


class TokenPaths:
    """Positions in texts of one grammar."""

    def __init__(self) -> None:
        self._start = _Position()
        self._num_positions = 1
        self._num_tokens, self._num_new = 0, 0
        """Tokens of all texts, and new positions, since their share was checked last."""
        self.is_useful = True
        """Whether texts reach positions again. If not, they are not followed any more."""

    def start(self) -> "TokenPath":
        """Return the position at the beginning of a new text."""
        return TokenPath(self, self._start)

    @property
    def num_bytes(self) -> int:
        """Estimate the bytes of all positions."""
        return _POSITION_BYTES * self._num_positions

    def after(self, position: _Position, token_id: int) -> _Position | None:
        """Return the position after a token; None if the text is not followed any more."""
        self._num_tokens += 1
        after = position.after.get(token_id)
        if after is not None or not self.is_useful or self._num_positions >= MAX_POSITIONS:
            return after
        self._num_positions += 1
        self._num_new += 1
        if self._num_new >= MAX_NEW:
            self.is_useful = 2 * self._num_new <= self._num_tokens
            self._num_tokens, self._num_new = 0, 0
        after = position.after[token_id] = _Position()
        return after


class TokenPath:
    """The position of one text."""

    __slots__ = ("_position", "_states", "mask_key")

    def __init__(self, states: TokenPaths, position: _Position) -> None:
        self._states = states
        self._position = position
        self.mask_key: MaskKey | None = position.mask_key
        """Name of the mask of the next token."""

    def advance(self, token_id: int) -> bool:
        """Move on by a token. Return False if the text is not followed any more."""
        after = self._states.after(self._position, token_id)
        if after is None:
            return False
        self._position, self.mask_key = after, after.mask_key
        return True

    def force(self) -> None:
        """Do nothing: all tokens name the mask anyway."""

    def copy(self) -> "TokenPath":
        return TokenPath(self._states, self._position)
