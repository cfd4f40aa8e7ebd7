"""Suffix decoding: a text goes on as texts mostly did that ended like it, its own or the answers of others.

What a suffix tree would tell is how often each token followed the longest ending that occurred before. Here
that is counted when it is asked for, over the latest MAX_PLACES places where the last MIN_MATCH tokens stood.
A tree has a node for every ending of every token, up to its depth: in Python kilobytes a token, and as many
steps to add one. The index has one number.
"""

from array import array
from collections import Counter, deque

import numpy as np

from quire.data.plan import Ints
from quire.sched.proposers.text import TokenText

MIN_MATCH = 3
"""Fewest last tokens that must have stood before."""
MAX_PLACES = 16
"""Latest places that are counted, in each text."""
MAX_TOKENS = 1 << 19
"""Tokens of answers that are kept; the oldest go."""
NUM_PARTS = 4
"""Parts that they go in."""
NUM_SALTS = 8
"""Salts whose answers are kept beside those of requests without one; the one not used for longest goes. Each
holds this part of MAX_TOKENS."""
_END = -1
"""Between two answers."""
_NONE: Ints = np.empty(0, np.int32)


class Suffix:
    """Proposes what mostly followed the longest ending of a request that occurred before."""

    is_sure = False
    """It proposes what is likely enough."""

    def __init__(
        self,
        *,
        max_depth: int,
        max_requests: int,
        spec_factor: float,
        min_prob: float,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self._max_depth = max(max_depth, MIN_MATCH)
        self._factor, self._min_prob = spec_factor, min_prob
        self._texts: dict[int, TokenText] = {}
        self._prompt_lens: dict[int, int] = {}
        self._salts: dict[int, str | None] = {}
        self._answers = _Answers(max_requests, max_tokens)
        self._salted: dict[str, _Answers] = {}
        """Answers by salt, the one used last at the end."""
        self._sizes = max_requests, max_tokens // NUM_SALTS

    def admit(self, row: int, tokens: Ints, salt: str | None = None) -> None:
        self._texts[row] = TokenText(tokens, MIN_MATCH)
        self._prompt_lens[row] = len(tokens)
        self._salts[row] = salt

    def extend(self, row: int, tokens: Ints) -> None:
        self._texts[row].extend(tokens)

    def release(self, row: int, tokens: Ints) -> None:
        if self._texts.pop(row, None) is not None:
            self._answers_of(self._salts.pop(row)).add(tokens[self._prompt_lens.pop(row) :])

    def _answers_of(self, salt: str | None) -> "_Answers":
        """Return the answers that requests of this salt may be guessed from. Guesses out of other answers
        would tell, by their speed, what these were."""
        if salt is None:
            return self._answers
        answers = self._salted.pop(salt, None) or _Answers(*self._sizes)
        self._salted[salt] = answers
        if len(self._salted) > NUM_SALTS:
            del self._salted[next(iter(self._salted))]
        return answers

    def propose(self, row: int, most: int) -> Ints:
        own = self._texts[row]
        if len(own.tokens) < MIN_MATCH or most < 1:
            return _NONE
        ending, end = own.ending, own.tokens[-self._max_depth :]
        best, found = 0.0, None
        for text in (own, *self._answers_of(self._salts[row]).texts):
            score, tokens = self._guess(text, ending, end, most)
            if score > best:
                best, found = score, tokens
            if score == most:
                break
        return _NONE if found is None else np.frombuffer(found, np.int32)

    def _guess(
        self, text: TokenText, ending: int, end: "array[int]", most: int
    ) -> "tuple[float, array[int]]":
        """What this text says, and how much of it is expected to be right."""
        tokens, found = text.tokens, array("i")
        length, places = _longest(tokens, text.places(ending, MAX_PLACES), end)
        most, total = min(most, int(self._factor * length)), len(places)
        numbers = Counter([tokens[place : place + most].tobytes() for place in places])
        ways = [(array("i", way), count) for way, count in numbers.items()]
        score = 0.0
        while len(found) < most and ways:
            if len(ways) == 1 and len(ways[0][0]) == most:
                way, count = ways[0]
                rest = way[len(found) : way.index(_END) if _END in way else most]
                if count < self._min_prob * total:
                    break
                return score + len(rest) * (count / total), found + rest
            at = len(found)
            # Behind its end a text goes on as it is guessed to.
            nexts = [way[at] if at < len(way) else found[at - len(way)] for way, _ in ways]
            counts = dict.fromkeys(nexts, 0)
            for token, (_, count) in zip(nexts, ways, strict=True):
                counts[token] += count
            likely = max(nexts, key=counts.__getitem__)
            if likely == _END or counts[likely] < self._min_prob * total:
                break
            ways = [way for way, token in zip(ways, nexts, strict=True) if token == likely]
            found.append(likely)
            score += counts[likely] / total
        return score, found


def _longest(tokens: "array[int]", places: list[int], end: "array[int]") -> tuple[int, list[int]]:
    """How many of the last tokens stood before any of the places, and before which."""
    length, best, too_long = 0, [], len(end) + 1
    trial = MIN_MATCH
    while length + 1 < too_long and places:
        wanted = end[len(end) - trial :]
        same = [each for each in places if each >= trial and tokens[each - trial : each] == wanted]
        if same:
            length, best, places = trial, same, same
        else:
            too_long = trial
            if not length:
                break
        trial = len(end) if trial == MIN_MATCH else (length + too_long) // 2
    return length, best


class _Answers:
    """The latest answers, in a few texts."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._part_tokens, self._part_requests = (
            max(max_tokens // NUM_PARTS, 1),
            max(max_requests // NUM_PARTS, 1),
        )
        self.texts: deque[TokenText] = deque(maxlen=NUM_PARTS)
        """The newest first."""
        self._num_requests = 0
        """Of the newest."""

    def add(self, tokens: Ints) -> None:
        if not self._max_requests or len(tokens) <= MIN_MATCH:
            return
        tokens = tokens[-self._part_tokens :]
        is_full = not self.texts or self._num_requests >= self._part_requests
        if is_full or len(self.texts[0].tokens) + len(tokens) > self._part_tokens:
            self.texts.appendleft(TokenText(np.full(MIN_MATCH, _END, np.int32), MIN_MATCH))
            self._num_requests = 0
        self._num_requests += 1
        self.texts[0].extend(np.append(tokens, np.int32(_END)))
