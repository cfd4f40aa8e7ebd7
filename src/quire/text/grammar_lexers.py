"""Compiled grammars of llguidance (lexers), the matchers of sequences that share them, and their cache."""

import re
from collections import OrderedDict
from typing import TYPE_CHECKING
from weakref import WeakSet

from quire.data.step_plan import Verdict
from quire.logs import get_logger
from quire.text.free_text import FreeText, FreeTextPosition
from quire.text.json_states import JsonStates, MaskKey, TextPosition
from quire.text.mask_memory import MaskMemory
from quire.text.token_paths import TokenPath, TokenPaths

if TYPE_CHECKING:  # imported lazily: it would slow down every start
    from llguidance import LLMatcher

log = get_logger(__name__)
Text = TextPosition | FreeTextPosition | TokenPath
TextStates = JsonStates | FreeText | TokenPaths

MAX_GRAMMARS = 256
"""Maximum number of compiled grammars that are kept; the least recently used grammars are dropped."""
MAX_LEXERS = 1024
"""Maximum number of lexers, the compiled copies of a grammar. A lexer takes tens of KiB for most grammars."""
MAX_BYTES = 128 << 20
"""Maximum size in bytes of the lexers of all grammars, by the estimate of `Lexer.num_bytes`. The lexer of a
running request is not freed before the request ends."""
LEXER_BYTES, CHAR_BYTES, TOKEN_BYTES = 128 << 10, 64, 1 << 10
"""Estimated bytes of a lexer: a constant, bytes per character of the grammar, and bytes per token of its
sequences, which may add states. Measured for 15 grammars: 50 KiB to 0.5 MiB; 20 to 140 bytes per character of
a long grammar; 50 bytes (JSON schemas) to 15 KiB (long bounded repetitions) per token."""
MAX_LEXER_STATES = 50_000
"""Maximum number of states of one lexer. A state takes 1 to 2 KiB."""
MAX_SEQUENCES_PER_LEXER = 64
"""Maximum number of sequences of one lexer, since the states of all its sequences stay in memory."""
MAX_COMPILE_S = 0.5
"""Maximum CPU seconds to compile the lexers of one grammar. Beyond that, sequences share lexers."""
MAX_DEFERRED = 64
"""Most tokens by which llguidance's matcher may be behind its sequence."""
MAX_REASON_CHARS = 500
"""Maximum length in characters of an error of llguidance that is logged or sent to a client."""

_ENDS: dict[str, Verdict] = {
    "NotStopped": "",
    "EndOfSentence": "eos",
    "NoExtension": "complete",
    "NoExtensionBias": "complete",
}
"""Verdict on a sequence by the matcher's stop reason (empty: it continues); any other reason is an error."""
_DOES_NOT_FIT = "doesn't satisfy the grammar"
"""Text of llguidance's error for a token that violates the grammar; its other errors are about limits."""


class Matcher:
    """The state of one sequence in its grammar, which determines the tokens that may follow."""

    def __init__(self, inner: "LLMatcher", lexer: "Lexer", text: Text | None) -> None:
        self._inner = inner
        self.lexer = lexer
        self._text = text
        """The position in the text that names the mask; None if masks are not remembered."""
        self._deferred: list[int] = []
        """Tokens by which llguidance's matcher has not been advanced yet."""
        lexer.users.add(self)

    @property
    def mask_key(self) -> MaskKey | None:
        """Return the key of the mask of the next token; None if it is not remembered."""
        return None if self._text is None else self._text.mask_key

    def name_mask(self) -> MaskKey | None:
        """Return the key of the mask that llguidance has computed; None if it is not to be remembered."""
        inner = self.inner
        if self._text is None or inner.is_error() or inner.is_stopped():
            return None
        if inner.compute_ff_bytes():
            self._text.force()
        return self._text.mask_key

    @property
    def inner(self) -> "LLMatcher":
        """Return llguidance's matcher, advanced by all tokens."""
        if self._deferred:
            self.lexer.num_tokens += len(self._deferred)
            self._inner.consume_tokens(self._deferred)
            self._deferred = []
        return self._inner

    def forced_tokens(self, most: int) -> list[int]:
        """Return up to `most` tokens, each the only one that the grammar allows after those before it. Only
        runs of bytes that the grammar forces are found."""
        inner, tokens = self.inner, list[int]()
        if inner.is_error() or inner.is_stopped() or not inner.compute_ff_bytes():
            return tokens
        if self._text is not None:
            self._text.force()
        ahead = inner.deep_copy()
        while len(tokens) < most and (forced := ahead.compute_ff_tokens()):
            tokens.append(forced[0])
            if not ahead.consume_token(forced[0]):
                break
        return tokens

    def defer(self, token_id: int, masks: MaskMemory) -> bool:
        """Move on in the text by the next token. Return True if its mask and that after it are remembered:
        then the sequence does not end here, and llguidance's matcher may follow when it is needed."""
        if self._text is None:
            return False
        is_allowed = masks.allows(self._text.mask_key, token_id)
        self._follow(token_id)
        if not is_allowed or self.mask_key not in masks or len(self._deferred) >= MAX_DEFERRED:
            return False
        self._deferred.append(token_id)
        return True

    def _follow(self, token_id: int) -> None:
        """Move on in the text by the next token."""
        if self._text is not None and not self._text.advance(token_id):
            self._text = None

    def advance(self, token_id: int) -> Verdict:
        """Advance by the next token of the sequence; return whether and how the sequence ends with it."""
        self._follow(token_id)
        inner = self.inner
        self.lexer.num_tokens += 1
        return self.verdict(inner.consume_token(token_id))

    def verdict(self, is_accepted: bool) -> Verdict:
        """Return whether and how the sequence ends after a token, which the grammar has accepted or not."""
        if is_accepted and not self.inner.is_stopped():
            return ""
        verdict = _ENDS.get(self.inner.stop_reason()) if is_accepted else None
        return self._failure() if verdict is None else verdict

    def _failure(self) -> Verdict:
        """Return the verdict on a sequence after an error: `error` if its last token violates the grammar,
        `limit` if a limit of llguidance was exceeded."""
        self.lexer.is_spent = True
        reason = self.inner.get_error()
        if _DOES_NOT_FIT in reason:
            return "error"
        log.warning("A request ends, since its grammar exceeded a limit of llguidance: %r", shorten(reason))
        return "limit"

    def copy(self) -> "Matcher":
        text = None if self._text is None else self._text.copy()
        return Matcher(self.inner.deep_copy(), self.lexer, text)


class Lexer:
    """A compiled grammar of llguidance. Its matchers share its lexer states and its lock: matchers of one
    lexer run one at a time, and matchers of different lexers run in parallel."""

    def __init__(
        self, start: "LLMatcher", seconds: float, num_chars: int, states: TextStates | None = None
    ) -> None:
        self._start = start
        self.states = states
        """Positions in texts of the grammar, which all lexers of the grammar share; None: it has none."""
        self.seconds = seconds
        """CPU seconds of the compilation."""
        self._num_chars = num_chars
        """Length of the grammar's source text."""
        self.num_tokens = 0
        """Number of tokens that all sequences of the lexer have consumed."""
        self._num_sequences = 0
        self.users: WeakSet[Matcher] = WeakSet()
        self.is_spent = False
        """Whether the lexer may have too many states to be used for further sequences."""

    @property
    def num_bytes(self) -> int:
        """Estimate the bytes of this lexer, which llguidance does not report."""
        num_states = min(self.num_tokens, MAX_LEXER_STATES)
        return LEXER_BYTES + CHAR_BYTES * self._num_chars + TOKEN_BYTES * num_states

    def new_matcher(self) -> Matcher:
        """Return a matcher for one more sequence."""
        self._num_sequences += 1
        self.is_spent |= self._num_sequences >= MAX_SEQUENCES_PER_LEXER
        text = self.states.start() if self.states is not None and self.states.is_useful else None
        return Matcher(self._start.deep_copy(), self, text)


class Lexers:
    """The lexers of one grammar: one per concurrent sequence, unless they take too long to compile."""

    def __init__(self, grammar: str) -> None:
        self.grammar = grammar
        """Source text of the grammar that the lexers are compiled from."""
        self.states: TextStates | None = None
        """Positions in texts of the grammar, which its lexers share."""
        self._all: list[Lexer] = []

    def __len__(self) -> int:
        return len(self._all)

    def new_matcher(self) -> Matcher | None:
        """Return a matcher for a new sequence, or None if another lexer should be compiled for it."""
        self._all = [lexer for lexer in self._all if not lexer.is_spent]
        if not self._all:
            return None
        least_used = min(self._all, key=lambda lexer: len(lexer.users))
        compile_s = sum(lexer.seconds for lexer in self._all)
        return None if least_used.users and compile_s < MAX_COMPILE_S else least_used.new_matcher()

    def add(self, lexer: Lexer) -> None:
        self.states = lexer.states
        self._all.append(lexer)

    def drop(self) -> None:
        """Drop the oldest lexer from the cache; sequences that use the lexer keep it."""
        del self._all[0]

    @property
    def num_bytes(self) -> int:
        num_bytes = 0 if self.states is None else self.states.num_bytes
        return num_bytes + sum(lexer.num_bytes for lexer in self._all)


class LexerCache:
    """A cache of compiled grammars by the digest of their constraint, limited in number and bytes, with the
    least recently used evicted first. It is not thread-safe: callers need a lock."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._lexers: OrderedDict[bytes, Lexers] = OrderedDict()

    def __len__(self) -> int:
        return len(self._lexers)

    def get(self, key: bytes) -> Lexers | None:
        lexers = self._lexers.get(key)
        if lexers is not None:
            self._lexers.move_to_end(key)
        return lexers

    def add(self, key: bytes, grammar: str, lexer: Lexer) -> None:
        self._lexers.setdefault(key, Lexers(grammar)).add(lexer)
        self._lexers.move_to_end(key)
        self._evict()

    def _evict(self) -> None:
        """Drop the least recently used lexers above the limits."""
        num_lexers = sum(map(len, self._lexers.values()))
        num_bytes = self.num_bytes
        while len(self._lexers) > MAX_GRAMMARS or num_lexers > MAX_LEXERS or num_bytes > self.max_bytes:
            key, oldest = next(iter(self._lexers.items()))
            num_bytes -= oldest.num_bytes
            num_lexers -= len(oldest)
            if len(self._lexers) > 1:
                del self._lexers[key]
            elif len(oldest) > 1:
                oldest.drop()
                num_bytes += oldest.num_bytes
                num_lexers += len(oldest)
            else:
                return

    @property
    def num_bytes(self) -> int:
        """Return the estimated bytes of all lexers that are kept."""
        return sum(lexers.num_bytes for lexers in self._lexers.values())


def shorten(reason: str) -> str:
    """Return the text of an error of llguidance without the parser state, limited in length."""
    short = re.split("\n<(?:state|non-verbose)", reason, maxsplit=1)[0].strip()
    return short if len(short) <= MAX_REASON_CHARS else short[:MAX_REASON_CHARS] + "..."
