"""Tools and structured output of a request: the allowed and the required calls, and the constraint of the
output, which has one of three equivalent forms in a body."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from quire.errors import RequestError
from quire.server.http.errors import InvalidBody
from quire.server.openai.answer_pieces import NAMED, REQUIRED, Parsers, ToolUse
from quire.server.openai.requests import ChatBody, GenerateBody
from quire.text.parsers.call_grammar import calls_grammar, format_of
from quire.text.parsers.calls import is_name
from quire.text.tokenizer import Tokenizer

_EMPTY: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""Parameter schema of a function without parameters."""
_ANY: dict[str, Any] = {"type": "object"}
_WHITE = " "
"""Whitespace pattern of JSON: at most one space between parts, so that models cannot write endless spaces."""
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_whitespace_pattern": "whitespace_pattern",
}
"""Older names of fields, each with the key of `structured_outputs` that replaced it."""
_LITERAL = ("const", "enum", "default", "examples")
"""Keys of a schema that hold values, not schemas."""


def _schema_only(constraint: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the JSON schema if it is all that a structured output constraint consists of, else None."""
    match constraint:
        case {"json": dict(schema), **more} if not more:
            return schema
        case {"json_object": True, **more} if not more:
            return {"type": "object"}
    return None


def read_tools(
    body: ChatBody, parsers: Parsers, tokenizer: Tokenizer | None
) -> tuple[ToolUse, dict[str, Any] | None, bool]:
    """Return the tool use, the structured output constraint (None: none), and whether the constraint applies
    to the whole output and not only to optional tool calls."""
    tools = _tool_use(body, auto=parsers.auto)
    requested = constraint_of(body)
    if tools.calls in (REQUIRED, NAMED):
        if requested is not None and body.response_format is None:
            raise RequestError(
                "You can only either use constraints for structured outputs or tools, not both.",
                param="structured_outputs",
            )
        named = tools.calls == NAMED
        schema = tools.schemas[tools.name] if named else calls_schema(tools.schemas, parallel=tools.parallel)
        return tools, {"json": schema, "whitespace_pattern": _WHITE}, True
    grammar = None
    if tools.calls == "auto" and tokenizer is not None:
        grammar = _optional_calls_grammar(tools, parsers.tools, tokenizer, requested)
    return tools, grammar or requested, requested is not None


def _optional_calls_grammar(
    tools: ToolUse, parser: str | None, tokenizer: Tokenizer, requested: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Return the constraint of an output with optional calls, or None if the parser's format has no grammar.
    The output is JSON of the `requested` schema, or text with calls; calls of strict tools match their
    schemas."""
    answer_schema, format = _schema_only(requested), format_of(parser or "", tokenizer)
    if requested is not None and answer_schema is None:
        return None
    if format is None or not (tools.strict or answer_schema):
        return None
    if answer_schema and (format.free or not format.opening):
        return None
    schemas = {name: tools.schemas[name] if name in tools.strict else _ANY for name in tools.schemas}
    return {"grammar": calls_grammar(format, schemas, tokenizer, answer_schema=answer_schema)}


def _tool_use(body: ChatBody, *, auto: bool) -> ToolUse:
    """Check and return the tool use of a request. `auto`: whether the server parses optional calls."""
    if body.tools is not None and not body.tools:
        raise InvalidBody("`tools` must not be an empty array. Leave it out instead.", param="tools")
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none"):
            raise InvalidBody("When using `tool_choice`, `tools` must be set.", param="tool_choice")
        return ToolUse()
    functions = [_read_function(index, tool) for index, tool in enumerate(body.tools)]
    schemas = {name: schema for name, schema, _ in functions}
    parallel = body.parallel_tool_calls is not False
    if isinstance(choice, dict):
        return ToolUse(NAMED, _read_choice(choice, schemas), schemas, parallel)
    if choice in (None, "auto") and not auto:
        raise RequestError(
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
            param="tool_choice",
        )
    strict = frozenset(name for name, _, is_strict in functions if is_strict)
    return ToolUse(choice or "auto", "", schemas, parallel, strict)


def _read_function(index: int, tool: Mapping[str, Any]) -> tuple[str, dict[str, Any], bool]:
    """Return the name of a tool, the schema of its parameters, and whether it is strict."""
    where = f"tools[{index}]"
    if tool.get("type", "function") != "function":
        raise RequestError(f"{where}.type must be 'function', not {tool['type']!r:.80}", param="tools")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise RequestError(f"{where}.function must be an object with a name", param="tools")
    name = function.get("name")
    if not isinstance(name, str) or not is_name(name):
        raise RequestError(
            f"{where}.function.name must be a word without quotes, brackets or commas, not {name!r:.80}",
            param="tools",
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(f"{where}.function.parameters must be a JSON schema, an object", param="tools")
    return name, parameters or _EMPTY, function.get("strict") is True


def _read_choice(choice: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type", "function") != "function" or not isinstance(name, str):
        raise RequestError(
            '`tool_choice` must be none, auto, required or {"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    if name not in schemas:
        raise InvalidBody(
            f"The tool specified in `tool_choice` does not match any of the specified `tools`: {name!r:.80}; "
            f"there are {', '.join(schemas)}",
            param="tool_choice",
        )
    return name


def calls_schema(schemas: Mapping[str, Mapping[str, Any]], *, parallel: bool) -> dict[str, Any]:
    """Return the JSON schema of a list of tool calls. `schemas`: the parameter schemas by tool name; each is
    one of the `$defs`, and its own references are adjusted."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{index}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, name in enumerate(schemas)
    ]
    return {
        "type": "array",
        "minItems": 1,
        **({} if parallel else {"maxItems": 1}),
        "items": {"anyOf": calls},
        "$defs": {
            str(index): _move_references(schema, index) for index, schema in enumerate(schemas.values())
        },
    }


def _move_references(schema: Any, index: int) -> Any:
    if isinstance(schema, list):
        return [_move_references(item, index) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: f"#/$defs/{index}{value[1:]}"
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else (value if key in _LITERAL and not isinstance(value, dict) else _move_references(value, index))
        for key, value in schema.items()
    }


def constraint_of(body: GenerateBody) -> dict[str, Any] | None:
    """Return the structured output constraint of a request in the format of SamplingParams, or None. Raise
    RequestError if the request has several."""
    extra = body.model_extra or {}
    guided = {key: extra[name] for name, key in GUIDED.items() if extra.get(name) not in (None, False)}
    forms = {
        "response_format": _from_format(body.response_format),
        "structured_outputs": body.structured_outputs,
        "guided_*": guided if guided.keys() - {"whitespace_pattern"} else None,
    }
    constraints = {name: constraint for name, constraint in forms.items() if constraint is not None}
    if len(constraints) > 1:
        raise RequestError(
            f"{' and '.join(constraints)} both constrain the output; send one of them",
            param=next(iter(constraints)),
        )
    return next(iter(constraints.values()), None)


def _from_format(format: dict[str, Any] | None) -> dict[str, Any] | None:
    if format is None:
        return None
    kind = format.get("type")
    if not isinstance(kind, str) or kind not in _FORMATS:
        known = ", ".join(_FORMATS)
        raise RequestError(
            f"`response_format` has no type {kind!r:.80}; known: {known}", param="response_format"
        )
    return _FORMATS[kind](format)


def _from_schema(format: dict[str, Any]) -> dict[str, Any]:
    inner = format.get("json_schema")
    name, schema = (inner.get("name"), inner.get("schema")) if isinstance(inner, dict) else (None, None)
    if not isinstance(schema, dict) or not isinstance(name, str):
        raise InvalidBody(
            "When response_format type is 'json_schema', the 'json_schema' field must be provided: an object "
            "with a `name` and a `schema`, which is an object",
            param="response_format",
        )
    return {"json": schema}


_FORMATS: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
    "text": lambda format: None,
    "json_object": lambda format: {"json_object": True},
    "json_schema": _from_schema,
    "structural_tag": lambda format: {"structural_tag": json.dumps(format)},
}
