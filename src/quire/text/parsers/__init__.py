"""Output parsers: split the output text of a model into text, reasoning and tool calls."""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from quire.data.output_pieces import Piece, TextPiece
from quire.errors import ConfigError
from quire.registry import LazyTable
from quire.text.parsers.reasoning import Reasoning, opened_by
from quire.text.parsers.streaming import Parser, join

_PACKAGE = "quire.text.parsers"
Factory = TypeVar("Factory", bound=Callable[..., Parser])

REASONING = LazyTable(
    "reasoning parser",
    {
        "cohere_command3": f"{_PACKAGE}.reasoning:COHERE",
        "cohere_command4": f"{_PACKAGE}.reasoning:COHERE",
        "deepseek_r1": f"{_PACKAGE}.reasoning:THINK",
        "deepseek_v3": f"{_PACKAGE}.reasoning:THINK_ASKED",
        "deepseek_v4": f"{_PACKAGE}.reasoning:THINK_ASKED",
        "dots": f"{_PACKAGE}.reasoning:QWEN3",
        "ernie45": f"{_PACKAGE}.reasoning:ERNIE45",
        "gemma4": f"{_PACKAGE}.reasoning:GEMMA4",
        "glm45": f"{_PACKAGE}.reasoning:QWEN3",
        "glm47": f"{_PACKAGE}.reasoning:QWEN3",
        "granite": f"{_PACKAGE}.reasoning:GRANITE",
        "holo2": f"{_PACKAGE}.reasoning:THINK",
        "hunyuan_a13b": f"{_PACKAGE}.reasoning:HUNYUAN_A13B",
        "hy_v3": f"{_PACKAGE}.reasoning:HY_V3",
        "identity": f"{_PACKAGE}.reasoning:Identity",
        "inkling": f"{_PACKAGE}.inkling:REASONING",
        "kimi_k2": f"{_PACKAGE}.reasoning:KIMI_K2",
        "kimi_k3": f"{_PACKAGE}.reasoning:KIMI_K3",
        "ling3": f"{_PACKAGE}.reasoning:QWEN3",
        "mimo": f"{_PACKAGE}.reasoning:QWEN3",
        "minimax_m2": f"{_PACKAGE}.reasoning:MINIMAX_M2",
        "minimax_m2_append_think": f"{_PACKAGE}.reasoning:AppendThink",
        "minimax_m3": f"{_PACKAGE}.reasoning:MINIMAX_M3",
        "mistral": f"{_PACKAGE}.reasoning:MISTRAL",
        "muse_glimmer": f"{_PACKAGE}.muse:REASONING",
        "nemotron_v3": f"{_PACKAGE}.reasoning:QWEN3",
        "olmo3": f"{_PACKAGE}.reasoning:THINK",
        "openai_gptoss": f"{_PACKAGE}.harmony:REASONING",
        "poolside_v1": f"{_PACKAGE}.reasoning:QWEN3",
        "qwen3": f"{_PACKAGE}.reasoning:QWEN3",
        "seed_oss": f"{_PACKAGE}.reasoning:SEED_OSS",
        "step3": f"{_PACKAGE}.reasoning:THINK",
        "step3p5": f"{_PACKAGE}.reasoning:QWEN3",
    },
)
"""Factories of reasoning parsers by name; they are called with the rendered prompt."""

TOOLS = LazyTable(
    "tool parser",
    {
        "apertus": f"{_PACKAGE}.json_calls:APERTUS",
        "cohere_command3": f"{_PACKAGE}.json_calls:COHERE",
        "cohere_command4": f"{_PACKAGE}.json_calls:COHERE",
        "deepseek_v3": f"{_PACKAGE}.named_calls:DEEPSEEK_V3",
        "deepseek_v31": f"{_PACKAGE}.named_calls:DEEPSEEK_V31",
        "deepseek_v32": f"{_PACKAGE}.tagged_calls:DEEPSEEK_V32",
        "deepseek_v4": f"{_PACKAGE}.tagged_calls:DEEPSEEK_V4",
        "dots": f"{_PACKAGE}.tagged_calls:DOTS",
        "ernie45": f"{_PACKAGE}.json_calls:ERNIE45",
        "functiongemma": f"{_PACKAGE}.gemma:FUNCTION_GEMMA",
        "gemma4": f"{_PACKAGE}.gemma:GEMMA4",
        "gigachat3": f"{_PACKAGE}.json_calls:GIGACHAT3",
        "glm45": f"{_PACKAGE}.tagged_calls:GLM45",
        "glm47": f"{_PACKAGE}.tagged_calls:GLM45",
        "granite": f"{_PACKAGE}.json_calls:GRANITE",
        "granite-20b-fc": f"{_PACKAGE}.json_calls:GRANITE_20B",
        "granite4": f"{_PACKAGE}.json_calls:HERMES",
        "hermes": f"{_PACKAGE}.json_calls:HERMES",
        "hunyuan_a13b": f"{_PACKAGE}.json_calls:TOOL_CALLS",
        "hy_v3": f"{_PACKAGE}.tagged_calls:HyV3",
        "inkling": f"{_PACKAGE}.inkling:Inkling",
        "internlm": f"{_PACKAGE}.json_calls:INTERNLM",
        "jamba": f"{_PACKAGE}.json_calls:TOOL_CALLS",
        "kimi_k2": f"{_PACKAGE}.named_calls:KIMI_K2",
        "kimi_k3": f"{_PACKAGE}.tagged_calls:KIMI_K3",
        "lfm2": f"{_PACKAGE}.pythonic:LFM2",
        "ling3": f"{_PACKAGE}.tagged_calls:GLM45",
        "llama3_json": f"{_PACKAGE}.json_calls:LLAMA_JSON",
        "llama4_json": f"{_PACKAGE}.json_calls:LLAMA_JSON",
        "llama4_pythonic": f"{_PACKAGE}.pythonic:LLAMA4_PYTHONIC",
        "longcat": f"{_PACKAGE}.json_calls:LONGCAT",
        "mimo": f"{_PACKAGE}.tagged_calls:QWEN3_CODER",
        "minicpm5": f"{_PACKAGE}.tagged_calls:MINICPM5",
        "minimax": f"{_PACKAGE}.json_calls:TOOL_CALLS",
        "minimax_m2": f"{_PACKAGE}.tagged_calls:MINIMAX_M2",
        "minimax_m3": f"{_PACKAGE}.minimax_m3:MinimaxM3",
        "mistral": f"{_PACKAGE}.json_calls:Mistral",
        "muse_glimmer": f"{_PACKAGE}.muse:MuseGlimmer",
        "olmo3": f"{_PACKAGE}.pythonic:OLMO3",
        "openai": f"{_PACKAGE}.harmony:Harmony",
        "phi4_mini_json": f"{_PACKAGE}.json_calls:PHI4_MINI",
        "poolside_v1": f"{_PACKAGE}.tagged_calls:GLM45",
        "pythonic": f"{_PACKAGE}.pythonic:PYTHONIC",
        "qwen3_coder": f"{_PACKAGE}.tagged_calls:QWEN3_CODER",
        "qwen3_xml": f"{_PACKAGE}.tagged_calls:QWEN3_CODER",
        "seed_oss": f"{_PACKAGE}.tagged_calls:SEED_OSS",
        "step3": f"{_PACKAGE}.tagged_calls:STEP3",
        "step3p5": f"{_PACKAGE}.tagged_calls:QWEN3_CODER",
        "xlam": f"{_PACKAGE}.json_calls:XLAM",
    },
)
"""Factories of tool parsers by name; they are called with `schemas=` and `make_id=`."""


class Chain:
    """A reasoning parser, followed by a tool parser for the text outside of the reasoning."""

    def __init__(self, reasoning: Parser, tools: Parser) -> None:
        self.reasoning = reasoning
        self.tools = tools
        self.keeps_special_tokens = reasoning.keeps_special_tokens or tools.keeps_special_tokens
        self.reasoning_marks, self.opened = reasoning.reasoning_marks, reasoning.opened
        self.reasoning_breaks = reasoning.reasoning_breaks

    def feed(self, text: str) -> list[Piece]:
        return self._parse_tools(self.reasoning.feed(text))

    def end(self) -> list[Piece]:
        return join(self._parse_tools(self.reasoning.end()) + self.tools.end())

    def parse(self, text: str) -> list[Piece]:
        return join(self.feed(text) + self.end())

    def _parse_tools(self, pieces: list[Piece]) -> list[Piece]:
        out: list[Piece] = []
        for piece in pieces:
            out += self.tools.feed(piece.text) if isinstance(piece, TextPiece) else [piece]
        return join(out)


def answer_parser(
    *,
    reasoning: str | None = None,
    tools: str | Callable[..., Parser] | None = None,
    prompt: str = "",
    opened: bool | None = None,
    schemas: Mapping[str, Mapping[str, Any]] | None = None,
    make_id: Callable[[int, str], str] | None = None,
) -> Parser | Chain:
    """Return the parser of one output, by the names of its reasoning parser and its tool parser. Without
    these names, the whole output is text.

    `schemas` are the JSON schemas of parameters by function name, `make_id` returns ids of calls. `prompt` is
    the end of the rendered prompt. `opened` is whether the output begins inside of reasoning, if the prompt
    does not determine it."""
    first: Parser = REASONING[reasoning or "identity"](prompt)
    if opened is not None and isinstance(first, Reasoning):
        first.opened = opened_by(first.marks, prompt, opened)
    if tools is None:
        return first
    make = TOOLS[tools] if isinstance(tools, str) else tools
    second: Parser = make(schemas=schemas, make_id=make_id)
    return second if second.reads_all or reasoning is None else Chain(first, second)


def reasoning_parser(name: str) -> Callable[[Factory], Factory]:
    """Register a reasoning parser by this name (decorator for plugins)."""
    return _register(REASONING, name)


def tool_parser(name: str) -> Callable[[Factory], Factory]:
    """Register a tool parser by this name (decorator for plugins)."""
    return _register(TOOLS, name)


def _register(table: LazyTable, name: str) -> Callable[[Factory], Factory]:
    def decorate(factory: Factory) -> Factory:
        table.register(name, factory)
        return factory

    return decorate


def load_plugin(path: str | Path) -> None:
    """Run a user's Python file, which registers parsers."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"no parser plugin at {path}")
    module = f"quire_parser_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(module, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"parser plugin {path} is not a Python file")
    sys.modules[module] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(sys.modules[module])
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"parser plugin {path} failed: {type(error).__name__}: {error}") from error
