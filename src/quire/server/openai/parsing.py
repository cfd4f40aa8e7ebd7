"""The configured reasoning and tool parsers, and their use for one output."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from quire.data.params import ReasoningIds
from quire.errors import ConfigError, nearest
from quire.registry import LazyTable
from quire.text.parsers import REASONING, TOOLS, Chain, answer_parser, load_plugin
from quire.text.parsers.calls import IdMaker, Schemas
from quire.text.parsers.engine import Parser
from quire.text.parsers.forced import NamedCall, RequiredCalls
from quire.text.tokenizer import Tokenizer

NAMED, REQUIRED = "named", "required"


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How to parse one output."""

    make: Callable[[], Parser | Chain] | None = None
    """Factory of the parser; None if all output is text."""
    keeps_special_tokens: bool = False
    reasoning: ReasoningIds | None = None
    """Token ids of the reasoning marks; None without reasoning or without marks."""
    breaks: tuple[tuple[int, ...], ...] = ()
    """Other token sequences that end the reasoning."""
    may_think: bool = False
    """Whether reasoning may precede a constrained output. If its start mark is several tokens, the request
    must turn thinking on."""


class Parsers:
    """The parsers that the server is configured with."""

    def __init__(self, *, reasoning: str, tools: str, auto: bool, plugins: Iterable[str] = ()) -> None:
        for path in filter(None, plugins):
            load_plugin(path)
        self.reasoning = _check_name(REASONING, reasoning)
        self.tools = _check_name(TOOLS, tools)
        self.auto = auto and self.tools is not None
        """Whether a model may choose to call a tool."""

    def reading(
        self,
        prompt: str,
        tokenizer: Tokenizer,
        *,
        calls: str = "",
        name: str = "",
        schemas: Schemas | None = None,
        num_calls: int = 0,
        thinks: bool | None = None,
        free: bool = True,
        begun: str = "",
    ) -> AnswerFormat:
        """Return how to parse the output of a prompt. `calls` is auto, required, named (of the tool `name`)
        or none. `num_calls` counts the calls of the conversation so far. `thinks`: whether the request turns
        thinking on or off. `free`: whether the output is unconstrained. `begun` is the message to
        continue."""
        opened = None if free and thinks is not False else False
        marks = answer_parser(reasoning=self.reasoning).reasoning_marks
        if begun and marks is not None:
            opened = begun.rfind(marks[0]) > begun.rfind(marks[1])
        make_parser = partial(answer_parser, reasoning=self.reasoning, prompt=prompt, opened=opened)
        if calls == "auto":
            make_parser = partial(make_parser, tools=self.tools, schemas=schemas)
        elif calls == REQUIRED:
            make_parser = partial(make_parser, tools=RequiredCalls, make_id=self._id_maker(num_calls))
        elif calls == NAMED:
            make_parser = partial(
                make_parser, tools=partial(NamedCall, name), make_id=self._id_maker(num_calls)
            )
        elif self.reasoning is None:
            return AnswerFormat()
        parser = make_parser()
        reasoning = reasoning_ids(parser, tokenizer)
        special = reasoning is not None and any(map(tokenizer.is_special, (*reasoning.start, *reasoning.end)))
        return AnswerFormat(
            make_parser,
            parser.keeps_special_tokens or special,
            reasoning,
            tuple(_encode(mark, tokenizer) for mark in parser.reasoning_breaks),
            reasoning is not None and (reasoning.open or _may_think(prompt, parser, reasoning, thinks)),
        )

    def _id_maker(self, num_calls: int) -> IdMaker | None:
        """Return the maker of tool call ids in the model's format, if it has one."""
        if self.tools is None:
            return None
        make_id: IdMaker | None = getattr(TOOLS[self.tools](), "make_id", None)
        return make_id and (lambda index, name: make_id(num_calls + index, name))


def reasoning_ids(parser: Parser | Chain, tokenizer: Tokenizer) -> ReasoningIds | None:
    """Return the reasoning marks as token ids."""
    if parser.reasoning_marks is None:
        return None
    start, end = (_encode(mark, tokenizer) for mark in parser.reasoning_marks)
    return ReasoningIds(start, end, parser.opened)


def _encode(mark: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(tokenizer.encode(mark, add_special_tokens=False))


def _may_think(prompt: str, parser: Parser | Chain, ids: ReasoningIds, thinks: bool | None) -> bool:
    assert parser.reasoning_marks is not None
    is_over = prompt.rstrip().endswith(parser.reasoning_marks[1])
    return not is_over and (len(ids.start) == 1 if thinks is None else thinks)


def _check_name(table: LazyTable, name: str) -> str | None:
    if name and name not in table:
        known = ", ".join(sorted(table))
        raise ConfigError(f"unknown {table.kind} {name!r}{nearest(name, table)}; known: {known}")
    return name or None
