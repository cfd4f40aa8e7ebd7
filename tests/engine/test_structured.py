"""Tests of structured output in the whole engine with a model of random weights."""

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from tiny_text import TextModel, open_text, text_model

from quire import LLM, RequestOutput, SamplingParams
from quire.configure import vocabulary_of
from quire.data.outputs import CompletionOutput
from quire.data.params import ReasoningIds
from quire.errors import RequestError
from quire.kernels.cpu import native
from quire.text.grammar import Grammars

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


CONSTRAINTS: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
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
START, END = 3, 4
REASONING, OPENED = (ReasoningIds((START,), (END,), open) for open in (False, True))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def llm(model: TextModel) -> LLM:
    return open_text(model)


def params(constraint: dict[str, Any] | None = None, **fields: Any) -> SamplingParams:
    fields = {"temperature": 1.5, "max_tokens": 120, "seed": 1, "structured_outputs": constraint} | fields
    return SamplingParams(**fields)


def ask(llm: LLM, constraint: dict[str, Any] | None, **fields: Any) -> list[CompletionOutput]:
    actual: list[RequestOutput] = llm.generate([PROMPT], params(constraint, **fields), use_tqdm=False)
    return actual[0].outputs


def test_every_finished_output_satisfies_its_grammar(llm: LLM) -> None:
    """Check all kinds in one batch, several of each."""
    outputs = llm.generate(
        [PROMPT] * len(CONSTRAINTS),
        [params(constraint, n=6) for constraint, _ in CONSTRAINTS.values()],
        use_tqdm=False,
    )
    for name, (_, is_right), output in zip(CONSTRAINTS, CONSTRAINTS.values(), outputs, strict=True):
        done = [item for item in output.outputs if item.finish_reason == "stop"]
        assert all(item.finish_reason in ("stop", "length") for item in output.outputs), name
        assert done or name == "tags", f"{name}: none of six came to an end"
        for item in done:
            assert is_right(item.text), f"{name}: {item.text!r}"


def test_whitespace_is_bounded(llm: LLM) -> None:
    """Check a model that prefers to generate newlines forever."""
    newline = llm.get_tokenizer().encode("\n", False)[0]
    (answer,) = ask(llm, {"json": PERSON}, logit_bias={newline: 100}, temperature=0, max_tokens=400)
    assert "\n" in answer.text and answer.finish_reason == "stop"
    tight = {"json": PERSON, "disable_any_whitespace": True}
    (answer,) = ask(llm, tight, logit_bias={newline: 100}, temperature=0, max_tokens=400)
    assert "\n" not in answer.text


def test_unconstrained_row_in_the_batch_is_not_affected(llm: LLM) -> None:
    free = params(max_tokens=30, ignore_eos=True)
    alone = llm.generate([PROMPT], free, use_tqdm=False)[0].outputs[0].token_ids
    bound = params({"json": PERSON}, seed=5)
    both = llm.generate([PROMPT] * 3, [bound, free, bound], use_tqdm=False)
    assert both[1].outputs[0].token_ids == alone
    assert both[0].outputs[0].token_ids == both[2].outputs[0].token_ids != alone


def test_output_ends_where_the_grammar_ends(llm: LLM) -> None:
    """Check models without eos, with other stop conditions of the request."""
    for fields in ({}, {"min_tokens": 20}, {"ignore_eos": True}, {"include_stop_str_in_output": True}):
        (answer,) = ask(llm, {"choice": ["abc"]}, **fields)
        assert (answer.text, answer.finish_reason, answer.stop_reason) == ("abc", "stop", None), fields
    (cut,) = ask(llm, {"regex": "a{50}"}, max_tokens=4)
    assert cut.finish_reason == "length" and set(cut.text) == {"a"}
    (stopped,) = ask(llm, {"regex": "a{9}b"}, stop=["aaa"])
    assert (stopped.text, stopped.stop_reason) == ("", "aaa")


def test_grammar_wins_over_parameters_that_exclude_all_tokens(llm: LLM) -> None:
    """Check that no row is left without a token, which would end in an error."""
    tokenizer = llm.get_tokenizer()
    (banned,) = ask(llm, {"choice": ["a"]}, bad_words=["a"])
    (allowed,) = ask(llm, {"choice": ["a"]}, allowed_token_ids=tokenizer.encode("b", False))
    (biased,) = ask(
        llm, {"choice": ["a", "b"]}, temperature=0, logit_bias={tokenizer.encode("b", False)[0]: 100}
    )
    assert [banned.text, allowed.text, biased.text] == ["a", "a", "b"]


def test_logprobs_are_of_allowed_tokens(llm: LLM) -> None:
    (answer,) = ask(llm, {"choice": ["a", "b"]}, temperature=0, logprobs=3)
    assert answer.logprobs is not None
    finite = [logprob.logprob for logprob in answer.logprobs[0].values() if logprob.logprob > -1e9]
    assert len(finite) <= 2 and max(finite) <= 0


def test_preempted_constrained_request_continues(llm: LLM) -> None:
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
    ("constraint", "words"),
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
        ({"grammar": 'root ::= missing "a"'}, "Rule 'missing' not found"),
        ({"structural_tag": '{"format": {}}'}, "structures"),
        ({"choice": ["\ud800"]}, "choice"),
    ],
    ids=str,
)
def test_unsupported_grammars_are_rejected_before_running(
    llm: LLM, constraint: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(words)) as refused:
        ask(llm, constraint)
    assert refused.value.param == "structured_outputs"
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize("settings", [{}, {"backend": "auto"}])
def test_vocabulary_is_prepared_at_start_if_structured_outputs_are_configured(
    model: TextModel, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, futures = Grammars.prepare, list[Any]()
    monkeypatch.setattr(Grammars, "prepare", lambda grammars: futures.append(prepare(grammars)))
    grammars = open_text(model, structured_outputs_config=settings).llm_engine.inputs.grammars
    assert len(futures) == len(settings)
    for future in futures:
        assert future.result() is grammars.open()


def test_structured_outputs_need_a_tokenizer(model: TextModel) -> None:
    bare = open_text(model, skip_tokenizer_init=True)
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        ask(bare, {"choice": ["a"]})


LONG = [1, *range(30, 70)]
MIXED: list[dict[str, Any]] = [
    {"structured_outputs": {"json": PERSON}, "n": 3},
    {"max_tokens": 24, "ignore_eos": True},
    {"structured_outputs": {"json": PERSON}, "logprobs": 2, "temperature": 0.0},
    {"structured_outputs": {"regex": "[a-z ]{30}"}, "stop": ["e"], "min_tokens": 5},
    {"structured_outputs": {"choice": ["abc", "abd"]}, "repetition_penalty": 1.3},
    {"max_tokens": 30, "frequency_penalty": 0.5, "logprobs": 1},
    {"structured_outputs": {"grammar": LARK}, "bad_words": ["let it"], "top_k": 20},
    {"structured_outputs": {"regex": "[0-9]{12}"}, "reasoning": REASONING, "max_tokens": 60},
    {"reasoning": OPENED, "thinking_token_budget": 4, "max_tokens": 20, "ignore_eos": True},
]
"""Rows of all kinds in one batch."""


def mixed(llm: LLM, batches: int = 1) -> list[list[Any]]:
    """Return the output of each request; in one batch, or one after another."""
    prompts = [PROMPT, LONG, LONG, PROMPT, LONG, PROMPT, PROMPT, LONG, PROMPT]
    all_params = [params(**({"max_tokens": 80} | fields)) for fields in MIXED]
    item = [slice(None)] if batches == 1 else [slice(at, at + 1) for at in range(len(MIXED))]
    actual = [one for part in item for one in llm.generate(prompts[part], all_params[part], use_tqdm=False)]
    return [[(out.token_ids, out.finish_reason, out.stop_reason) for out in one.outputs] for one in actual]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[Any]]:
    forced = llm.llm_engine.core.scheduler.admitter.forced
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forced, "_max_tokens", 0)
        return mixed(llm, batches=len(MIXED))


ENGINES: dict[str, dict[str, Any]] = {
    "one batch": {},
    "two steps in flight": {"async_scheduling": True},
    "masks beside the layers": {"async_scheduling": True},
    "small chunks": {"max_num_batched_tokens": 16, "async_scheduling": True},
    "few blocks": {"num_gpu_blocks_override": 40, "async_scheduling": True, "max_model_len": 128},
    "no graphs": {"enforce_eager": True, "enable_prefix_caching": False},
    "n-gram drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "two ranks": {"tensor_parallel_size": 2, "cpu_threads": 1, "async_scheduling": True},
}
TWO_STAGES: dict[str, Any] = {"pipeline_parallel_size": 2, "cpu_threads": 1}


@pytest.mark.parametrize("engine", [*ENGINES, pytest.param("two stages", marks=pytest.mark.slow)])
def test_rows_of_all_kinds_match_their_outputs_alone(
    engine: str, model: TextModel, alone: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check for masks that are applied to the wrong row, step or rank, and for unconstrained rows affected
    by them.
    """
    monkeypatch.setattr(Grammars, "fills_in_thread", engine == "masks beside the layers")
    other = open_text(model, **ENGINES.get(engine, TWO_STAGES))
    try:
        assert mixed(other) == alone
        if engine == "few blocks":
            assert other.llm_engine.core.scheduler.num_preemptions > 0
    finally:
        other.llm_engine.close()


def test_constrained_row_is_in_every_step(model: TextModel) -> None:
    """Check two steps in flight; a row that waited for its token would take twice as many steps."""
    engine = open_text(model, async_scheduling=True).llm_engine
    engine.add_request("x", PROMPT, params({"regex": "[a-z]{40}"}, max_tokens=10))
    engine.add_request("y", PROMPT, params(max_tokens=10, ignore_eos=True))
    steps = 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
    assert steps <= 12


NAMES = ["quick_brown_foxes", "lazy_sleeping_dogs"]
KEYS = {
    "type": "object",
    "properties": {name: {"type": "boolean"} for name in NAMES},
    "required": NAMES,
    "additionalProperties": False,
}
FORCED = {"json": KEYS, "disable_any_whitespace": True}


@pytest.mark.parametrize("is_ahead", [False, True])
def test_forced_tokens_save_steps(model: TextModel, is_ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches forced tokens that take a step each, and drafts that change tokens, logprobs or usage."""
    engine = open_text(model, async_scheduling=is_ahead).llm_engine
    answers, num_steps = [], []
    for max_tokens in (0, 128):
        monkeypatch.setattr(engine.core.scheduler.admitter.forced, "_max_tokens", max_tokens)
        for name, fields in (("a", {"logprobs": 2}), ("b", {"repetition_penalty": 1.2, "max_tokens": 12})):
            engine.add_request(name, PROMPT, params(FORCED, **fields))
        outputs, steps = {}, 0
        while engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in engine.step()}
            steps += 1
        answers.append([outputs[name].outputs[0] for name in ("a", "b")])
        num_steps.append(steps)
    assert num_steps[1] < (0.8 if is_ahead else 0.6) * num_steps[0], num_steps
    for plain, drafted in zip(*answers, strict=True):
        assert (plain.token_ids, plain.finish_reason) == (drafted.token_ids, drafted.finish_reason)
    for plain_step, drafted_step in zip(answers[0][0].logprobs, answers[1][0].logprobs, strict=True):
        assert [*plain_step] == [*drafted_step]
        for token_id, logprob in plain_step.items():
            assert logprob.logprob == pytest.approx(drafted_step[token_id].logprob, abs=1e-3)


def test_steps_with_forced_tokens_of_some_rows_are_taped(model: TextModel) -> None:
    """Catches steps that leave the tape since their rows compute different numbers of tokens, which takes
    longer than the steps that they save."""
    llm = open_text(model)
    free, forced = params(max_tokens=60, ignore_eos=True), params(FORCED, max_tokens=60)
    for _ in range(3):
        llm.generate([PROMPT] * 2, [free, forced], use_tqdm=False)
    tapes = llm.llm_engine.core.executor._worker._runner.device._tapes._tapes
    mixed = [tape for (_, _, is_uniform, *_), tape in tapes.items() if not is_uniform]
    assert native.library() is None or any(mixed), tapes.keys()


def test_grammar_starts_after_reasoning_in_the_engine(llm: LLM) -> None:
    constraint = {"regex": "[0-9]{4}"}
    (opened,) = ask(llm, constraint, reasoning=OPENED, thinking_token_budget=6, ignore_eos=True)
    thought, answer = opened.token_ids[:7], opened.token_ids[7:]
    assert thought[-1] == END or END in thought
    assert re.fullmatch("[0-9]{4}", llm.get_tokenizer().decode(answer)) and opened.finish_reason == "stop"
    (forced,) = ask(llm, constraint, reasoning=REASONING, logit_bias={START: 100}, thinking_token_budget=0)
    assert list(forced.token_ids[:2]) == [START, END] and forced.finish_reason == "stop"
    (direct,) = ask(llm, constraint, reasoning=REASONING, logit_bias={START: -100})
    assert re.fullmatch("[0-9]{4}", direct.text)
    with pytest.raises(RequestError, match="reasoning parser"):
        ask(llm, None, thinking_token_budget=3)


def test_grammar_may_constrain_the_reasoning(model: TextModel) -> None:
    llm = open_text(model, structured_outputs_config={"enable_in_reasoning": True})
    for reasoning in (OPENED, REASONING):
        (answer,) = ask(llm, {"regex": "[0-9]{4}"}, reasoning=reasoning, thinking_token_budget=2)
        assert re.fullmatch("[0-9]{4}", answer.text) and answer.finish_reason == "stop"


def test_vocabulary_matches_the_grammar_library(llm: LLM) -> None:
    """Compare the vocabulary built from token bytes with the slower one built from tokenizer.json."""
    tokenizer = llm.get_tokenizer()
    actual = vocabulary_of(tokenizer, 0, (tokenizer.eos_token_id,)).open()
    expected = LLTokenizer(tokenizer.backend.to_str(), eos_token=[tokenizer.eos_token_id])
    assert actual.vocab_size == expected.vocab_size
    for id in range(actual.vocab_size):
        assert actual.decode_bytes([id]) == expected.decode_bytes([id]), id
        assert actual.is_special_token(id) == expected.is_special_token(id), id
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(PERSON))
    one, other = (LLMatcher(item, grammar, log_level=0) for item in (actual, expected))
    for id in tokenizer.encode('{"name": "naïve dog", "age": 3, "tags": ["é"]}', False):
        assert one.compute_bitmask() == other.compute_bitmask()
        one.consume_token(id), other.consume_token(id)
