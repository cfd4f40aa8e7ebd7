"""Tests of remembered masks: they are those that the grammar would compute again."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from quire.data.params import StructuredOutputsParams
from quire.text import json_states, token_paths
from quire.text.grammar import Grammars, Vocabulary
from quire.text.grammar_lexers import MAX_SEQUENCES_PER_LEXER, Matcher
from quire.text.json_nodes import SchemaReader
from quire.text.mask_memory import MaskMemory
from quire.text.parsers.call_grammar import CallFormat, calls_grammar, free_text_marks

WORD = {"type": "string", "minLength": 2, "maxLength": 9}
PERSON = {
    "type": "object",
    "properties": {
        "name": WORD,
        "age": {"type": "integer"},
        "kind": {"enum": ["a", "b", 'c"d']},
        "tags": {"type": "array", "items": WORD, "maxItems": 3},
        "note": {"type": "string"},
        "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        "parent": {"$ref": "#"},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "records": {"type": "array", "items": PERSON, "minItems": 3},
    "map of numbers": {"type": "object", "additionalProperties": {"type": "number"}},
    "names and others": {"type": "object", "properties": {"x": {"type": "null"}, "y": WORD}},
    "anything": {},
    "lists of lists": {
        "type": "array",
        "minItems": 2,
        "maxItems": 4,
        "items": {"type": "array", "maxItems": 2, "items": {"type": "boolean"}},
    },
    "choices": {"type": "array", "items": {"anyOf": [WORD, {"type": "integer"}, PERSON]}},
    "references": {
        "type": "array",
        "items": {"$ref": "#/$defs/tree"},
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "v": {"$ref": "#/$defs/v"},
                    "sub": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
                },
                "required": ["v"],
            },
            "v": {"type": "string", "maxLength": 4},
        },
    },
    "names of parts": {
        "type": "array",
        "items": {"$ref": "#tree"},
        "$defs": {"tree": {"$anchor": "tree", "type": "string", "maxLength": 4}},
    },
    "parts with an address": {
        "type": "array",
        "items": {
            "$id": "https://example.org/part",
            "type": "array",
            "items": {"$ref": "#/$defs/v"},
            "$defs": {"v": {"type": "boolean"}},
        },
        "$defs": {"v": {"type": "string", "maxLength": 4}},
    },
    "first items": {"type": "array", "prefixItems": [{"type": "integer"}, WORD], "items": WORD},
    "long text": {"type": "string", "minLength": 60, "maxLength": 400},
}


PARTS = r""""," ": "} }] },{ {" [" \u00 \n é 日本 \" "], 1, true null name tags :[ ab hello 00e9 \ud83d"""


def make_vocabulary() -> Vocabulary:
    """Return all bytes, and tokens that reach over several parts of a text."""
    tokens = [b"", b"<eos>", *(bytes((byte,)) for byte in range(256))]
    tokens += [part.encode() for part in PARTS.split(" ")] + [b", ", b"\n  ", b"\xe6\x97", b"a" * 20]
    tokens = list(dict.fromkeys(tokens))
    longest_first = sorted(range(2, len(tokens)), key=lambda token_id: -len(tokens[token_id]))

    def encode(text: str) -> list[int]:
        data, token_ids = text.encode(), []
        while data:
            token_ids.append(next(id for id in longest_first if data.startswith(tokens[id])))
            data = data[len(tokens[token_ids[-1]]) :]
        return token_ids

    return Vocabulary(tokens, [0, 1], (1,), encode)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return make_vocabulary()


def masks_of(grammars: Grammars, matchers: list[Matcher]) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the masks of a step, those that llguidance computes, and the number of remembered ones."""
    pairs = [(matcher, row) for row, matcher in enumerate(matchers)]
    bits, fresh = (np.zeros((len(matchers), grammars.num_words), np.uint32) for _ in range(2))
    rest = grammars.fill_remembered(pairs, bits)
    if rest:
        grammars.fill(rest, bits)
    grammars._compute([(matcher.copy(), row) for row, matcher in enumerate(matchers)], fresh)
    return bits, fresh, len(pairs) - len(rest)


def follow(grammars: Grammars, params: StructuredOutputsParams, seed: int, num_rows: int = 5) -> float:
    """Write random texts of a grammar, and check every mask and verdict. Return the remembered share."""
    draw = random.Random(seed)
    matchers = [grammars.compile(params) for _ in range(num_rows)]
    num_masks, num_remembered = 0, 0
    for _ in range(80):
        bits, fresh, remembered = masks_of(grammars, matchers)
        np.testing.assert_array_equal(bits, fresh)
        num_masks += len(matchers)
        num_remembered += remembered
        moves = []
        for matcher, mask in zip(matchers, bits, strict=True):
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            moves.append((matcher, int(draw.choice(allowed))))
        copies = [(matcher.copy(), token_id) for matcher, token_id in moves]
        expected = [Matcher(copy.inner, copy.lexer, None).advance(token_id) for copy, token_id in copies]
        verdicts = grammars.advance(moves)
        assert verdicts == expected
        matchers = [
            m if not verdict else grammars.compile(params)
            for m, verdict in zip(matchers, verdicts, strict=True)
        ]
    return num_remembered / num_masks


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("spaces", [{}, {"disable_any_whitespace": True}, {"whitespace_pattern": " "}])
def test_remembered_masks_are_those_of_the_grammar(
    vocabulary: Vocabulary, name: str, spaces: dict[str, Any]
) -> None:
    grammars = Grammars(lambda: vocabulary)
    params = StructuredOutputsParams(json=SCHEMAS[name], **spaces)
    for seed in range(3):
        share = follow(grammars, params, seed)
    assert share > (0.3 if name in ("records", "lists of lists", "references", "long text") else 0)


@pytest.mark.parametrize("constraint", [{"json": PERSON}, {"regex": "[a-c]x(hello hello){2}[0-9]"}])
def test_forced_tokens_are_the_only_allowed_ones(vocabulary: Vocabulary, constraint: dict[str, Any]) -> None:
    """Catches draft tokens that a mask would not allow alone, also where they are remembered."""
    grammars, draw, num_forced = Grammars(lambda: vocabulary), random.Random(1), 0
    params = StructuredOutputsParams(**constraint, disable_any_whitespace=True)
    fresh = np.zeros((1, grammars.num_words), np.uint32)
    for _ in range(20):
        matcher, verdict = grammars.compile(params), ""
        for _ in range(80):
            ahead = matcher.copy()
            for token_id in grammars.forced_tokens(matcher):
                grammars._compute([(ahead, 0)], fresh)
                assert np.flatnonzero(np.unpackbits(fresh.view(np.uint8), bitorder="little")) == [token_id]
                ahead.advance(token_id)
                num_forced += 1
            bits, _, _ = masks_of(grammars, [matcher])
            allowed = np.flatnonzero(np.unpackbits(bits[0].view(np.uint8), bitorder="little"))
            (verdict,) = grammars.advance([(matcher, int(draw.choice(allowed)))])
            if verdict:
                break
    assert num_forced > 50


TAGS = {
    "triggers": ["},{", "日本", "ab"],
    "structures": [
        {"begin": "},{", "schema": {"enum": ["x"]}, "end": "}"},
        {"begin": "日本", "schema": {"type": "null"}, "end": ";"},
        {"begin": "ab1", "schema": {"type": "boolean"}, "end": ""},
    ],
}
CALLS = {
    name: calls_grammar(
        format, {"name": {"type": "object"}}, SimpleNamespace(added_tokens=added, is_special=added.get)
    )
    for name, format, added in (
        ("mark of text", CallFormat("},{", "NAME(ARGUMENTS)", repeats=True), {}),
        ("mark of a token", CallFormat("<eos>", "NAME(ARGUMENTS)"), {1: AddedToken("<eos>", special=True)}),
        ("mark at the start", CallFormat("", "ab NAME(ARGUMENTS)"), {}),
    )
}


@pytest.mark.parametrize("constraint", ["tags", *CALLS])
def test_masks_of_free_text_are_remembered(vocabulary: Vocabulary, constraint: str) -> None:
    """Catches positions between the parts of a trigger or of a character that are taken for one another."""
    grammars = Grammars(lambda: vocabulary)
    params = (
        StructuredOutputsParams(structural_tag=json.dumps(TAGS))
        if constraint == "tags"
        else StructuredOutputsParams(grammar=CALLS[constraint])
    )
    assert max(follow(grammars, params, seed) for seed in range(4)) > 0.3


@pytest.mark.parametrize(
    "constraint",
    [
        {"choice": ["yes", "no", "ab", "aab", "日"]},
        {"regex": "[ab]{1,3}x?"},
        {"grammar": 'start: "ab" /[0-2]/'},
    ],
)
def test_masks_of_short_texts_are_remembered(vocabulary: Vocabulary, constraint: dict[str, Any]) -> None:
    grammars = Grammars(lambda: vocabulary)
    params = StructuredOutputsParams(**constraint)
    assert max(follow(grammars, params, seed) for seed in range(3)) > 0.8


def test_unrolled_texts_that_do_not_repeat_are_not_followed(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches masks of long texts that are kept, though no text reaches them again."""
    monkeypatch.setattr(token_paths, "MAX_NEW", 64)
    grammars, params = Grammars(lambda: vocabulary), StructuredOutputsParams(regex="[a-z ]{300}")
    follow(grammars, params, 1)
    states = grammars.compile(params).lexer.states
    assert not states.is_useful and states.num_bytes < 100_000
    assert grammars.compile(params).mask_key is None


def test_grammars_of_other_forms_have_no_free_text() -> None:
    for old, new in (("begun", "begin"), ("TEXT: /(.|", "TEXT: /(a|")):
        assert free_text_marks(CALLS["mark of text"]) and not free_text_marks(
            CALLS["mark of text"].replace(old, new)
        )


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        pytest.param(
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "type": "array",
                "items": [{"type": "null"}, {"type": "string"}, {"type": "integer"}],
            },
            ['[null,"",3]'],
            id="a schema for each item",
        ),
        pytest.param(
            {"type": "object", "properties": {"a": WORD}, "required": ["b", "c"]},
            ['{"b":1,"c":2,"d":3}'],
            id="required properties without a schema",
        ),
        pytest.param(
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "additionalProperties": {"type": "string"},
            },
            ['{"a":1}', r'{"\u0061":"x"}'],
            id="another spelling of a name",
        ),
    ],
)
def test_different_positions_are_told_apart(
    vocabulary: Vocabulary, schema: dict[str, Any], texts: list[str]
) -> None:
    grammars = Grammars(lambda: vocabulary)
    for text in texts:
        matcher = grammars.compile(StructuredOutputsParams(json=schema))
        for byte in text.encode():
            bits, fresh, _ = masks_of(grammars, [matcher])
            np.testing.assert_array_equal(bits, fresh)
            assert grammars.advance([(matcher, vocabulary.tokens.index(bytes((byte,))))])[0] != "error"


def test_values_are_not_taken_for_longer_than_they_may_be() -> None:
    """Catches a limit of items that a long token reaches, but that its mask is not distinguished by."""
    item = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for schema, text in (
        (item, '{"a":1}'),
        ({"type": "array", "items": item, "minItems": 2}, '[{"a":1},{"a":1}]'),
    ):
        assert SchemaReader(schema).read(schema).min_bytes <= len(text)


def test_forced_tokens_depend_on_the_token_before(vocabulary: Vocabulary) -> None:
    """Catches the usual tokens of a forced text after one token that are remembered for another."""

    def encode(text: str) -> list[int]:
        if not text.startswith('"'):
            return vocabulary.encode(text)
        return [vocabulary.tokens.index(bytes((byte,))) for byte in text.encode()]

    grammars = Grammars(lambda: replace(vocabulary, encode=encode))
    schema = {"type": "object", "properties": {"name": WORD}, "required": ["name"]}
    orders = [[b'{"'], [b"{", b'"']] * 2
    params = StructuredOutputsParams(json=schema)
    matchers = [grammars.compile(params) for _ in range(4)]
    for matcher, parts in zip(matchers, orders, strict=True):
        assert not any(matcher.advance(vocabulary.tokens.index(part)) for part in parts)
    for _ in range(2):
        bits, fresh, num_remembered = masks_of(grammars, matchers)
        np.testing.assert_array_equal(bits, fresh)
    assert (bits[0] != bits[1]).any() and num_remembered == 4


def test_masks_are_remembered_after_many_sequences(vocabulary: Vocabulary) -> None:
    """Catches positions that are lost with the last lexer, which only a number of sequences use."""
    grammars = Grammars(lambda: vocabulary)
    params = StructuredOutputsParams(json=PERSON)
    keys = {grammars.compile(params).mask_key for _ in range(MAX_SEQUENCES_PER_LEXER + 3)}
    assert len(keys) == 1 and None not in keys


@pytest.mark.parametrize(
    ("schema", "text", "rest"),
    [
        ({}, "[" * 400, ""),
        ({"type": ["string", "null"]}, '"' + "ab" * 300, r"\\\"\\\\" + '"'),
        (
            {"type": "array", "items": {"anyOf": [PERSON, {"type": "null"}]}},
            '[{"name":"ab","tags":[],"note":"',
            'x"}]',
        ),
        ({"type": "object", "additionalProperties": {"type": "null"}}, '{"' + "ab" * 300, '":null}'),
        (
            {"type": "object", "properties": {"a" * 60: {"type": "null"}, "a" * 61: WORD}},
            '{"',
            "a" * 61 + '":"ab"}',
        ),
    ],
)
def test_long_and_deep_texts_take_no_more_memory(
    vocabulary: Vocabulary, schema: dict[str, Any], text: str, rest: str
) -> None:
    grammars = Grammars(lambda: vocabulary)
    matcher = grammars.compile(StructuredOutputsParams(json=schema))
    states = matcher.lexer.states
    assert states is not None
    for byte in (text + rest).encode():
        bits, fresh, _ = masks_of(grammars, [matcher])
        np.testing.assert_array_equal(bits, fresh)
        assert grammars.advance([(matcher, vocabulary.tokens.index(bytes((byte,))))])[0] != "error"
    assert max(len(place.raw) + len(place.frames) for place in states._positions) < 150
    assert len(states._positions) < 150


def test_drafts_that_do_not_fit_are_refused(vocabulary: Vocabulary) -> None:
    grammars = Grammars(lambda: vocabulary)
    matcher = grammars.compile(StructuredOutputsParams(json=SCHEMAS["records"]))
    for part in (b"]", b"}", b"},{", b'"}'):
        assert matcher.copy().advance(vocabulary.tokens.index(part)) == "error"
    assert matcher.advance(vocabulary.tokens.index(b"[")) == ""


def test_a_mask_of_a_failed_grammar_is_not_that_of_others(vocabulary: Vocabulary) -> None:
    grammars = Grammars(lambda: vocabulary)
    failed, other = (grammars.compile(StructuredOutputsParams(json=PERSON)) for _ in range(2))
    failed.inner.consume_token(vocabulary.tokens.index(b"]"))
    bits, fresh, _ = masks_of(grammars, [failed, other])
    assert failed.inner.is_error() and not other.inner.is_error()
    np.testing.assert_array_equal(bits, fresh)


def test_texts_that_do_not_repeat_are_not_followed(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_states, "MAX_NEW_STEPS", 100)
    grammars = Grammars(lambda: vocabulary)
    numbers, words = ({"type": "array", "items": {"type": kind}} for kind in ("number", "string"))
    for schema in (numbers, words):
        follow(grammars, StructuredOutputsParams(json=schema), seed=1)
    assert grammars.compile(StructuredOutputsParams(json=numbers)).mask_key is None
    assert grammars.compile(StructuredOutputsParams(json=words)).mask_key is not None


def test_masks_are_right_when_positions_and_masks_are_dropped(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_states, "MAX_POSITIONS", 30)
    grammars = Grammars(lambda: vocabulary)
    grammars.open()
    monkeypatch.setattr(grammars, "_masks", MaskMemory(grammars.num_words, 10 * 4 * grammars.num_words))
    assert follow(grammars, StructuredOutputsParams(json=SCHEMAS["records"]), seed=1) > 0


@pytest.mark.parametrize(
    "constraint",
    [
        {"json": PERSON, "whitespace_pattern": "[,x]*"},
        {"json": PERSON | {"x-guidance": {"item_separator": ";"}}},
        {"grammar": 'start: "a"+'},
    ],
)
def test_other_constraints_have_no_positions_of_a_schema(
    vocabulary: Vocabulary, constraint: dict[str, Any]
) -> None:
    """Catches masks of a schema that are remembered for texts of another syntax."""
    grammars, params = Grammars(lambda: vocabulary), StructuredOutputsParams(**constraint)
    follow(grammars, params, 1)
    assert isinstance(grammars.compile(params).lexer.states, token_paths.TokenPaths)


def test_a_token_that_does_not_fit_ends_a_row_although_masks_are_remembered(vocabulary: Vocabulary) -> None:
    grammars = Grammars(lambda: vocabulary)
    params = StructuredOutputsParams(json=SCHEMAS["records"])
    follow(grammars, params, seed=2)
    matchers = [grammars.compile(params) for _ in range(4)]
    masks_of(grammars, matchers)
    opening, wrong = vocabulary.tokens.index(b"["), vocabulary.tokens.index(b"x")
    verdicts = grammars.advance([(matchers[0], wrong), *((matcher, opening) for matcher in matchers[1:])])
    assert verdicts == ["error", "", "", ""]


def test_the_memory_of_masks_has_a_limit() -> None:
    memory = MaskMemory(4, max_bytes=3 * 16)
    for value in range(5):
        memory.keep((value,), np.full(4, value, np.uint32))
    assert [(value,) in memory for value in range(5)] == [False, False, True, True, True]
    bits = np.zeros((3, 4), np.uint32)
    assert memory.copy([(4,), None, (2,)], [0, 1, 2], bits) == [1]
    assert bits[:, 0].tolist() == [4, 0, 2]
    memory.keep((9,), np.full(4, 9, np.uint32))  # (3,) was not used for the longest time
    assert [(value,) in memory for value in (2, 3, 4, 9)] == [True, False, True, True]
