"""Tests of grammars over a small vocabulary, without a model."""

import gc
from dataclasses import replace

import numpy as np
import pytest
from tiny_text import _train_tokenizer

from quire.data.params import StructuredOutputsParams
from quire.text import grammar, grammar_lexers
from quire.text.grammar import Grammars, Vocabulary
from quire.text.grammar_lexers import Matcher

WORDS = StructuredOutputsParams(regex="([a-z]{2,9} ){400}")


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    known = _train_tokenizer()
    tokens = [known.decode([id]).encode() for id in range(known.get_vocab_size())]
    return Vocabulary(tokens, [0, 1, 2], (2,), lambda text: known.encode(text).ids)


@pytest.fixture
def grammars(vocabulary: Vocabulary) -> Grammars:
    return Grammars(lambda: vocabulary)


def allowed(grammars: Grammars, *matchers: Matcher) -> list[list[int]]:
    bits = np.zeros((len(matchers), grammars.num_words), np.uint32)
    grammars.fill([(matcher, index) for index, matcher in enumerate(matchers)], bits)
    return [np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist() for row in bits]


def write(grammars: Grammars, matcher: Matcher, num_tokens: int) -> str:
    """Advance a matcher by allowed tokens, always that with the highest id; return the first verdict that
    ends it."""
    verdict = ""
    for _ in range(num_tokens):
        (ids,) = allowed(grammars, matcher)
        verdict = verdict or matcher.advance(ids[-1])
    return verdict


def test_concurrent_sequences_do_not_wait_for_each_other(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each running sequence has a lexer of its own, which later sequences reuse."""
    monkeypatch.setattr(grammar_lexers, "MAX_COMPILE_S", 1e9)
    several = [grammars.compile(WORDS) for _ in range(5)]
    lexers = [matcher.lexer for matcher in several]
    assert len(set(lexers)) == 5
    assert len({tuple(ids) for ids in allowed(grammars, *several)}) == 1
    assert several[3].copy().lexer is lexers[3]
    del several[3]
    gc.collect()
    assert grammars.compile(WORDS).lexer is lexers[3]


def test_expensive_grammar_is_compiled_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_lexers, "MAX_COMPILE_S", 0.0)
    several = [grammars.compile(WORDS) for _ in range(5)]
    assert len({matcher.lexer for matcher in several}) == 1
    write(grammars, several[0], 9)
    assert len({tuple(ids) for ids in allowed(grammars, *several[1:])}) == 1, (
        "their state changed with the first"
    )


def test_full_lexer_is_not_shared(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lexer with too many states would end all sequences that share it with an error."""
    monkeypatch.setattr(grammar, "MAX_LEXER_STATES", 100)
    first = grammars.compile(WORDS)
    assert write(grammars, first, 100) == "limit"
    del first
    assert write(grammars, grammars.compile(WORDS), 5) == ""


def test_lexer_is_renewed_before_it_is_full(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_lexers, "MAX_SEQUENCES_PER_LEXER", 3)
    lexers = [grammars.compile(WORDS).lexer for _ in range(4)]
    assert lexers[0] is lexers[1] is lexers[2] is not lexers[3]


def test_lexers_are_limited_in_bytes(grammars: Grammars) -> None:
    """Lexers of long grammars, or with many states, take megabytes each: 1,024 of them would take
    gigabytes."""
    texts = ["x" * 10_000 + str(number) for number in range(3)]
    choices = [StructuredOutputsParams(choice=[text]) for text in texts]
    sizes = [grammars.compile(params).lexer.num_bytes for params in choices]
    assert min(sizes) > 10_000 * grammar_lexers.CHAR_BYTES
    num_bytes_of_texts = sum(grammars.compile(params).lexer.states.num_bytes for params in choices)
    assert grammars._compiled.num_bytes == sum(sizes) + num_bytes_of_texts
    grammars._compiled.max_bytes = sum(sizes) - 1
    kept = grammars.compile(choices[0]).lexer  # now the second one is the oldest
    grammars.compile(WORDS)
    assert len(grammars._compiled) == 3 and grammars._compiled.num_bytes < sum(sizes)
    assert grammars.compile(choices[0]).lexer is kept


def test_states_of_lexers_count(grammars: Grammars) -> None:
    """One short grammar may gain 15 KiB of states with each token."""
    grammars._compiled.max_bytes = 2 * grammar_lexers.LEXER_BYTES
    first = grammars.compile(WORDS)
    before = first.lexer.num_bytes
    write(grammars, first, 50)
    assert first.lexer.num_bytes == before + 50 * grammar_lexers.TOKEN_BYTES
    several = [grammars.compile(WORDS) for _ in range(4)]
    assert grammars._compiled.num_bytes <= grammars._compiled.max_bytes
    assert write(grammars, first, 5) == "" and write(grammars, several[0], 5) == "", "a dropped lexer works"


def test_long_forced_texts_are_not_cached(vocabulary: Vocabulary) -> None:
    """Thousands of tokenized long texts would take gigabytes."""
    lengths: list[int] = []

    def encode(text: str) -> list[int]:
        lengths.append(len(text))
        return vocabulary.encode(text)

    wrapped = grammar._WrappedVocabulary(replace(vocabulary, encode=encode))
    for text in ("short", "long" * grammar.MAX_CACHED_CHARS) * 2:
        assert wrapped(text) == vocabulary.encode(text)
    assert lengths == [5, 4 * grammar.MAX_CACHED_CHARS, 4 * grammar.MAX_CACHED_CHARS]


BYTES = Vocabulary(
    [*(bytes([number]) for number in range(256)), b""], [256], (256,), lambda text: [*text.encode()]
)
FITS = [
    (r"\d\w", "5a", "5_", "59"),
    (r"[\d.]+", "5.5", "."),
    (r"[]\d]\d", "]5", "55"),
    (r"\\d", r"\d"),
    (r"[^\d]\D", "٣a", "a٣", "éé"),
    (r"[^]\W]\W", "aé", "_ "),
    (r"[\[\d]\]", "[]", "5]"),
]
DOES_NOT = [
    (r"\d", "٣", "a"),
    (r"\w", "é", "-"),
    (r"[\d.]", "٣"),
    (r"[a\D]", "5"),
    (r"\\d", r"\5"),
    (r"\W", "a"),
]


@pytest.mark.parametrize(
    ("regex", "text", "fits"),
    [(regex, text, True) for regex, *texts in FITS for text in texts]
    + [(regex, text, False) for regex, *texts in DOES_NOT for text in texts],
)
def test_digits_and_letters_of_a_regex_are_ascii(regex: str, text: str, fits: bool) -> None:
    matcher = Grammars(lambda: BYTES).compile(StructuredOutputsParams(regex=regex))
    verdicts = [matcher.advance(item) for item in text.encode()]
    assert ("error" not in verdicts) == fits


@pytest.mark.parametrize(
    ("switches", "refused"),
    [
        ((), set()),
        (("disable_additional_properties",), {'{"a":1,"b":2}'}),
        (("disable_any_whitespace",), {'{"a": 1}'}),
    ],
)
def test_switches_hold_for_all_grammars(switches: tuple[str, ...], refused: set[str]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    grammars = Grammars(lambda: BYTES, switches=switches)
    for text in ('{"a": 1}', '{"a":1}', '{"a":1,"b":2}'):
        matcher = grammars.compile(StructuredOutputsParams(json=schema))
        verdicts = [matcher.advance(item) for item in text.encode()]
        assert ("error" in verdicts) == (text in refused)
