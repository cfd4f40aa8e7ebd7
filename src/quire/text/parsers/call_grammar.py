"""Grammars that constrain outputs with optional tool calls, in the formats of the tool parsers."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.errors import RequestError
from quire.text.parsers.calls import types_of

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

_PLACEHOLDERS = re.compile(r"(NAME|ARGUMENTS|PARAMETERS|DIGITS|KEY|IS_STRING|TYPE|HEADER|\n+)")
_MAX_CHARS = 1 << 20
"""Maximum characters of a grammar: every parameter with a reference repeats the schema's definitions."""
_ANY_KEY = r"/[^<>\"=:]{1,64}/"
_OTHER_TYPE = "/number|integer|boolean|object|array|null/"
_HEADER_TEXT = r"/[ ][^<{\n]{0,32}/", r"(/[^<{\n]{1,32}/)?"
"""Text after the name in the header of a message, and after one of the header's marks."""
_TERMINALS = (r"TEXT: /(.|\n)*/", r"SPACE: /[ \n]{1,8}/", "")


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Format of a model's tool calls. A line break stands for optional white space."""

    opening: str
    """Text before calls, such as `<tool_call>`; empty if the calls are the whole output."""
    call: str
    """Text of one call, with the placeholders NAME, DIGITS and HEADER (the rest of Harmony's header of a
    message), and ARGUMENTS (JSON) or PARAMETERS."""
    parameter: str = ""
    """Text of one parameter, with the placeholders KEY, VALUE, IS_STRING and TYPE; empty for JSON
    arguments."""
    before: str = ""
    """Text between the opening text and the first call."""
    between: str = ""
    after: str = ""
    """Text after the last call."""
    repeats: bool = False
    """Whether the opening text precedes every call."""
    separator: str = ""
    """Text between parameters."""
    quotes: bool = False
    """Whether string parameters are written as JSON strings."""
    string_mark: str = ""
    """Mark before and after a string parameter."""
    text_end: str = ""
    """Text that ends a string parameter. Default: the text after the value, up to its last `>`."""
    openings: tuple[str, ...] = ()
    """Other texts before calls."""
    first: str = ""
    """Text before a call at the beginning of the output."""
    free: tuple[str, ...] = ()
    """Texts with special tokens that may be between the parts of free text, as of messages in channels. With
    any, an answer cannot be JSON alone."""


def _list(opening: str, call: str, closing: str = "") -> CallFormat:
    return CallFormat(opening, call, before="\n[\n", between=",\n", after=f"\n]\n{closing}")


_CALL = '{"name": "NAME", "arguments": ARGUMENTS}'
_HERMES = CallFormat("<tool_call>", f"\n{_CALL}\n</tool_call>", repeats=True)
_FUNCTION = CallFormat(
    "<tool_call>",
    "\n<function=NAME>\nPARAMETERS</function>\n</tool_call>",
    "<parameter=KEY>\nVALUE</parameter>\n",
    repeats=True,
)
_ARGUMENT_PAIRS = CallFormat(
    "<tool_call>",
    "NAME\nPARAMETERS</tool_call>",
    "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
    repeats=True,
)
_PYTHON = CallFormat(
    "", "NAME(PARAMETERS)", "KEY=VALUE", before="[", between=", ", after="]", separator=", ", quotes=True
)
_GEMMA = CallFormat(
    "<|tool_call>",
    "call:NAME{PARAMETERS}<tool_call|>",
    "KEY:VALUE",
    repeats=True,
    separator=",",
    string_mark='<|"|>',
)
_M3 = "]<]minimax[>["


def _invoke(mark: str, prefix: str = "", attribute: str = "") -> CallFormat:
    return CallFormat(
        f"<{mark}>",
        f'<{prefix}invoke name="NAME">\nPARAMETERS</{prefix}invoke>',
        f'<{prefix}parameter name="KEY"{attribute}>VALUE</{prefix}parameter>\n',
        before="\n",
        between="\n",
        after=f"\n</{mark}>",
    )


FORMATS = {
    "apertus": _list("<|tools_prefix|>", '{"NAME": ARGUMENTS}', "<|tools_suffix|>"),
    "cohere_command3": _list(
        "<|START_ACTION|>",
        '{"tool_call_id": "DIGITS", "tool_name": "NAME", "parameters": ARGUMENTS}',
        "<|END_ACTION|>",
    ),
    "deepseek_v3": CallFormat(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
        between="\n",
        after="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": CallFormat(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>",
        between="\n",
        after="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": _invoke("｜DSML｜function_calls", "｜DSML｜", ' string="IS_STRING"'),
    "deepseek_v4": _invoke("｜DSML｜tool_calls", "｜DSML｜", ' string="IS_STRING"'),
    "dots": _invoke("dots_function_call"),
    "functiongemma": replace(
        _GEMMA,
        opening="<start_function_call>",
        call="call:NAME{PARAMETERS}<end_function_call>",
        string_mark="<escape>",
    ),
    "gemma4": _GEMMA,
    "gigachat3": CallFormat("<|function_call|>", f"\n{_CALL}", repeats=True),
    "glm45": _ARGUMENT_PAIRS,
    "granite": _list("<|tool_call|>", _CALL),
    "granite-20b-fc": CallFormat("<function_call>", f"\n{_CALL}", repeats=True),
    "hermes": _HERMES,
    "hy_v3": CallFormat(
        "<tool_calls>",
        "<tool_call>NAME<tool_sep>\nPARAMETERS</tool_call>",
        "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
        before="\n",
        between="\n",
        after="\n</tool_calls>",
    ),
    "inkling": CallFormat(
        "<|content_invoke_tool_json|>",
        '\n{"name": "NAME", "args": ARGUMENTS}\n<|end_message|>',
        repeats=True,
        free=(
            *("<|message_model|>", "<|content_text|>", "<|content_thinking|>", "<|end_message|>"),
            "<|content_model_end_sampling|>",
        ),
    ),
    "internlm": CallFormat(
        "<|action_start|>",
        '<|plugin|>\n{"name": "NAME", "parameters": ARGUMENTS}<|action_end|>',
        repeats=True,
    ),
    "jamba": _list("<tool_calls>", _CALL, "</tool_calls>"),
    "kimi_k2": CallFormat(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.NAME:DIGITS<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
        between="\n",
        after="<|tool_calls_section_end|>",
    ),
    "kimi_k3": CallFormat(
        "<|open|>tools<|sep|>",
        '<|open|>call tool="NAME" index="DIGITS"<|sep|>\nPARAMETERS<|close|>call<|sep|>',
        '<|open|>argument key="KEY" type="TYPE"<|sep|>VALUE<|close|>argument<|sep|>\n',
        before="\n",
        between="\n",
        after="\n<|close|>tools<|sep|>",
        text_end="<|close|>",
        free=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    "lfm2": replace(_PYTHON, opening="<|tool_call_start|>", after="]<|tool_call_end|>"),
    "llama3_json": CallFormat("", '{"name": "NAME", "parameters": ARGUMENTS}', between=";\n"),
    "longcat": CallFormat("<longcat_tool_call>", f"\n{_CALL}\n</longcat_tool_call>", repeats=True),
    "minicpm5": CallFormat(
        "<|tool_call_start|>",
        '<function name="NAME">\nPARAMETERS</function>',
        '<param name="KEY">VALUE</param>\n',
        before="\n",
        between="\n",
        after="\n<|tool_call_end|>",
    ),
    "minimax": CallFormat("<tool_calls>", _CALL, before="\n", between="\n", after="\n</tool_calls>"),
    "minimax_m2": _invoke("minimax:tool_call"),
    "minimax_m3": CallFormat(
        _M3,
        f'<invoke name="NAME">\nPARAMETERS{_M3}</invoke>',
        f"{_M3}<KEY>VALUE{_M3}</KEY>\n",
        before=f"<tool_call>\n{_M3}",
        between=f"\n{_M3}",
        after=f"\n{_M3}</tool_call>",
        text_end=_M3,
    ),
    "mistral": _list("[TOOL_CALLS]", _CALL),
    "muse_glimmer": replace(
        _invoke("atem:function_calls", "atem:"), free=("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")
    ),
    "olmo3": replace(
        _PYTHON, opening="<function_calls>", before="\n", between="\n", after="\n</function_calls>"
    ),
    "openai": CallFormat(
        "<|channel|>commentary to=functions.",
        "NAMEHEADER<|message|>ARGUMENTS<|call|>",
        repeats=True,
        openings=("<|start|>assistant to=functions.",),
        first=" to=functions.",
        free=(
            *(f"<|channel|>{channel}<|message|>" for channel in ("analysis", "commentary", "final")),
            *("<|end|>", "<|return|>", "<|start|>assistant"),
        ),
    ),
    "phi4_mini_json": CallFormat("functools[", _CALL, between=",\n", after="]"),
    "pythonic": _PYTHON,
    "qwen3_coder": _FUNCTION,
    "seed_oss": replace(
        _FUNCTION, opening="<seed:tool_call>", call=_FUNCTION.call.replace("tool_call>", "seed:tool_call>")
    ),
    "step3": CallFormat(
        "<｜tool_calls_begin｜>",
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">\nPARAMETERS</steptml:invoke>'
        "<｜tool_call_end｜>",
        '<steptml:parameter name="KEY">VALUE</steptml:parameter>\n',
        before="\n",
        between="\n",
        after="\n<｜tool_calls_end｜>",
    ),
    "xlam": CallFormat("", _CALL, before="[", between=", ", after="]"),
}
"""Call formats by the names of their parsers."""
_ALIASES = {
    "cohere_command4": "cohere_command3",
    "ernie45": "hermes",
    "glm47": "glm45",
    "granite4": "hermes",
    "hunyuan_a13b": "jamba",
    "ling3": "glm45",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "mimo": "qwen3_coder",
    "poolside_v1": "glm45",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
}
_NEEDED_MARKS = {"openai": "<|message|>", "gigachat3": "<|function_call|>", "kimi_k3": "<|sep|>"}
"""Special tokens without which the calls of a parser have no grammar: the model writes them in another way,
or their marks are not told from text."""
_NEW_MISTRAL = CallFormat("[TOOL_CALLS]", "NAME[ARGS]ARGUMENTS", repeats=True)


def _open_source(text: str) -> str:
    """Return the text with the tags of published checkpoints of Hunyuan 3."""
    return re.sub("(tool_calls?|tool_sep|arg_key|arg_value)>", r"\1:opensource>", text)


_HY_V3 = FORMATS["hy_v3"]
_OPEN_HY_V3 = replace(
    _HY_V3,
    opening=_open_source(_HY_V3.opening),
    call=_open_source(_HY_V3.call),
    parameter=_open_source(_HY_V3.parameter),
    after=_open_source(_HY_V3.after),
)
"""Format of the published checkpoints of Hunyuan 3."""


def format_of(parser: str, tokenizer: "Tokenizer") -> CallFormat | None:
    """Return the call format of a parser, or None if the parser has no grammar. Newer Mistral models, with
    the token [ARGS] before the arguments, have a format of their own."""
    marks = _special_tokens(tokenizer)
    if parser == "mistral" and "[ARGS]" in marks:
        return _NEW_MISTRAL
    if parser == "hy_v3" and "<tool_calls:opensource>" in marks:
        return _OPEN_HY_V3
    if parser in _NEEDED_MARKS and _NEEDED_MARKS[parser] not in marks:
        return None
    return FORMATS.get(_ALIASES.get(parser, parser))


def calls_grammar(
    format: CallFormat,
    schemas: Mapping[str, Mapping[str, Any]],
    tokenizer: "Tokenizer",
    *,
    answer_schema: Mapping[str, Any] | None = None,
) -> str:
    """Return a Lark grammar of an output: free text or JSON of the `answer_schema`, and tool calls.

    Every call names a tool of `schemas` and has arguments that match its schema. Marks that are special
    tokens are matched by token id. An `answer_schema` needs a format with an opening mark."""
    assert format.opening or answer_schema is None
    return _Grammar(format, _special_tokens(tokenizer)).write(schemas, answer_schema)


class FreeTextMarks(NamedTuple):
    """The marks until which the text of a grammar is free."""

    triggers: list[str]
    """Texts that begin calls; empty if a special token does."""
    not_first: str
    """Character that begins calls if it is the first of the output; empty: no such character."""


_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"')
_PLAIN_TEXT = re.compile(r"plain: /\[\^\\?(.)\]\(\.\|\\n\)\*/")


def free_text_marks(grammar: str) -> FreeTextMarks | None:
    """Return the marks until which texts of a grammar are free, if it has the form in which `calls_grammar`
    writes grammars of optional calls; None for other grammars."""
    start, *rules = grammar.split("\n")
    if not grammar.endswith("\n".join(_TERMINALS)):
        return None
    if start.startswith("start: plain? |"):
        plain = next(filter(None, map(_PLAIN_TEXT.fullmatch, rules)), None)
        return None if plain is None else FreeTextMarks([], plain[1])
    begun = next((rule for rule in rules if rule.startswith(("begun: TEXT ", "begun[lazy]: TEXT "))), "")
    if not (start.startswith("start: (begun ") and start.endswith(")* TEXT") and begun):
        return None
    marks = begun.partition(": TEXT ")[2].split(" | TEXT ")
    if all(mark.startswith("<[") for mark in marks):
        return FreeTextMarks([], "")
    is_text = all(_LITERAL.fullmatch(mark) for mark in marks)
    return FreeTextMarks([json.loads(mark) for mark in marks], "") if is_text else None


def _special_tokens(tokenizer: "Tokenizer") -> dict[str, int]:
    return {token.content: id for id, token in tokenizer.added_tokens.items() if tokenizer.is_special(id)}


class _Grammar:
    """Builder of the Lark grammar that constrains the output of one request."""

    def __init__(self, format: CallFormat, marks: Mapping[str, int]) -> None:
        self.format = format
        self.marks = marks
        self.rules: list[str] = []
        self._num_chars = 0

    def _add(self, rule: str) -> None:
        self._num_chars += len(rule)
        if self._num_chars > _MAX_CHARS:
            raise RequestError(
                f"the grammar of strict tools has more than {_MAX_CHARS:,} characters; use fewer or smaller "
                "schemas, or leave `strict` out",
                param="tools",
            )
        self.rules.append(rule)

    def write(self, schemas: Mapping[str, Mapping[str, Any]], answer_schema: Mapping[str, Any] | None) -> str:
        format = self.format
        for index, (name, schema) in enumerate(schemas.items()):
            parameters = self._parameters(f"p_{index}", schema) if format.parameter else ""
            symbols = self._symbols(format.call, name=name, schema=schema, parameters=parameters)
            self._add(f"call_{index}: {symbols}")
        calls = f"({' | '.join(f'call_{index}' for index in range(len(schemas)))})"
        if format.repeats:
            body = f"{calls} (SPACE? opening {calls})*"
        else:
            parts = self._symbols(format.before), self._symbols(format.between), self._symbols(format.after)
            body = f"{parts[0]} {calls} ({parts[1]} {calls})* {parts[2]}"
        start = self._start(body, answer_schema)
        return "\n".join([f"start: {start}", *self.rules, *_TERMINALS])

    def _start(self, body: str, answer_schema: Mapping[str, Any] | None) -> str:
        """Return the grammar rule of an output: free text or JSON, and tool calls."""
        opening = self.format.opening
        if not opening:
            first = (self.format.before or self.format.call)[0]
            self._add(f"plain: /[^{re.escape(first)}](.|\\n)*/")
            return f"plain? | {body}"
        openings = [self._symbols(text) for text in (opening, *self.format.openings)]
        self._add(f"opening: {' | '.join(openings)}")
        if answer_schema is not None:
            return f"{_json(answer_schema)} | opening {body}"
        lazy = "" if any(mark in opening for mark in self.marks) else "[lazy]"
        self._add(f"begun{lazy}: {' | '.join(f'TEXT {symbols}' for symbols in openings)}")
        parts = f"begun {body}"
        free = [self._symbols(text) for text in self.format.free if any(mark in text for mark in self.marks)]
        if free:
            self._add(f"free: TEXT ({' | '.join(free)})")
            parts = f"{parts} | free"
        if not self.format.first:
            return f"({parts})* TEXT"
        self._add(f"first[lazy]: {_literal(self.format.first)}")
        return f"(first {body})? ({parts})* TEXT"

    def _mark(self, text: str) -> str:
        return f"<[{self.marks[text]}]>" if text in self.marks else _literal(text)

    def _symbols(self, text: str, **fields: Any) -> str:
        """Convert text to grammar symbols: special tokens, literals, white space and filled placeholders."""
        marks = {*self.marks, self.format.text_end} - {""}
        known = sorted((mark for mark in marks if mark in text), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, known))})", text) if known else [text]
        return " ".join(symbol for part in parts for symbol in self._part(part, fields))

    def _part(self, part: str, fields: Mapping[str, Any]) -> Iterator[str]:
        if part in self.marks or (part and part == self.format.text_end):
            yield self._mark(part)
            return
        for piece in filter(None, _PLACEHOLDERS.split(part)):
            match piece:
                case "ARGUMENTS":
                    yield _json(fields["schema"])
                case "PARAMETERS":
                    yield fields["parameters"]
                case "NAME" | "IS_STRING":
                    yield _literal(fields[piece.lower()])
                case "TYPE" if fields["is_string"] == "true":
                    yield _literal("string")
                case "TYPE":
                    yield _OTHER_TYPE
                case "HEADER":
                    marks = (self._mark(mark) for mark in ("<|channel|>", "<|constrain|>"))
                    yield f"({_HEADER_TEXT[0]} | ({' | '.join(marks)}) {_HEADER_TEXT[1]})*"
                case "KEY":
                    yield _ANY_KEY if fields["key"] is None else _literal(fields["key"])
                case "DIGITS":
                    yield "/[0-9]+/"
                case _:
                    yield "SPACE?" if piece.isspace() else _literal(piece)

    def _parameters(self, name: str, schema: Mapping[str, Any]) -> str:
        """Return the grammar symbols of a tool's parameters, in the order of its schema. A schema without
        properties allows any parameters."""
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            if schema.get("additionalProperties") is False:
                return ""
            self._add(f"{name}: {self._parameter(name, None, {})}")
            separator = self.format.separator
            return f"({name} ({_literal(separator)} {name})*)?" if separator else f"{name}*"
        required = set(schema.get("required") or ())
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        keys = list(properties)
        for index, key in enumerate(keys):
            value = properties[key]
            merged = {**definitions, **value} if "$ref" in json.dumps(value) else value
            self._add(f"{name}_{index}: {self._parameter(f'{name}_{index}', key, merged)}")
        if self.format.separator:
            return self._separated(name, [key in required for key in keys])
        return " ".join(f"{name}_{index}{'' if key in required else '?'}" for index, key in enumerate(keys))

    def _separated(self, name: str, required: list[bool]) -> str:
        """Return the grammar symbols of parameters, with commas between those that are present."""
        comma, first, later = _literal(self.format.separator), "", ""
        for index in reversed(range(len(required))):
            rule = f"{name}_{index}"
            is_required = required[index]
            self._add(
                f"{rule}_first: {rule} {later}" + ("" if is_required else f" | {first or _literal('')}")
            )
            self._add(f"{rule}_later: ({comma} {rule}){'' if is_required else '?'} {later}")
            first, later = f"{rule}_first", f"{rule}_later"
        return first

    def _parameter(self, name: str, key: str | None, schema: Any) -> str:
        """Return the grammar symbols of one parameter; a `key` of None allows any key."""
        types = types_of(schema)
        refers = isinstance(schema, Mapping) and "$ref" in schema
        is_text = not self.format.quotes and ("string" in types or not (types or refers))
        fields = {"key": key, "is_string": "true" if is_text else "false"}
        head, _, tail = self.format.parameter.partition("VALUE")
        symbols = self._symbols(head, **fields)
        choices = schema.get("enum") if isinstance(schema, Mapping) and types == {"string"} else None
        mark = f"{self._mark(self.format.string_mark)} " if is_text and self.format.string_mark else ""
        if not is_text or isinstance(choices, list):
            values = map(_literal, map(str, choices)) if is_text and choices else [_json(schema)]
            end = mark or "SPACE? "
            return f"{symbols} {mark}({' | '.join(values)}) {end}{self._symbols(tail, **fields)}".rstrip()
        end = self.format.string_mark or self.format.text_end or tail[: tail.rindex(">") + 1]
        lazy = "" if end in self.marks else "[lazy]"
        self._add(f"{name}_text{lazy}: TEXT {self._mark(end)}")
        return f"{symbols} {mark}{name}_text {self._symbols(tail.removeprefix(end), **fields)}".rstrip()


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Any) -> str:
    return f"%json {json.dumps(schema)}"
