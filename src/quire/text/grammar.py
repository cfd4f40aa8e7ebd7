"""Structured output: what a request asks its text to be, as a grammar over the tokens of the model."""

import hashlib
import json
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.data.params import StructuredOutputsParams
from quire.data.plan import Verdict
from quire.errors import RequestError
from quire.logs import get_logger

if TYPE_CHECKING:  # its import would cost every start
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

log = get_logger(__name__)
T = TypeVar("T")

MAX_CHARS = 1 << 18
"""Of a schema, a regex, a grammar."""
MAX_KEPT = 256
"""Grammars that are kept compiled: those that were used last."""
MAX_KEPT_TEXTS, MAX_KEPT_CHARS = 4096, 256
"""Whose tokens are remembered: what grammars force, if it is short; a grammar may force a book."""
MAX_LEXERS = 1024
"""Of all those grammars, tens of KiB each."""
MAX_LEXER_STATES = 50_000
"""Of one lexer, 1 to 2 KiB each."""
MAX_SERVED = 64
"""Sequences that one lexer serves, one after the other: it keeps the states of all."""
LEXERS_S = 0.5
"""That may be spent on compiling the lexers of one grammar. With those that there are by then it makes do."""
WHITESPACE = r"[ \t]{0,2}([\r\n]{1,2}[ \t]{0,40})?"
"""Between the parts of JSON, unless a request says otherwise: small models write newlines without end."""
_IN_STRINGS = r'[^"\\\x00-\x1F\x7F]'
_SHORT = (1, 3, 5, 8, 12)
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_IN_STRINGS}{{1,{most}}}" for most in _SHORT), f"{_IN_STRINGS}+"]
"""Tokens that are looked at together: where all of a slice may come, none of them is tried. Those of a few
characters are for strings that may not be longer than so many (benchmarks/grammar_masks.py)."""
MAX_REASON_CHARS = 500
"""Of an error of the library, as it is told to a client or logged."""
COMPILING_THREADS = 2
FEW = 4
"""Matchers that are moved, and asked for a mask, faster by one thread than by several."""
SHARE = 3 / 8
"""Of the cores, for masks that are filled while a device computes: more threads wake later, and slow down the
one that plans,"""
DEAR_S = 1.5e-3
"""unless filling takes so long, which only more of them help."""

_CLASSES = {r"\d": "[:digit:]", r"\D": "[:^digit:]", r"\w": "[:word:]", r"\W": "[:^word:]"}
_ENDS: dict[str, Verdict] = {
    "NotStopped": "",
    "EndOfSentence": "eos",
    "NoExtension": "complete",
    "NoExtensionBias": "complete",
}
"""What it means when a matcher has stopped for a reason; any other is an error."""
_DOES_NOT_FIT = "doesn't satisfy the grammar"
"""What the library's error says when a token does not fit. Its other errors are about its own limits."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens that a grammar is compiled against."""

    tokens: Sequence[bytes]
    """The bytes of each; of the model or of its tokenizer, whichever has more."""
    special_ids: Sequence[int]
    """Those that are no text."""
    eos_ids: tuple[int, ...]
    encode: Callable[[str], list[int]]

    def open(self) -> "LLTokenizer":
        """In two steps: each holds up all other threads, for about half a second with 150,000 tokens."""
        from llguidance import LLTokenizer, TokenizerWrapper

        opened = LLTokenizer(TokenizerWrapper(_Wrapped(self)), eos_token=list(self.eos_ids), slices=[])
        return opened.with_slices(SLICES)


class _Wrapped:
    """A vocabulary as llguidance wants to see it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.eos_ids[0]
        self._encode = vocabulary.encode
        self._encode_kept = lru_cache(MAX_KEPT_TEXTS)(vocabulary.encode)

    def __call__(self, text: str) -> list[int]:
        """It is asked for texts that a grammar forces: few, and again and again."""
        if isinstance(text, bytes):
            raise TypeError("a tokenizer of strings")
        return self._encode_kept(text) if len(text) <= MAX_KEPT_CHARS else self._encode(text)


class Matcher:
    """Where one sequence stands in its grammar."""

    def __init__(self, inner: "LLMatcher", lexer: "Lexer") -> None:
        self.inner = inner
        self.lexer = lexer
        lexer.users.add(self)

    def advance(self, token_id: int) -> Verdict:
        """The sequence has one more token. Says whether it is over with it, and how."""
        return self.verdict(self.inner.consume_token(token_id))

    def verdict(self, is_taken: bool) -> Verdict:
        """Of its last token, which the grammar has taken or not."""
        if is_taken and not self.inner.is_stopped():
            return ""
        verdict = _ENDS.get(self.inner.stop_reason()) if is_taken else None
        return self._failure() if verdict is None else verdict

    def _failure(self) -> Verdict:
        """Tell a token that does not fit from a limit of the library."""
        self.lexer.is_spent = True
        reason = self.inner.get_error()
        if _DOES_NOT_FIT in reason:
            return "error"
        log.warning("A grammar cannot be followed any further: %r", _shortened(reason))
        return "limit"

    def copy(self) -> "Matcher":
        """One that stands at the same place."""
        return Matcher(self.inner.deep_copy(), self.lexer)


class Lexer:
    """A grammar compiled. Its matchers share the states that it finds on the way, and its lock: those of one
    lexer take turns, those of several fill their masks at the same time."""

    def __init__(self, start: "LLMatcher", seconds: float) -> None:
        self._start = start
        self.seconds = seconds
        """That it took to compile."""
        self._num_served = 0
        self.users: WeakSet[Matcher] = WeakSet()
        self.is_spent = False
        """Whether it may have too many states to serve anybody else."""

    def serve(self) -> Matcher:
        """One more sequence."""
        self._num_served += 1
        self.is_spent |= self._num_served >= MAX_SERVED
        return Matcher(self._start.deep_copy(), self)


class Lexers:
    """Those of one grammar: as many as sequences follow it at once, if they are not too dear."""

    def __init__(self, grammar: str) -> None:
        self.grammar = grammar
        """The text that each of them is compiled from."""
        self._all: list[Lexer] = []

    def __len__(self) -> int:
        return len(self._all)

    def serve(self) -> Matcher | None:
        """The start of the grammar; None if one more is to be compiled for it."""
        self._all = [lexer for lexer in self._all if not lexer.is_spent]
        if not self._all:
            return None
        idlest = min(self._all, key=lambda lexer: len(lexer.users))
        spent_s = sum(lexer.seconds for lexer in self._all)
        return None if idlest.users and spent_s < LEXERS_S else idlest.serve()

    def add(self, lexer: Lexer) -> None:
        self._all.append(lexer)


class Grammars:
    """The grammars of one vocabulary, each compiled once and kept while it is in use."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], num_threads: int | None = None) -> None:
        """The vocabulary is asked for with the first grammar: most engines never see one. `num_threads` are
        those that compute the layers, if they are on the same cores: between steps these fill masks. Else
        other cores do, while a device computes."""
        self._vocabulary = vocabulary
        self._num_threads = num_threads
        self._compiled: OrderedDict[bytes, Lexers] = OrderedDict()
        """By the digest of the params; the grammar used last is last."""
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._is_dear = False
        """Whether the last masks took long."""

    def compile(self, asked: StructuredOutputsParams) -> Matcher:
        """The start of what is asked for. A RequestError if it is no grammar, is one that no text fits, is
        beyond what is known here or beyond the limits. The first opens the vocabulary."""
        key = digest_of(asked)
        with self._lock:
            known = self._known(key)
            matcher = None if known is None else known.serve()
        return self._add(key, asked, known).serve() if matcher is None else matcher

    def check(self, asked: StructuredOutputsParams) -> None:
        """Raise what `compile` would. A grammar that was compiled before costs a lookup."""
        key = digest_of(asked)
        with self._lock:
            known = self._known(key)
        if known is None:
            self._add(key, asked, None)

    def _known(self, key: bytes) -> Lexers | None:
        known = self._compiled.get(key)
        if known is not None:
            self._compiled.move_to_end(key)
        return known

    def _add(self, key: bytes, asked: StructuredOutputsParams, known: Lexers | None) -> Lexer:
        """Compile one more lexer of a grammar, and keep it."""
        grammar = grammar_of(asked) if known is None else known.grammar
        started = time.thread_time()
        compiled = self._compile(grammar)
        lexer = Lexer(compiled, time.thread_time() - started)
        with self._lock:
            self._compiled.setdefault(key, Lexers(grammar)).add(lexer)
            self._compiled.move_to_end(key)
            while len(self._compiled) > MAX_KEPT or self._num_lexers > MAX_LEXERS:
                self._compiled.popitem(last=False)
        return lexer

    @property
    def _num_lexers(self) -> int:
        return sum(map(len, self._compiled.values()))

    def begin(self, asked: StructuredOutputsParams) -> Future[Matcher]:
        """The same in a thread."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(COMPILING_THREADS, thread_name_prefix="quire-grammar")
        return self._threads.submit(self.compile, asked)

    @property
    def is_beside(self) -> bool:
        """Whether masks are filled on other cores than layers are computed on."""
        return self._num_threads is None

    @cached_property
    def num_words(self) -> int:
        """Of a mask."""
        return -(-self.open().vocab_size // 32)

    def fill(self, matchers: Sequence[tuple[Matcher, int]], bits: NDArray[np.uint32]) -> None:
        """A bit for each token, set where it may come next, in the row of `bits` [rows, words] that is said
        beside each matcher. Other threads run meanwhile."""
        from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

        words, into = self.num_words, bits.view(np.int32)
        if len(matchers) < FEW or bits.shape[1] != words:
            for matcher, place in matchers:
                fill_next_token_bitmask(matcher.inner, into[:, :words], place)
        else:
            each = [(matcher.inner, place) for matcher, place in matchers]
            started = time.perf_counter()
            fill_next_token_bitmask_par(self._many if self._is_dear else self._executor, each, into)
            self._is_dear = self.is_beside and time.perf_counter() - started > DEAR_S

    def advance(self, moves: Sequence[tuple[Matcher, int]]) -> list[Verdict]:
        """Each of these sequences has one more token: what `Matcher.advance` says, of many at once."""
        if len(moves) < FEW:
            return [matcher.advance(token_id) for matcher, token_id in moves]
        each = [(matcher.inner, token_id) for matcher, token_id in moves]
        taken = self._executor.consume_token_par(each)
        if all(taken) and not any(inner.is_stopped() for inner, _ in each):
            return [""] * len(moves)
        return [matcher.verdict(is_taken) for (matcher, _), is_taken in zip(moves, taken, strict=True)]

    @cached_property
    def _executor(self) -> "LLExecutor":
        from llguidance import LLExecutor

        return LLExecutor(self._num_threads or max(int((os.cpu_count() or 1) * SHARE), 2))

    @cached_property
    def _many(self) -> "LLExecutor":
        from llguidance import LLExecutor

        return LLExecutor()

    def _compile(self, grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        made = LLMatcher(self.open(), grammar, log_level=0, limits=limits)
        if not made.is_error():
            made.compute_bitmask()  # a language without a text shows here
        if made.is_error():
            raise _refusal(made.get_error())
        return made

    def open(self) -> "LLTokenizer":
        """The vocabulary, which takes a second or so once."""
        with self._opening:
            if self._tokenizer is None:
                try:
                    self._tokenizer = self._vocabulary().open()
                except ValueError as error:
                    raise _refusal(f"the tokenizer of this model cannot follow a grammar: {error}") from error
            return self._tokenizer


def _refusal(reason: str) -> RequestError:
    return RequestError(f"structured_outputs: {_shortened(reason)}", param="structured_outputs")


def _shortened(reason: str) -> str:
    """An error of the library without its state and of limited length."""
    short = re.split("\n<(?:state|non-verbose)", reason, maxsplit=1)[0].strip()
    return short if len(short) <= MAX_REASON_CHARS else short[:MAX_REASON_CHARS] + "..."


# ---- what was asked for, in the words of llguidance


def digest_of(asked: StructuredOutputsParams) -> bytes:
    """A key that is the same for the same params; a RequestError where they are no text."""
    return hashlib.sha256(_checked(asked, partial(_encoded, asked))).digest()


def _encoded(asked: StructuredOutputsParams) -> bytes:
    return msgspec.msgpack.encode(sendable(asked))


def sendable(asked: StructuredOutputsParams) -> StructuredOutputsParams:
    """The same with a schema as text, which may have numbers of any size."""
    if isinstance(asked.json, dict):
        return msgspec.structs.replace(asked, json=json.dumps(asked.json))
    return asked


def grammar_of(asked: StructuredOutputsParams) -> str:
    """The text that llguidance compiles; a RequestError where there cannot be one."""
    name = _name_of(asked)
    grammar = _checked(asked, partial(_BUILDERS[name], getattr(asked, name), asked))
    _checked(asked, grammar.encode)
    if len(grammar) > MAX_CHARS:
        raise _refusal(f".{name} may have at most {MAX_CHARS} characters, it has {len(grammar)}")
    return grammar


def _name_of(asked: StructuredOutputsParams) -> str:
    return next(name for name in _BUILDERS if getattr(asked, name) is not None)


def _checked(asked: StructuredOutputsParams, build: Callable[[], T]) -> T:
    """What `build` returns; a RequestError that names the constraint where it fails."""
    try:
        return build()
    except RecursionError as error:
        raise _refusal(f".{_name_of(asked)} is nested too deeply") from error
    except (ValueError, TypeError, AssertionError, KeyError) as error:
        raise _refusal(f".{_name_of(asked)}: {error}") from error


def _from_schema(schema: Any, asked: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    schema = json.loads(schema) if isinstance(schema, str) else schema
    if not isinstance(schema, dict):
        raise ValueError(f"a JSON schema is an object, not {type(schema).__name__}")
    if asked.disable_additional_properties:
        schema = _closed(schema)
    spaces = None if asked.disable_any_whitespace else WHITESPACE
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema),
        overrides={
            "whitespace_flexible": not asked.disable_any_whitespace,
            "whitespace_pattern": asked.whitespace_pattern or spaces,
            "lenient": False,
        },
    )


def _closed(schema: Any) -> Any:
    """The schema where objects have no properties but those that are named, unless it says otherwise."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _closed(each) for name, each in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type", "object") == "object":
        made.setdefault("additionalProperties", False)
    return made


def _from_regex(regex: str, asked: StructuredOutputsParams) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(plain_classes(regex))


def plain_classes(regex: str) -> str:
    r"""The same with \d and \w of ASCII, as in patterns of schemas; the library's are of all Unicode."""
    found, depth, begins = [], 0, False
    for part in re.findall(r"\\.|\[\^?|.", regex, re.DOTALL):
        named = _CLASSES.get(part)
        found.append(part if named is None else named if depth else f"[{named}]")
        if part[0] == "[":
            depth += 1
        elif part == "]" and depth and not begins:  # the first of a class is a character like others
            depth -= 1
        begins = part[0] == "["
    return "".join(found)


def _from_choice(choice: list[str], asked: StructuredOutputsParams) -> str:
    """One terminal: the parser keeps at most 2,000 alternatives open at once, a lexer any number."""
    from llguidance import LLMatcher

    literals = (
        json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in dict.fromkeys(choice)
    )
    return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(literals))


def _from_grammar(text: str, asked: StructuredOutputsParams) -> str:
    """Lark as it is; EBNF with `::=` is translated."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

    if len(text) > MAX_CHARS:
        raise ValueError(f"at most {MAX_CHARS} characters, it has {len(text)}")
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    except GbnfToLarkError as error:
        raise ValueError(str(error)) from error


def _from_tags(text: str, asked: StructuredOutputsParams) -> str:
    """Free text in which each trigger begins one of the structures."""
    from llguidance import LLMatcher, StructTag

    given = json.loads(text)
    if not isinstance(given, dict) or "structures" not in given:
        raise ValueError("only tags with `structures` and `triggers` are known")
    triggers = sorted(given["triggers"], key=len, reverse=True)
    tags = []
    for each in given["structures"]:
        begin, schema = each["begin"], each["schema"]
        trigger = next((known for known in triggers if begin.startswith(known)), None)
        if trigger is None:
            raise ValueError(f"no trigger begins {begin!r:.80}")
        grammar = json.dumps(schema) if isinstance(schema, dict) else schema
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=grammar, end=each["end"]))
    return LLMatcher.grammar_from_lark(StructTag.to_grammar(tags, assume_special=False))


_BUILDERS: dict[str, Callable[[Any, StructuredOutputsParams], str]] = {
    "json": _from_schema,
    "json_object": lambda _, asked: _from_schema({"type": "object"}, asked),
    "regex": _from_regex,
    "choice": _from_choice,
    "grammar": _from_grammar,
    "structural_tag": _from_tags,
}
