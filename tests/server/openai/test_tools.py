"""Tests of chats with tools and reasoning: parsers, streams, grammars."""

import json
import re
from pathlib import Path
from typing import Any

import fake_engine
import pytest
from ask import chat, events, refused
from fake_engine import FakeEngine, byte_tokenizer
from tokenizers import AddedToken

from quire.errors import ConfigError
from quire.server.settings import make_settings
from quire.text.parsers import REASONING
from quire.text.parsers import TOOLS as TOOL_PARSERS
from quire.text.tokenizer import Tokenizer

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
HERMES = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
CALL = '{"city": "Łódź"}'
ONE = f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {CALL}}}\n</tool_call>'
TWO = ONE + '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
THOUGHT = "<think>Hm, a city.</think>"


def message(answer: str, settings: dict[str, Any], **body: Any) -> dict[str, Any]:
    (choice,) = chat(FakeEngine(answer), settings, **body).json()["choices"]
    return choice["message"] | {"finish_reason": choice["finish_reason"]}


def streamed(answer: str, settings: dict[str, Any], *, index: int = 0, **body: Any) -> dict[str, Any]:
    """Return the message that the deltas of a stream add up to."""
    made: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": [], "finish_reason": None}
    for chunk in events(chat(FakeEngine(answer), settings, stream=True, **body)):
        for choice in chunk["choices"]:
            if choice["index"] == index:
                _add(made, choice)
    return made


def _add(made: dict[str, Any], choice: dict[str, Any]) -> None:
    delta = choice["delta"]
    made["content"] += delta.get("content") or ""
    made["reasoning"] += delta.get("reasoning") or ""
    made["finish_reason"] = choice["finish_reason"]
    for part in delta.get("tool_calls", ()):
        if "id" in part:
            assert part["index"] == len(made["tool_calls"]) and part["type"] == "function"
            made["tool_calls"].append({"name": part["function"]["name"], "arguments": ""})
        made["tool_calls"][part["index"]]["arguments"] += part["function"]["arguments"]


def plain(answer: dict[str, Any]) -> dict[str, Any]:
    """Return a complete message in the format of `streamed`."""
    return {
        "content": answer["content"] or "",
        "reasoning": answer["reasoning"] or "",
        "tool_calls": [call["function"] for call in answer.get("tool_calls", ())],
        "finish_reason": answer["finish_reason"],
    }


def test_tool_call_is_parsed() -> None:
    answer = message(ONE, HERMES, tools=TOOLS)
    (call,) = answer["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": CALL} and call["type"] == "function"
    assert call["id"].startswith("chatcmpl-tool-") and answer["content"] == "Let me see."
    assert answer["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("body", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_text_without_tools_is_not_parsed(body: dict[str, Any]) -> None:
    answer = message(ONE, HERMES, **body)
    assert answer["content"] == ONE and "tool_calls" not in answer and answer["finish_reason"] == "stop"


def test_parallel_tool_calls_off_keeps_one_call() -> None:
    assert len(message(TWO, HERMES, tools=TOOLS)["tool_calls"]) == 2
    for request in (message, streamed):
        (call,) = request(TWO, HERMES, tools=TOOLS, parallel_tool_calls=False)["tool_calls"]
        assert call.get("function", call)["name"] == "weather"


def with_template(answer: str, template: str) -> FakeEngine:
    engine = FakeEngine(answer)
    engine.facts.chat_template = template
    return engine


THINKING_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}\n{% endfor %}assistant:{% if open is defined %}<think>{% endif %}{# </think> #}"
)


def test_template_selects_the_parsers() -> None:
    """Neither a flag for tools nor one for reasoning is necessary."""
    reply = chat(with_template(THOUGHT + ONE, THINKING_TEMPLATE), {}, tools=TOOLS).json()["choices"][0]
    assert reply["message"]["reasoning"] == "Hm, a city."
    assert reply["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": CALL}
    assert reply["finish_reason"] == "tool_calls"


def test_flags_take_precedence_over_the_template() -> None:
    off: dict[str, Any] = {"enable_auto_tool_choice": False, "reasoning_parser": "identity"}
    error = refused(chat(with_template(ONE, THINKING_TEMPLATE), off, tools=TOOLS))
    assert '"auto" tool choice requires --enable-auto-tool-choice' in error["message"]
    reply = chat(with_template(THOUGHT + ONE, THINKING_TEMPLATE), off).json()["choices"][0]
    assert reply["message"]["content"] == THOUGHT + ONE and reply["message"]["reasoning"] is None
    other = chat(with_template(ONE, THINKING_TEMPLATE), {"tool_call_parser": "glm45"}, tools=TOOLS).json()
    assert other["choices"][0]["message"]["content"] == ONE


@pytest.mark.parametrize(
    ("variables", "content", "reasoning"),
    [({}, "Fine.", None), ({"open": True}, "", "Fine."), ({"enable_thinking": True}, "", "Fine.")],
)
def test_detected_reasoning_begins_only_where_the_prompt_opens_it(
    variables: dict[str, Any], content: str, reasoning: str | None
) -> None:
    """A template with the marks may belong to a model that does not think."""
    engine = with_template("Fine.", THINKING_TEMPLATE)
    answer = chat(engine, {}, chat_template_kwargs=variables).json()["choices"][0]["message"]
    assert (answer["content"] or "", answer["reasoning"]) == (content, reasoning)


def test_enabled_tool_choice_without_a_parser_is_an_error() -> None:
    with pytest.raises(ConfigError, match="needs tool_call_parser: no known tool parser fits"):
        chat(FakeEngine("x"), {"enable_auto_tool_choice": True})


def test_truncated_call_has_partial_arguments() -> None:
    answer = message(ONE, HERMES, tools=TOOLS, max_tokens=len(ONE) - 25)
    assert answer["finish_reason"] == "length"
    assert CALL.startswith(answer["tool_calls"][0]["function"]["arguments"])


def test_reasoning_is_separated_counted_and_optional() -> None:
    settings = {"reasoning_parser": "qwen3"}
    reply = chat(FakeEngine(THOUGHT + "Fine."), settings).json()
    assert reply["choices"][0]["message"]["reasoning"] == "Hm, a city."
    assert reply["choices"][0]["message"]["content"] == "Fine."
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("Hm, a city.")}
    assert message(THOUGHT + "Fine.", settings, include_reasoning=False)["reasoning"] is None
    options = {"include_usage": True}
    *_, last = events(chat(FakeEngine(THOUGHT + "Fine."), settings, stream=True, stream_options=options))
    assert last["usage"] == reply["usage"]


@pytest.mark.parametrize(
    ("reasoning", "tools", "thought", "call"),
    [
        ("qwen3", "hermes", "Hm.", ONE.removeprefix("Let me see.\n")),
        (
            "openai_gptoss",
            "openai",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
            f"<|channel|>commentary to=functions.weather<|message|>{CALL}<|call|>",
        ),
        ("hunyuan_a13b", "hermes", "<think>\nHm.", f"</think>{ONE}"),
    ],
)
def test_tool_call_is_not_counted_as_reasoning(reasoning: str, tools: str, thought: str, call: str) -> None:
    settings = {"enable_auto_tool_choice": True, "tool_call_parser": tools, "reasoning_parser": reasoning}
    reply = chat(FakeEngine(thought + call), settings, tools=TOOLS).json()
    assert (
        reply["choices"][0]["message"]["tool_calls"] and reply["choices"][0]["message"]["reasoning"] == "Hm."
    )
    num_reasoning = len(thought.removeprefix("<think>\n"))
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_reasoning}


@pytest.mark.parametrize("parser", ["", "qwen3"])
def test_reasoning_config_names_the_marks_and_the_last_words(
    parser: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(REASONING, "entries", {**REASONING.entries})
    config = {"reasoning_start_str": "<think>", "reasoning_end_str": " Enough.</think>"}
    if not parser:
        config = {"reasoning_start_str": "<plan>", "reasoning_end_str": "</plan>"}
    answer = THOUGHT.replace("think", "think" if parser else "plan") + "Yes."
    engine = FakeEngine(answer)
    settings = {"reasoning_config": config | {"reasoning_parser": parser}}
    reply = chat(engine, settings, thinking_token_budget=9).json()
    assert reply["choices"][0]["message"]["reasoning"] and reply["choices"][0]["message"]["content"] == "Yes."
    ids = engine.seen[0][2].reasoning
    assert engine.tokenizer.decode([*ids.last_words, *ids.end]).endswith(config["reasoning_end_str"])
    assert bool(ids.last_words) == bool(parser)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"logprobs": True},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"n": 2, "temperature": 1.0},
        {"stop": ["arg"]},
        {"max_tokens": 40},
        {"include_reasoning": False},
    ],
)
@pytest.mark.parametrize("parser", ["hermes", "pythonic", "openai"])
def test_stream_equals_the_complete_answer(parser: str, body: dict[str, Any]) -> None:
    answers = {
        "hermes": THOUGHT + TWO,
        "pythonic": THOUGHT + '[weather(city="Łódź"), now()]',
        "openai": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.weather<|message|>{CALL}<|call|>",
    }
    settings = {"enable_auto_tool_choice": True, "tool_call_parser": parser, "reasoning_parser": "qwen3"}
    whole_body = {name: value for name, value in body.items() if name != "stream_options"}
    choices = chat(FakeEngine(answers[parser]), settings, tools=TOOLS, **whole_body).json()["choices"]
    for choice in choices:
        answer = plain(choice["message"] | {"finish_reason": choice["finish_reason"]})
        streamed_message = streamed(answers[parser], settings, index=choice["index"], tools=TOOLS, **body)
        assert streamed_message == answer
    assert "stop" in body or "max_tokens" in body or answer["tool_calls"]


def test_required_calls_need_no_parser_and_follow_a_schema() -> None:
    engine = FakeEngine(
        '[{"name": "weather", "parameters": ' + CALL + '}, {"name": "now", "parameters": {}}]'
    )
    (choice,) = chat(engine, tools=TOOLS, tool_choice="required").json()["choices"]
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert calls == [{"name": "weather", "arguments": CALL}, {"name": "now", "arguments": "{}"}]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    constraint = engine.seen[0][2].structured_outputs
    assert constraint is not None
    assert json.loads(constraint.json)["items"]["anyOf"][1]["properties"]["name"] == {"const": "now"}


def test_named_tool_takes_the_whole_answer_as_arguments() -> None:
    engine = FakeEngine(CALL)
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = message(CALL, {}, tools=TOOLS, tool_choice=choice)
    assert answer["tool_calls"][0]["function"] == {"name": "weather", "arguments": CALL}
    assert answer["finish_reason"] == "stop"
    assert streamed(CALL, {}, tools=TOOLS, tool_choice=choice) == plain(answer)
    chat(engine, tools=TOOLS, tool_choice=choice)
    constraint = engine.seen[0][2].structured_outputs
    assert constraint is not None and json.loads(constraint.json) == CITY


def test_unsupported_schema_is_refused() -> None:
    tools = [{"function": {"name": "f", "parameters": {"type": "strange"}}}]
    for choice in ("required", {"function": {"name": "f"}}):
        assert "strange" in refused(chat(tools=tools, tool_choice=choice))["message"]


STRICT = [{"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}]


def follows(engine: FakeEngine, text: str) -> bool:
    """Return whether the grammar of the last request accepts this text."""
    params = engine.seen[-1][2]
    assert params.structured_outputs is not None and engine.inputs.grammars is not None
    matcher = engine.inputs.grammars.compile(params.structured_outputs)
    ids = engine.tokenizer.encode(text, add_special_tokens=False)
    return all(matcher.advance(id) != "error" for id in ids) and matcher.inner.is_accepting()


def test_strict_tool_call_follows_its_schema() -> None:
    engine = FakeEngine(ONE)
    chat(engine, HERMES, tools=TOOLS)
    assert engine.seen[-1][2].structured_outputs is None
    assert chat(engine, HERMES, tools=STRICT).json()["choices"][0]["message"]["tool_calls"]
    assert follows(engine, ONE) and follows(engine, "Just text.") and follows(engine, ONE + "\n" + ONE)
    assert not follows(engine, ONE.replace('"city"', '"town"'))
    assert not follows(engine, ONE.replace("weather", "now"))


@pytest.mark.parametrize(("budget", "is_constrained"), [(None, True), (-1, True), (9, False)])
def test_strict_calls_in_channels_are_constrained_from_the_first_token(
    budget: int | None, is_constrained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a grammar that begins after a mark of Harmony which a call does not have."""
    call = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{CALL}<|call|>"
    plain = byte_tokenizer()
    plain.backend.add_special_tokens([AddedToken(mark, special=True) for mark in re.findall("<[^>]+>", call)])
    tokenizer = Tokenizer(plain.backend, special_tokens={}, chat_template=plain.chat_template)
    monkeypatch.setattr(fake_engine, "byte_tokenizer", lambda: tokenizer)
    monkeypatch.setattr(fake_engine, "VOCAB", len(tokenizer))
    engine = FakeEngine("Hm.")
    settings = {"tool_call_parser": "openai", "reasoning_parser": "openai_gptoss"}
    reply = chat(engine, settings, tools=STRICT, thinking_token_budget=budget)
    assert reply.status_code == 200, reply.text
    params = engine.seen[-1][2]
    assert params.structured_outputs is not None and (params.reasoning is None) == is_constrained


def test_strict_call_may_end_the_reasoning() -> None:
    engine = FakeEngine(THOUGHT + ONE)
    engine.facts.chat_template = OPENS
    chat(engine, HERMES | {"reasoning_parser": "qwen3"}, tools=STRICT)
    reasoning = engine.seen[-1][2].reasoning
    assert reasoning is not None and reasoning.open
    assert [engine.tokenizer.decode([*mark]) for mark in reasoning.breaks] == ["<tool_call>"]


def test_response_format_constrains_answers_without_tool_calls() -> None:
    engine = FakeEngine('{"city": "x"}')
    response_format = {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}
    chat(engine, HERMES, tools=TOOLS, response_format=response_format)
    assert follows(engine, '{"city": "x"}') and follows(engine, ONE.partition("\n")[2])
    assert not follows(engine, "Just text.") and not follows(engine, "{}")
    chat(engine, HERMES, tools=TOOLS, response_format=response_format, tool_choice="required")
    assert follows(engine, '[{"name": "now", "parameters": {}}]') and not follows(engine, '{"city": "x"}')


JSON = {"type": "json_object"}
OPENS = "{{ messages[0].content }}{% if enable_thinking is not false %}<think>\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "body", "is_open"),
    [
        (None, {"response_format": JSON}, None),
        (None, {"response_format": JSON, "chat_template_kwargs": {"enable_thinking": True}}, False),
        (OPENS, {"response_format": JSON}, True),
        (OPENS, {"tools": TOOLS, "tool_choice": "required"}, True),
        (OPENS, {"response_format": JSON, "chat_template_kwargs": {"enable_thinking": False}}, None),
        (OPENS, {"response_format": JSON, "reasoning_effort": "none"}, None),
        (OPENS, {"thinking_token_budget": 7}, True),
        (OPENS, {"thinking_token_budget": -1}, None),
        (OPENS, {}, None),
    ],
)
def test_constraint_starts_after_the_reasoning(
    template: str | None, body: dict[str, Any], is_open: bool | None
) -> None:
    """Catches a grammar that constrains the reasoning, and one that waits for reasoning that never ends."""
    engine = FakeEngine("Hm.</think>{}")
    engine.facts.chat_template = template
    assert chat(engine, {"reasoning_parser": "qwen3"}, **body).status_code == 200
    reasoning = engine.seen[0][2].reasoning
    assert (reasoning and reasoning.open) is is_open
    assert engine.seen[0][2].thinking_token_budget == (
        7 if "thinking_token_budget" in body and is_open else None
    )
    if reasoning:
        assert reasoning.end == tuple(engine.tokenizer.encode("</think>", add_special_tokens=False))


@pytest.mark.parametrize(
    ("body", "reasoning"),
    [
        ({}, "Hm."),
        ({"chat_template_kwargs": {"enable_thinking": False}}, None),
        ({"reasoning_effort": "none"}, None),
        ({"response_format": JSON}, None),
        (
            {
                "continue_final_message": True,
                "add_generation_prompt": False,
                "messages": [{"role": "assistant", "content": "<think>So"}],
            },
            "Hm.",
        ),
        (
            {
                "continue_final_message": True,
                "add_generation_prompt": False,
                "messages": [{"role": "assistant", "content": "<think>So</think>Well"}],
            },
            None,
        ),
    ],
)
def test_reasoning_at_the_start_of_an_answer(body: dict[str, Any], reasoning: str | None) -> None:
    answer = message("Hm.</think>Yes.", {"reasoning_parser": "qwen3"}, **body)
    assert answer["reasoning"] == reasoning
    assert answer["content"] == ("Yes." if reasoning else "Hm.</think>Yes.")


def test_special_tokens_are_kept_for_parsers_that_need_them() -> None:
    engine = FakeEngine("x")
    chat(engine, HERMES, tools=TOOLS)
    chat(engine, HERMES, tools=TOOLS, tool_choice="none")
    assert [seen[2].skip_special_tokens for seen in engine.seen] == [False, True]


def test_tool_call_ids_follow_the_model_format() -> None:
    settings = {"tool_call_parser": "kimi_k2"}
    past = {"id": "functions.now:0", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [past]}]
    body = {"tools": TOOLS, "tool_choice": "required", "messages": messages}
    (call,) = message('[{"name": "now", "parameters": {}}]', settings, **body)["tool_calls"]
    assert call["id"] == "functions.now:1"


def test_failing_plugin_is_a_config_error(tmp_path: Path) -> None:
    plugin = tmp_path / "broken.py"
    plugin.write_text("import nothing_of_this_name")
    with pytest.raises(ConfigError, match="broken.py failed: ModuleNotFoundError: .*nothing_of_this_name"):
        make_settings({"reasoning_parser_plugin": str(plugin)})


def test_plugin_registers_its_parsers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOOL_PARSERS, "entries", dict(TOOL_PARSERS.entries))
    plugin = tmp_path / "shout.py"
    plugin.write_text(
        "from quire.text.parsers import tool_parser\n"
        "from quire.text.parsers.calls import ToolParser\n"
        "@tool_parser('shout')\n"
        "class Shout(ToolParser):\n"
        "    def script(self):\n"
        "        while (yield from self.until(('CALL ',), self.text)):\n"
        "            yield from self.take('CALL ')\n"
        "            self.start((yield from self.header('{')) or '')\n"
        "            yield from self.json_value(self.arguments)\n"
    )
    settings = {
        "tool_parser_plugin": str(plugin),
        "tool_call_parser": "shout",
        "enable_auto_tool_choice": True,
    }
    answer = message('CALL now{"a": 1}', settings, tools=TOOLS)
    assert answer["tool_calls"][0]["function"] == {"name": "now", "arguments": '{"a": 1}'}
