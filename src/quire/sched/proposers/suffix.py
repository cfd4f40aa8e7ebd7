"""Suffix decoding: proposes the tokens that mostly followed the current suffix in this or in earlier outputs.

A suffix tree would store how often each token followed each suffix. Here that is counted on demand, over the
latest MAX_PLACES occurrences of the last MIN_MATCH tokens. A tree has a node for every suffix of every token,
up to its depth. In Python that takes kilobytes and as many operations per token; the index takes one
number."""

from array import array
from collections import Counter, deque

import numpy as np

from quire.data.step_plan import Ints
from quire.sched.proposers.text import TokenText

MIN_MATCH = 3
"""Minimum length, in tokens, of a suffix that must have occurred before."""
MAX_PLACES = 16
"""Number of latest occurrences that are counted in each text."""
MAX_TOKENS = 1 << 19
"""Tokens of earlier outputs that are kept; the oldest are dropped."""
NUM_PARTS = 4
"""Number of parts in which earlier outputs are stored and dropped."""
NUM_SALTS = 8
"""Number of salts with their own store beside that of requests without one; the least recently used is
dropped. Each holds this fraction of MAX_TOKENS."""
_END = -1
"""Token id that separates outputs."""
_NONE: Ints = np.empty(0, np.int32)


class Suffix:
    """Proposes the tokens that mostly followed earlier occurrences of the longest known suffix of a
    request."""

    is_sure = False
    """Always False: drafts are filtered by probability already."""

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
        self._outputs = _Outputs(max_requests, max_tokens)
        self._salted: dict[str, _Outputs] = {}
        """Outputs by salt, the most recently used last."""
        self._sizes = max_requests, max_tokens // NUM_SALTS

    def admit(self, row: int, tokens: Ints, salt: str | None = None) -> None:
        self._texts[row] = TokenText(tokens, MIN_MATCH)
        self._prompt_lens[row] = len(tokens)
        self._salts[row] = salt

    def extend(self, row: int, tokens: Ints) -> None:
        self._texts[row].extend(tokens)

    def release(self, row: int, tokens: Ints) -> None:
        if self._texts.pop(row, None) is not None:
            self._outputs_of(self._salts.pop(row)).add(tokens[self._prompt_lens.pop(row) :])

    def _outputs_of(self, salt: str | None) -> "_Outputs":
        """Return the outputs from which drafts for this salt may be taken. Drafts from other outputs would
        reveal their content by timing."""
        if salt is None:
            return self._outputs
        outputs = self._salted.pop(salt, None) or _Outputs(*self._sizes)
        self._salted[salt] = outputs
        if len(self._salted) > NUM_SALTS:
            del self._salted[next(iter(self._salted))]
        return outputs

    def propose(self, row: int, max_drafts: int) -> Ints:
        row_text = self._texts[row]
        if len(row_text.tokens) < MIN_MATCH or max_drafts < 1:
            return _NONE
        ending, end = row_text.ending, row_text.tokens[-self._max_depth :]
        best, draft = 0.0, None
        for text in (row_text, *self._outputs_of(self._salts[row]).texts):
            score, tokens = self._propose_from(text, ending, end, max_drafts)
            if score > best:
                best, draft = score, tokens
            if score == max_drafts:
                break
        return _NONE if draft is None else np.frombuffer(draft, np.int32)

    def _propose_from(
        self, text: TokenText, ending: int, end: "array[int]", max_drafts: int
    ) -> "tuple[float, array[int]]":
        """Return the expected number of accepted tokens of the draft that a text proposes, and the draft.
        `end` has the last tokens of the request, and `ending` is the hash of the last MIN_MATCH of them."""
        tokens, draft = text.tokens, array("i")
        length, places = _longest(tokens, text.places(ending, MAX_PLACES), end)
        max_drafts, total = min(max_drafts, int(self._factor * length)), len(places)
        num_runs = Counter([tokens[place : place + max_drafts].tobytes() for place in places])
        runs = [(array("i", run), count) for run, count in num_runs.items()]
        score = 0.0
        while len(draft) < max_drafts and runs:
            if len(runs) == 1 and len(runs[0][0]) == max_drafts:
                run, count = runs[0]
                rest = run[len(draft) : run.index(_END) if _END in run else max_drafts]
                if count < self._min_prob * total:
                    break
                return score + len(rest) * (count / total), draft + rest
            at = len(draft)
            # Beyond its end a text is continued with the draft itself.
            nexts = [run[at] if at < len(run) else draft[at - len(run)] for run, _ in runs]
            counts = dict.fromkeys(nexts, 0)
            for token, (_, count) in zip(nexts, runs, strict=True):
                counts[token] += count
            likely = max(nexts, key=counts.__getitem__)
            if likely == _END or counts[likely] < self._min_prob * total:
                break
            runs = [run for run, token in zip(runs, nexts, strict=True) if token == likely]
            draft.append(likely)
            score += counts[likely] / total
        return score, draft


def _longest(tokens: "array[int]", places: list[int], end: "array[int]") -> tuple[int, list[int]]:
    """Return the length of the longest suffix of `end` that stands in `tokens` right before some of `places`
    (indices in `tokens`), and the places with this suffix; 0 and no places if none matches."""
    length, best, too_long = 0, [], len(end) + 1
    length_tried = MIN_MATCH
    while length + 1 < too_long and places:
        suffix = end[len(end) - length_tried :]
        matches = [
            place
            for place in places
            if place >= length_tried and tokens[place - length_tried : place] == suffix
        ]
        if matches:
            length, best, places = length_tried, matches, matches
        else:
            too_long = length_tried
            if not length:
                break
        length_tried = len(end) if length_tried == MIN_MATCH else (length + too_long) // 2
    return length, best


class _Outputs:
    """The latest outputs of requests with the same salt, joined to a few token sequences."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._part_tokens, self._part_requests = (
            max(max_tokens // NUM_PARTS, 1),
            max(max_requests // NUM_PARTS, 1),
        )
        self.texts: deque[TokenText] = deque(maxlen=NUM_PARTS)
        """Texts of several outputs each, the newest first."""
        self._num_requests = 0
        """Number of requests in the newest text."""

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
