"""Grammars of clients: compiled once per call, off the event loop, and within documented limits.

Guards against CVE-2025-48942, CVE-2025-48943, CVE-2025-48944 and CVE-2025-29770 (grammars that end the
server or exhaust its time and memory)."""

import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
from ask import CHAT, COMPLETIONS, ask, refused
from fake_engine import FakeEngine

from quire.data.params import SamplingParams, StructuredOutputsParams
from quire.data.request import Request
from quire.data.step_plan import TOO_COMPLEX, FinishReason
from quire.frontend.in_flight import failure
from quire.sched.step_tokens import why_stopped
from quire.text import grammar, grammar_lexers
from quire.text.grammar import Grammars, Vocabulary

BYTES = Vocabulary([*(bytes([id]) for id in range(256)), b""], [256], (256,), lambda text: [*text.encode()])
REGEX = "|".join(f"[a-z]{number}" for number in range(300))
SCHEMA = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(50)}}


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, bool]]:
    """Count the steps of grammar compilation, by name and by whether they run on the event loop."""
    counts: Counter[tuple[str, bool]] = Counter()
    loop = threading.get_ident()

    def count(holder: Any, name: str) -> None:
        original = getattr(holder, name)

        def counted(*args: Any) -> Any:
            counts[name, threading.get_ident() == loop] += 1
            return original(*args)

        monkeypatch.setattr(holder, name, counted)

    count(Grammars, "_compile")
    count(grammar, "grammar_of")
    count(grammar, "digest_of")
    return counts


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("constraint", [{"regex": REGEX}, {"json": SCHEMA}], ids=["regex", "json"])
def test_call_of_1024_prompts_compiles_its_grammar_once_off_the_loop(
    work: Counter[tuple[str, bool]], constraint: dict[str, Any], stream: bool
) -> None:
    engine = FakeEngine()
    body = {"prompt": ["a"] * 1024, "max_tokens": 1, "structured_outputs": constraint, "stream": stream}
    assert ask("POST", COMPLETIONS, engine=engine, json=body).status_code == 200
    assert len(engine.seen) == 1024
    assert work == {("_compile", False): 1, ("grammar_of", False): 1, ("digest_of", False): 1}
    assert len({id(params) for _, _, params, _ in engine.seen}) == 1, "all prompts share the checked params"


def test_batch_of_chats_compiles_its_grammar_once(work: Counter[tuple[str, bool]]) -> None:
    messages = [[{"role": "user", "content": f"chat {number}"}] for number in range(20)]
    body = {"messages": messages, "max_tokens": 2, "response_format": {"type": "json_object"}}
    assert ask("POST", f"{CHAT}/batch", json=body).status_code == 200
    assert work == {("_compile", False): 1, ("grammar_of", False): 1, ("digest_of", False): 1}


def test_cached_grammar_is_not_rebuilt_when_its_lexers_expire(
    work: Counter[tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_lexers, "MAX_SEQUENCES_PER_LEXER", 2)
    monkeypatch.setattr(grammar_lexers, "MAX_COMPILE_S", 0.0)
    grammars = Grammars(lambda: BYTES)
    for _ in range(8):
        grammars.compile(StructuredOutputsParams(regex="[ab]+c"))
        grammars.check(StructuredOutputsParams(regex="[ab]+c"))
    assert work["grammar_of", True] == 1 and work["_compile", True] == 4


def test_digests_identify_structured_output_params() -> None:
    def key(**fields: Any) -> bytes:
        return grammar.digest_of(StructuredOutputsParams(**fields))

    assert key(json={"a": 2**80}) == key(json=f'{{"a": {2**80}}}')
    several = [
        key(json={}), key(json_object=True), key(regex="a"), key(choice=["a"]), key(choice=["a", "b"]),
        key(json={}, disable_any_whitespace=True), key(json={}, whitespace_pattern=" "), key(grammar="a"),
    ]  # fmt: skip
    assert len(set(several)) == len(several)


CHOICES = [f"a common beginning, then {number}" for number in range(5000)]


def follow(grammars: Grammars, text: str, **fields: Any) -> list[str]:
    matcher = grammars.compile(StructuredOutputsParams(**fields))
    return [matcher.advance(byte) for byte in text.encode()]


@pytest.mark.parametrize("place", [0, 2500, 4999])
def test_thousands_of_choices_with_a_common_prefix(place: int) -> None:
    verdicts = follow(Grammars(lambda: BYTES), CHOICES[place], choice=CHOICES)
    assert set(verdicts[:-1]) == {""} and verdicts[-1] in ("", "complete")


@pytest.mark.parametrize(
    ("choice", "text", "fits"),
    [
        (["a", "ab"], "a", True),
        (["a", "ab"], "ab", True),
        (["a", "ab"], "b", False),
        (['say "so"\\', "x"], 'say "so"\\', True),
        (["two\nlines", "tab\t"], "two\nlines", True),
        (["\x7f\x01", "é🙂"], "\x7f\x01", True),
        (["\x7f\x01", "é🙂"], "é🙂", True),
        (["/a.*/", "b"], "/a.*/", True),
        (["/a.*/", "b"], "/ab/", False),
    ],
)
def test_choices_are_matched_literally(choice: list[str], text: str, fits: bool) -> None:
    assert ("error" not in follow(Grammars(lambda: BYTES), text, choice=choice)) == fits


def test_too_many_choice_characters_are_400() -> None:
    choice = [f"{number:06}" for number in range(40_000)]
    error = refused(ask("POST", COMPLETIONS, json={"prompt": "a", "structured_outputs": {"choice": choice}}))
    assert error["param"] == "structured_outputs" and f"at most {grammar.MAX_CHARS}" in error["message"]


def test_parser_limit_differs_from_a_mismatch() -> None:
    """llguidance's parser follows at most 2,000 alternatives at once."""
    alternatives = " | ".join(f'"same {number}"' for number in range(2500))
    grammars = Grammars(lambda: BYTES)
    assert follow(grammars, "s", grammar=f"start: {alternatives}") == ["limit"]
    assert follow(grammars, "x", regex="abc") == ["error"]


def test_too_complex_grammar_is_400() -> None:
    request = Request(id="a", tokens=[1, 2], params=SamplingParams(), prompt_len=1, limit=9, seed=0)
    assert why_stopped(request, np.array([1, 2], np.int32), "limit") == ("error", TOO_COMPLEX)
    error = failure(FinishReason("error", TOO_COMPLEX))
    assert error.status == 400 and "simplify" in str(error) and "no token is valid" not in str(error)
