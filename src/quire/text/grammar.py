"""Structured output: compiles the constraint of a request to a grammar over the model's tokens."""

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.data.params import StructuredOutputsParams
from quire.data.step_plan import Verdict
from quire.errors import RequestError
from quire.text.free_text import FreeText
from quire.text.grammar_lexers import (
    MAX_BYTES,
    MAX_LEXER_STATES,
    Lexer,
    LexerCache,
    Lexers,
    Matcher,
    TextStates,
    shorten,
)
from quire.text.json_states import JsonStates, MaskKey, TokenSpellings
from quire.text.mask_memory import MaskMemory
from quire.text.parsers.call_grammar import free_text_marks
from quire.text.token_paths import TokenPaths

if TYPE_CHECKING:  # imported lazily: it would slow down every start
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

T = TypeVar("T")

MAX_CHARS = 1 << 18
"""Maximum size of a schema, regex or grammar in characters."""
MAX_CACHED_TEXTS, MAX_CACHED_CHARS = 4096, 256
"""Number of tokenized texts that are cached, and the length in characters of the longest cached text.
Grammars often force the same short texts."""
WHITESPACE = r"[ \t]{0,2}([\r\n]{1,2}[ \t]{0,40})?"
"""Regex of whitespace between JSON tokens, unless a request sets its own. Its length is limited, since small
models write endless newlines."""
_IN_STRINGS = r'[^"\\\x00-\x1F\x7F]'
_SHORT = (1, 3, 5, 8, 12)
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_IN_STRINGS}{{1,{n}}}" for n in _SHORT), f"{_IN_STRINGS}+"]
"""Subsets of the vocabulary, as regexes, that llguidance tests as a whole: if all tokens of a slice are
allowed, they are not tested one by one. Short slices are for strings of limited length
(benchmarks/grammar_masks.py)."""
COMPILING_THREADS = 2
MAX_FORCED = 16
"""Most tokens of one row that are looked up as forced by its grammar."""
MAX_FORCED_RUNS = 1 << 14
"""Most positions in texts for which the forced tokens are remembered."""
MIN_PARALLEL = 4
"""Minimum number of matchers for which several threads are faster than one."""
CORE_SHARE = 3 / 8
"""Share of the CPU cores that fill token masks while a device computes. More threads would start late and
delay the scheduler."""
SLOW_FILL_S = 1.5e-3
"""Seconds to fill the masks of a step, above which all CPU cores fill the masks of the next step."""

_CLASSES = {r"\d": "[:digit:]", r"\D": "[:^digit:]", r"\w": "[:word:]", r"\W": "[:^word:]"}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The model's tokens, against which grammars are compiled."""

    tokens: Sequence[bytes]
    """Bytes of each token, for the larger of the model's and the tokenizer's vocabulary."""
    special_ids: Sequence[int]
    """Ids of special tokens."""
    eos_ids: tuple[int, ...]
    encode: Callable[[str], list[int]]
    slices: Sequence[str] | None = None
    """Subsets of the vocabulary as regexes; None: SLICES. Without any, it opens in less time."""

    def open(self) -> "LLTokenizer":
        """Build the tokenizer of llguidance. This takes two steps, since each step holds the GIL for about
        0.5 s per 150,000 tokens."""
        from llguidance import LLTokenizer, TokenizerWrapper

        tokenizer = LLTokenizer(
            TokenizerWrapper(_WrappedVocabulary(self)), eos_token=list(self.eos_ids), slices=[]
        )
        slices = SLICES if self.slices is None else list(self.slices)
        return tokenizer.with_slices(slices) if slices else tokenizer


class _WrappedVocabulary:
    """A vocabulary with the interface that llguidance expects."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.eos_ids[0]
        self._encode = vocabulary.encode
        self._encode_cached = lru_cache(MAX_CACHED_TEXTS)(vocabulary.encode)

    def __call__(self, text: str) -> list[int]:
        """Tokenize a text that a grammar forces. Such texts are few and repeated: short ones are cached."""
        if isinstance(text, bytes):
            raise TypeError("this tokenizer takes strings, not bytes")
        return self._encode_cached(text) if len(text) <= MAX_CACHED_CHARS else self._encode(text)


class Grammars:
    """Compiles grammars over one vocabulary, and caches them."""

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        num_threads: int | None = None,
        switches: Collection[str] = (),
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """Create an empty cache.

        `vocabulary` is called for the first grammar, since most engines never need it. `num_threads` is the
        number of threads that fill masks on the compute cores between steps; None if masks are filled on
        other cores while a device computes. `switches` are the fields of StructuredOutputsParams that are on
        for all requests. At most `max_bytes` of compiled grammars are cached."""
        self._vocabulary = vocabulary
        self._switches = dict.fromkeys(switches, True)
        self._num_threads = num_threads
        self._compiled = LexerCache(max_bytes)
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._tokens = TokenSpellings((), ())
        self._forced: dict[MaskKey, list[int]] = {}
        """Forced tokens by the position in the text after which they follow."""
        self._is_slow = False
        """Whether the masks of the last step took long to fill (SLOW_FILL_S)."""

    def compile(self, params: StructuredOutputsParams) -> Matcher:
        """Return a matcher for a new sequence. Raise a RequestError if the constraint is invalid, matches no
        text, is not supported or exceeds a limit. The first call takes about a second longer."""
        key = digest_of(params)
        with self._lock:
            lexers = self._compiled.get(key)
            matcher = None if lexers is None else lexers.new_matcher()
        return self._add(key, params, lexers).new_matcher() if matcher is None else matcher

    def check(self, params: StructuredOutputsParams) -> None:
        """Raise a RequestError if `compile` would. For a cached grammar, this only takes a lookup."""
        key = digest_of(params)
        with self._lock:
            lexers = self._compiled.get(key)
        if lexers is None:
            self._add(key, params, None)

    def _add(self, key: bytes, params: StructuredOutputsParams, lexers: Lexers | None) -> Lexer:
        """Compile one more copy (lexer) of a grammar and cache it by the grammar's digest `key`. `lexers` are
        the cached copies of the same grammar, or None."""
        params = msgspec.structs.replace(params, **self._switches)
        grammar = grammar_of(params) if lexers is None else lexers.grammar
        started = time.thread_time()
        compiled = self._compile(grammar)
        seconds = time.thread_time() - started
        states = _states_of(params, self._tokens) if lexers is None else lexers.states
        lexer = Lexer(compiled, seconds, len(grammar), states)
        with self._lock:
            self._compiled.add(key, grammar, lexer)
        return lexer

    def begin(self, params: StructuredOutputsParams) -> Future[Matcher]:
        """Run `compile` in a thread, and return its future."""
        return self._threads.submit(self.compile, params)

    def prepare(self) -> "Future[LLTokenizer]":
        """Open the vocabulary in a thread, so that the first grammar does not have to."""
        return self._threads.submit(self.open)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(COMPILING_THREADS, thread_name_prefix="quire-grammar")

    @property
    def fills_in_thread(self) -> bool:
        """Whether masks may be filled in a thread while a device computes."""
        return self._num_threads is None

    @cached_property
    def num_words(self) -> int:
        """Number of 32-bit words of a token mask, which has a bit per token."""
        return -(-self.open().vocab_size // 32)

    @cached_property
    def _masks(self) -> MaskMemory:
        return MaskMemory(self.num_words)

    def fill_remembered(
        self, matchers: Sequence[tuple[Matcher, int]], bits: NDArray[np.uint32]
    ) -> list[tuple[Matcher, int]]:
        """Fill the rows of `bits` whose masks are remembered. Return the matchers of the other rows."""
        if bits.shape[1] != self.num_words:
            return list(matchers)
        keys, rows = [matcher.mask_key for matcher, _ in matchers], [row for _, row in matchers]
        return [matchers[index] for index in self._masks.copy(keys, rows, bits)]

    def fill(self, matchers: Sequence[tuple[Matcher, int]], bits: NDArray[np.uint32]) -> None:
        """Fill rows of the token masks `bits`, [rows, words]: a bit is set if its token is allowed next.
        `matchers` are pairs of a matcher and its row. The GIL is released meanwhile."""
        if bits.shape[1] != self.num_words:
            self._compute(matchers, bits)
            return
        by_key: dict[object, list[tuple[Matcher, int]]] = {}
        for matcher, row in matchers:
            key = matcher.mask_key
            by_key.setdefault((None, row) if key is None else key, []).append((matcher, row))
        self._compute([same[0] for same in by_key.values()], bits)
        for shared, ((matcher, row), *others) in by_key.items():
            if self._keep(matcher, bits[row]) == shared:
                bits[[other for _, other in others]] = bits[row]
                continue
            # The masks of others differ by their last tokens, or as they are within llguidance's limits.
            self._compute(others, bits)
            for other, row in others:
                self._keep(other, bits[row])

    def _keep(self, matcher: Matcher, mask: NDArray[np.uint32]) -> MaskKey | None:
        """Remember the mask that was computed for a matcher. Return its key, or None."""
        key = None if matcher.mask_key is None else matcher.name_mask()
        if key is not None:
            self._masks.keep(key, mask)
        return key

    def _compute(self, matchers: Sequence[tuple[Matcher, int]], bits: NDArray[np.uint32]) -> None:
        """Fill masks by llguidance."""
        from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

        words, target = self.num_words, bits.view(np.int32)
        if len(matchers) < MIN_PARALLEL or bits.shape[1] != words:
            for matcher, row in matchers:
                fill_next_token_bitmask(matcher.inner, target[:, :words], row)
        else:
            rows = [(matcher.inner, row) for matcher, row in matchers]
            started = time.perf_counter()
            fill_next_token_bitmask_par(self._all_cores if self._is_slow else self._executor, rows, target)
            self._is_slow = self.fills_in_thread and time.perf_counter() - started > SLOW_FILL_S

    def forced_tokens(self, matcher: Matcher) -> list[int]:
        """Return the tokens that the grammar forces after a sequence: each is the only one that is allowed
        after those before it. Empty: the next token is not forced."""
        key = matcher.mask_key
        tokens = None if key is None else self._forced.get(key)
        if tokens is None:
            tokens = matcher.forced_tokens(MAX_FORCED)
            if (key := matcher.mask_key) is not None:
                # Positions with the same key are the same up to the length of the longest token.
                lengths = (len(spelled[0]) if (spelled := self._tokens[id]) else 0 for id in tokens)
                within = [length <= self._tokens.max_bytes for length in accumulate(lengths)]
                tokens = tokens[: sum(within)]
                if len(self._forced) >= MAX_FORCED_RUNS:
                    self._forced.clear()
                self._forced[key] = tokens
        return tokens

    def advance(self, steps: Sequence[tuple[Matcher, int]]) -> list[Verdict]:
        """Advance matchers, each by its next token, and return the verdicts, as `Matcher.advance` does."""
        if len(steps) < MIN_PARALLEL:
            return [matcher.advance(token_id) for matcher, token_id in steps]
        verdicts: list[Verdict] = [""] * len(steps)
        at = [
            index
            for index, (matcher, token_id) in enumerate(steps)
            if not matcher.defer(token_id, self._masks)
        ]
        if not at:
            return verdicts
        moves = [(steps[index][0].inner, steps[index][1]) for index in at]
        for index in at:
            steps[index][0].lexer.num_tokens += 1
        accepted = self._executor.consume_token_par(moves)
        if all(accepted) and not any(inner.is_stopped() for inner, _ in moves):
            return verdicts
        for index, is_accepted in zip(at, accepted, strict=True):
            verdicts[index] = steps[index][0].verdict(is_accepted)
        return verdicts

    @cached_property
    def _executor(self) -> "LLExecutor":
        from llguidance import LLExecutor

        return LLExecutor(self._num_threads or max(int((os.cpu_count() or 1) * CORE_SHARE), 2))

    @cached_property
    def _all_cores(self) -> "LLExecutor":
        from llguidance import LLExecutor

        return LLExecutor()

    def _compile(self, grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(self.open(), grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # fails if no text matches the grammar
        if matcher.is_error():
            raise _refusal(matcher.get_error())
        return matcher

    def open(self) -> "LLTokenizer":
        """Return llguidance's tokenizer of the vocabulary. The first call takes about a second."""
        with self._opening:
            if self._tokenizer is None:
                try:
                    vocabulary = self._vocabulary()
                    self._tokens = TokenSpellings(vocabulary.tokens, vocabulary.special_ids)
                    self._tokenizer = vocabulary.open()
                except ValueError as error:
                    raise _refusal(
                        f"the tokenizer of this model does not support structured output: {error}"
                    ) from error
            return self._tokenizer


def _refusal(reason: str) -> RequestError:
    return RequestError(f"structured_outputs: {shorten(reason)}", param="structured_outputs")


# ---- conversion of the params to grammars of llguidance


def digest_of(params: StructuredOutputsParams) -> bytes:
    """Return a digest of the params. Raise a RequestError if their texts are not valid Unicode."""
    encoded = _with_request_errors(params, lambda: msgspec.msgpack.encode(with_json_text(params)))
    return hashlib.sha256(encoded).digest()


def with_json_text(params: StructuredOutputsParams) -> StructuredOutputsParams:
    """Return the params with the schema as JSON text, since msgpack cannot encode integers of any size."""
    if isinstance(params.json, dict):
        return msgspec.structs.replace(params, json=json.dumps(params.json))
    return params


def grammar_of(params: StructuredOutputsParams) -> str:
    """Return the grammar text for llguidance, or raise a RequestError."""
    name = _name_of(params)
    grammar = _with_request_errors(params, partial(_BUILDERS[name], getattr(params, name), params))
    _with_request_errors(params, grammar.encode)
    if len(grammar) > MAX_CHARS:
        raise _refusal(f".{name} may have at most {MAX_CHARS} characters as a grammar, not {len(grammar)}")
    return grammar


def _name_of(params: StructuredOutputsParams) -> str:
    return next(name for name in _BUILDERS if getattr(params, name) is not None)


def _with_request_errors(params: StructuredOutputsParams, build: Callable[[], T]) -> T:
    """Return the result of `build`; its errors become a RequestError that names the constraint."""
    try:
        return build()
    except RecursionError as error:
        raise _refusal(f".{_name_of(params)} is nested too deeply") from error
    except (ValueError, TypeError, AssertionError, KeyError) as error:
        raise _refusal(f".{_name_of(params)}: {error}") from error


def _from_schema(schema: Any, params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    schema = json.loads(schema) if isinstance(schema, str) else schema
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON schema is an object, not {type(schema).__name__}")
    if params.disable_additional_properties:
        schema = _close_objects(schema)
    spaces = None if params.disable_any_whitespace else WHITESPACE
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema),
        overrides={
            "whitespace_flexible": not params.disable_any_whitespace,
            "whitespace_pattern": params.whitespace_pattern or spaces,
            "lenient": False,
        },
    )


def _states_of(params: StructuredOutputsParams, tokens: TokenSpellings) -> TextStates:
    """Return the positions in texts of the params."""
    if params.structural_tag is not None:
        return FreeText(json.loads(params.structural_tag)["triggers"], tokens)
    if params.grammar is not None and (marks := free_text_marks(params.grammar)) is not None:
        return FreeText(marks.triggers, tokens, marks.not_first)
    if params.json_object:
        return JsonStates({"type": "object"}, tokens)
    if params.json is None or (params.whitespace_pattern or "").strip(" "):
        return TokenPaths()
    schema = json.loads(params.json) if isinstance(params.json, str) else params.json
    if "x-guidance" in schema:
        return TokenPaths()
    schema = _close_objects(schema) if params.disable_additional_properties else schema
    try:
        return JsonStates(schema, tokens)
    except RecursionError:
        return TokenPaths()


def _close_objects(schema: Any) -> Any:
    """Return the schema with `additionalProperties: false` for objects that do not set it."""
    if isinstance(schema, list):
        return [_close_objects(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _close_objects(value) for name, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type", "object") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


def _from_regex(regex: str, params: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(plain_classes(regex))


def plain_classes(regex: str) -> str:
    r"""Return the regex with \d and \w restricted to ASCII, as in JSON schema patterns. In llguidance, \d and
    \w match all Unicode digits and letters."""
    parts, depth, at_class_start = [], 0, False
    for part in re.findall(r"\\.|\[\^?|.", regex, re.DOTALL):
        named = _CLASSES.get(part)
        parts.append(part if named is None else named if depth else f"[{named}]")
        if part[0] == "[":
            depth += 1
        elif part == "]" and depth and not at_class_start:  # a leading ] is a literal
            depth -= 1
        at_class_start = part[0] == "["
    return "".join(parts)


def _from_choice(choice: list[str], params: StructuredOutputsParams) -> str:
    """Return a grammar that matches one of the texts. They are alternatives of one terminal, since
    llguidance's parser allows at most 2,000 alternatives, and its lexer any number."""
    from llguidance import LLMatcher

    literals = (
        json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in dict.fromkeys(choice)
    )
    return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(literals))


def _from_grammar(text: str, params: StructuredOutputsParams) -> str:
    """Return the grammar of a Lark text, or of EBNF with `::=`, which is translated to Lark."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if len(text) > MAX_CHARS:
        raise ValueError(f"it may have at most {MAX_CHARS} characters, not {len(text)}")
    try:
        lark = any_to_lark(text)
    except RecursionError:
        raise
    except Exception as error:  # the library raises nothing narrower for a rule that is missing
        raise ValueError(str(error)) from error
    return LLMatcher.grammar_from_lark(lark)


def _from_tags(text: str, params: StructuredOutputsParams) -> str:
    """Return the grammar of a structural tag: free text in which triggers begin the structures."""
    from llguidance import LLMatcher, StructTag

    spec = json.loads(text)
    if not isinstance(spec, dict) or "structures" not in spec:
        raise ValueError("only tags with `structures` and `triggers` are supported")
    triggers = sorted(spec["triggers"], key=len, reverse=True)
    tags = []
    for structure in spec["structures"]:
        begin, schema = structure["begin"], structure["schema"]
        trigger = next((prefix for prefix in triggers if begin.startswith(prefix)), None)
        if trigger is None:
            raise ValueError(f"no trigger begins {begin!r:.80}")
        grammar = json.dumps(schema) if isinstance(schema, dict) else schema
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=grammar, end=structure["end"]))
    return LLMatcher.grammar_from_lark(StructTag.to_grammar(tags, assume_special=False))


_BUILDERS: dict[str, Callable[[Any, StructuredOutputsParams], str]] = {
    "json": _from_schema,
    "json_object": lambda _, params: _from_schema({"type": "object"}, params),
    "regex": _from_regex,
    "choice": _from_choice,
    "grammar": _from_grammar,
    "structural_tag": _from_tags,
}
