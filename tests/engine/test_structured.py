"""Structured output through the whole engine: a model of random weights says what it must, and no more."""

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from tiny_text import TextModel, open_text, text_model

from quire import LLM, RequestOutput, SamplingParams
from quire.data.outputs import CompletionOutput
from quire.errors import RequestError

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "é"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": PERSON,
    "enum": {"enum": ["red", "green", 3, None, "żółty"]},
    "number": {"type": "number", "minimum": -2, "maximum": 2},
    "any of": {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": "^[a-c]{2,5}$"}]},
    "nested": {
        "$defs": {"leaf": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}},
        "type": "object",
        "properties": {"left": {"$ref": "#/$defs/leaf"}, "date": {"type": "string", "format": "date"}},
        "required": ["left", "date"],
    },
    "open": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
}
LARK = 'start: "let " NAME " = " sum\nsum: NUM ("+" NUM)*\nNAME: /[a-z]{1,3}/\nNUM: /[0-9]{1,2}/\n'
EBNF = 'root ::= "let " [a-z] [a-z]? " = " term\nterm ::= [0-9] ("+" [0-9])?\n'


def is_json(schema: dict[str, Any]) -> Callable[[str], bool]:
    return lambda text: jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


def fits(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


ASKED: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    **{
        f"json {name}": ({"json": schema, "disable_any_whitespace": True}, is_json(schema))
        for name, schema in SCHEMAS.items()
    },
    "json text": ({"json": json.dumps(PERSON)}, is_json(PERSON)),
    "closed": (
        {"json": SCHEMAS["open"], "disable_additional_properties": True},
        is_json(SCHEMAS["open"] | {"additionalProperties": False}),
    ),
    "json object": (
        {"json_object": True, "disable_any_whitespace": True},
        lambda text: isinstance(json.loads(text), dict),
    ),
    "regex": ({"regex": r"([0-9]{1,3}\.){3}[0-9]{1,3}"}, fits(r"([0-9]{1,3}\.){3}[0-9]{1,3}")),
    "regex without end": ({"regex": "[ab]*c+"}, fits("[ab]*c+")),
    "regex of unicode": ({"regex": "[日本語🙂]{2,4}"}, fits("[日本語🙂]{2,4}")),
    "choice": ({"choice": ["yes", "no", 'may"be\\', "是"]}, ["yes", "no", 'may"be\\', "是"].__contains__),
    "lark": ({"grammar": LARK}, fits(r"let [a-z]{1,3} = \d{1,2}(\+\d{1,2})*")),
    "ebnf": ({"grammar": EBNF}, fits(r"let [a-z]{1,2} = \d(\+\d)?")),
    "tags": (
        {
            "structural_tag": json.dumps(
                {
                    "triggers": ["<f="],
                    "structures": [
                        {"begin": "<f=a>", "schema": {"type": "boolean"}, "end": "</f>"},
                        {"begin": "<f=b>", "schema": {"enum": [1]}, "end": "</f>"},
                    ],
                }
            )
        },
        lambda text: re.search("<f=(?!a>|b>)", text + "$") is None,
    ),
}
PROMPT = [1, 40, 300, 77, 310, 90]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def llm(model: TextModel) -> LLM:
    return open_text(model)


def params(asked: dict[str, Any] | None = None, **fields: Any) -> SamplingParams:
    fields = {"temperature": 1.5, "max_tokens": 120, "seed": 1, "structured_outputs": asked} | fields
    return SamplingParams(**fields)


def ask(llm: LLM, asked: dict[str, Any] | None, **fields: Any) -> list[CompletionOutput]:
    found: list[RequestOutput] = llm.generate([PROMPT], params(asked, **fields), use_tqdm=False)
    return found[0].outputs


def test_every_finished_answer_is_what_was_asked_for(llm: LLM) -> None:
    """All kinds in one batch, several of each."""
    outputs = llm.generate(
        [PROMPT] * len(ASKED), [params(asked, n=6) for asked, _ in ASKED.values()], use_tqdm=False
    )
    for name, (_, is_right), output in zip(ASKED, ASKED.values(), outputs, strict=True):
        done = [each for each in output.outputs if each.finish_reason == "stop"]
        assert all(each.finish_reason in ("stop", "length") for each in output.outputs), name
        assert done or name == "tags", f"{name}: none of six came to an end"
        for each in done:
            assert is_right(each.text), f"{name}: {each.text!r}"


def test_a_neighbour_says_what_it_says_alone(llm: LLM) -> None:
    free = params(max_tokens=30, ignore_eos=True)
    alone = llm.generate([PROMPT], free, use_tqdm=False)[0].outputs[0].token_ids
    bound = params({"json": PERSON}, seed=5)
    both = llm.generate([PROMPT] * 3, [bound, free, bound], use_tqdm=False)
    assert both[1].outputs[0].token_ids == alone
    assert both[0].outputs[0].token_ids == both[2].outputs[0].token_ids != alone


def test_the_text_ends_where_the_grammar_does(llm: LLM) -> None:
    """Without an eos of its own, whatever else the request wants of its end."""
    for fields in ({}, {"min_tokens": 20}, {"ignore_eos": True}, {"include_stop_str_in_output": True}):
        (answer,) = ask(llm, {"choice": ["abc"]}, **fields)
        assert (answer.text, answer.finish_reason, answer.stop_reason) == ("abc", "stop", None), fields
    (cut,) = ask(llm, {"regex": "a{50}"}, max_tokens=4)
    assert cut.finish_reason == "length" and set(cut.text) == {"a"}
    (stopped,) = ask(llm, {"regex": "a{9}b"}, stop=["aaa"])
    assert (stopped.text, stopped.stop_reason) == ("", "aaa")


def test_the_grammar_wins_over_what_would_leave_nothing(llm: LLM) -> None:
    """Catches rows without a token, which would end in an error."""
    tokenizer = llm.get_tokenizer()
    (banned,) = ask(llm, {"choice": ["a"]}, bad_words=["a"])
    (allowed,) = ask(llm, {"choice": ["a"]}, allowed_token_ids=tokenizer.encode("b", False))
    (biased,) = ask(
        llm, {"choice": ["a", "b"]}, temperature=0, logit_bias={tokenizer.encode("b", False)[0]: 100}
    )
    assert [banned.text, allowed.text, biased.text] == ["a", "a", "b"]


def test_logprobs_are_of_what_the_grammar_leaves(llm: LLM) -> None:
    (answer,) = ask(llm, {"choice": ["a", "b"]}, temperature=0, logprobs=3)
    assert answer.logprobs is not None
    finite = [each.logprob for each in answer.logprobs[0].values() if each.logprob > -1e9]
    assert len(finite) <= 2 and max(finite) <= 0


def test_a_preempted_answer_goes_on_where_it_was(llm: LLM) -> None:
    engine, scheduler = llm.llm_engine, llm.llm_engine.core.scheduler
    expected = ask(llm, {"json": PERSON}, seed=3)[0]
    engine.add_request("x", PROMPT, params({"json": PERSON}, seed=3))
    outputs: list[Any] = []
    before = scheduler.num_preemptions
    while engine.has_unfinished_requests():
        if len(scheduler.running) and len(outputs) % 4 == 2:
            scheduler._preempt(int(scheduler.running.order[0]))
        outputs.append(engine.step())
    assert scheduler.num_preemptions > before + 1
    assert outputs[-1][0].outputs[0].token_ids == expected.token_ids


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"json": {"type": "strange"}}, "Invalid type"),
        ({"json": {"type": "object", "dependentRequired": {"a": ["b"]}}}, "dependentRequired"),
        ({"json": {"enum": []}}, "Unsatisfiable"),
        ({"json": "{"}, ".json"),
        ({"json": "[1]"}, "a JSON schema is an object"),
        ({"json": {"$ref": "http://elsewhere/x"}}, "elsewhere"),
        ({"regex": "(a"}, "regex"),
        ({"regex": "a" * 300_000}, "at most"),
        ({"grammar": 'start: "a" | b'}, "unknown name"),
        ({"grammar": 'start: start "a"'}, "NoExtension"),
        ({"grammar": 'root ::= "a'}, "grammar"),
        ({"structural_tag": '{"format": {}}'}, "structures"),
        ({"choice": ["\ud800"]}, "choice"),
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_refused_before_it_runs(
    llm: LLM, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(words)) as refused:
        ask(llm, asked)
    assert refused.value.param == "structured_outputs"
    assert not llm.llm_engine.has_unfinished_requests()


def test_without_a_tokenizer_there_is_no_grammar(model: TextModel) -> None:
    bare = open_text(model, skip_tokenizer_init=True)
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        ask(bare, {"choice": ["a"]})


def test_rank_processes_are_told_the_masks(model: TextModel, llm: LLM) -> None:
    apart = open_text(model, distributed_executor_backend="mp")
    try:
        assert ask(apart, {"json": PERSON})[0].token_ids == ask(llm, {"json": PERSON})[0].token_ids
    finally:
        apart.llm_engine.close()
