"""Parsed output: text, reasoning and tool calls as API-neutral pieces, streamed or collected. The configured
parsers produce them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.data.output_pieces import Piece, ReasoningPiece, TextPiece, ToolArguments, ToolStart
from quire.data.outputs import CompletionOutput
from quire.data.params import ReasoningIds
from quire.errors import ConfigError, nearest
from quire.registry import LazyTable
from quire.text.parsers import REASONING, TOOLS, Chain, answer_parser, load_plugin
from quire.text.parsers.calls import IdMaker
from quire.text.parsers.detection import DetectedParsers, detect_parsers
from quire.text.parsers.json_calls import NamedCall, RequiredCalls
from quire.text.parsers.reasoning_marks import NO_MARKS, ReasoningMarks
from quire.text.parsers.streaming import Parser, join

if TYPE_CHECKING:  # a supervisor checks the names of the parsers, and opens no tokenizer
    from quire.frontend.inputs import Prompt
    from quire.server.openai.requests import ChatBody
    from quire.text.tokenizer import Tokenizer

NAMED, REQUIRED = "named", "required"
_NUM_DECODED_TOKENS = 64
"""Number of last prompt tokens that are decoded if the prompt has no text, to detect an open reasoning
block."""
_THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Chat template variables that turn reasoning on and off."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and how the model may call them."""

    calls: str = "none"
    """Tool calls that the output may have: `none`, `auto` (any number), `required` (one or more), or `named`
    (a call of the tool `name`)."""
    name: str = ""
    """Name of the tool to call, if `calls` is named."""
    schemas: dict[str, dict[str, Any]] = field(default_factory=dict)
    """JSON schema of the parameters, by tool name."""
    parallel: bool = True
    """Whether one choice may have several tool calls."""
    strict: frozenset[str] = frozenset()
    """Names of the tools whose arguments must match their JSON schema."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How to parse the output of one request."""

    make_parser: Callable[[], Parser | Chain] | None = None
    """Factory of the parser; None if all output is text."""
    keeps_special_tokens: bool = False
    reasoning: ReasoningIds | None = None
    """Token ids of the marks around reasoning, such as <think>; None without reasoning or without marks."""
    breaks: tuple[tuple[int, ...], ...] = ()
    """Token id sequences that end the reasoning, in addition to its end mark."""
    may_think: bool = False
    """Whether reasoning may precede a constrained output. If the start mark has several tokens, this requires
    that the request turns thinking on."""


class Parsers:
    """The reasoning parser and the tool call parser of the server: the configured ones, or those that fit the
    chat template."""

    def __init__(
        self,
        *,
        reasoning: str,
        tools: str,
        auto: bool | None = None,
        plugins: Iterable[str] = (),
        marks: ReasoningMarks = NO_MARKS,
    ) -> None:
        for path in filter(None, plugins):
            load_plugin(path)
        self.reasoning = _check_name(REASONING, reasoning)
        self.tools = _check_name(TOOLS, tools)
        self._auto, self._marks = auto, marks
        self.detected = DetectedParsers()
        """Parsers that the chat template selected."""

    @property
    def auto(self) -> bool:
        """Whether optional tool calls (tool_choice `auto`) are parsed: there is a tool call parser, and
        enable_auto_tool_choice is not off."""
        return self._auto is not False and self.tools is not None

    def detect(self, model_template: str | dict[str, str] | None, template: str | None) -> None:
        """Select the parsers that are not configured, according to the chat template.

        With a detected reasoning parser, an output begins inside of reasoning only if the prompt opens the
        reasoning or the request turns thinking on: the template may belong to a model that does not think."""
        if self.tools and self.reasoning:
            return
        fitting = detect_parsers(model_template, template)
        wants_tools = self.tools is None and self._auto is not False
        self.detected = DetectedParsers(
            tools=fitting.tools if wants_tools else "",
            reasoning=fitting.reasoning if self.reasoning is None else "",
        )
        self.tools = self.tools or self.detected.tools or None
        self.reasoning = self.reasoning or self.detected.reasoning or self._marks.register()
        if self._auto and self.tools is None:
            raise ConfigError(
                "enable_auto_tool_choice needs tool_call_parser: no known tool parser fits the chat template"
            )

    def answer_format(
        self,
        body: "ChatBody",
        tools: ToolUse,
        prompt: "Prompt",
        tokenizer: "Tokenizer | None",
        variables: Mapping[str, Any],
        *,
        unconstrained: bool,
    ) -> AnswerFormat:
        """Return how to parse the output of a chat. `variables`: the variables of the chat template.
        `unconstrained`: whether the output has no structured output constraint."""
        if tokenizer is None or (self.reasoning is None and tools.calls == "none"):
            return AnswerFormat()
        text = prompt.text
        if text is None:
            text = tokenizer.decode(prompt.token_ids[-_NUM_DECODED_TOKENS:], skip_special_tokens=False)
        switches = (variables.get(name) for name in _THINKING_VARIABLES)
        enable_thinking = next((switch for switch in switches if isinstance(switch, bool)), None)
        num_calls = sum(len(message.tool_calls or ()) for message in body.messages)
        continued_text = body.messages[-1].text if body.continue_final_message else ""
        may_begin_inside = enable_thinking or (enable_thinking is None and not self.detected.reasoning)
        opened = None if unconstrained and may_begin_inside else False
        marks = answer_parser(reasoning=self.reasoning).reasoning_marks
        if continued_text and marks is not None:
            opened = continued_text.rfind(marks[0]) > continued_text.rfind(marks[1])
        make_parser = partial(answer_parser, reasoning=self.reasoning, prompt=text, opened=opened)
        if tools.calls == "auto":
            make_parser = partial(make_parser, tools=self.tools, schemas=tools.schemas)
        elif tools.calls == REQUIRED:
            make_parser = partial(make_parser, tools=RequiredCalls, make_id=self._id_maker(num_calls))
        elif tools.calls == NAMED:
            make_parser = partial(
                make_parser, tools=partial(NamedCall, tools.name), make_id=self._id_maker(num_calls)
            )
        parser = make_parser()
        reasoning = reasoning_ids(parser, tokenizer, self._marks.end)
        # The grammar of strict tools has messages of reasoning in it, unless their length is limited.
        begins_at_once = unconstrained and bool(tools.strict) and getattr(parser, "reads_all", False)
        begins_at_once = begins_at_once and body.thinking_token_budget in (None, -1)
        special = reasoning is not None and any(map(tokenizer.is_special, (*reasoning.start, *reasoning.end)))
        return AnswerFormat(
            make_parser,
            parser.keeps_special_tokens or special,
            reasoning,
            () if reasoning is None else reasoning.breaks,
            reasoning is not None
            and not begins_at_once
            and (reasoning.open or _may_think(text, parser, reasoning, enable_thinking)),
        )

    def _id_maker(self, num_calls: int) -> IdMaker | None:
        """Return a function that makes tool call ids in the model's format; None if any format will do."""
        if self.tools is None:
            return None
        make_id: IdMaker | None = getattr(TOOLS[self.tools](), "make_id", None)
        return make_id and (lambda index, name: make_id(num_calls + index, name))


def reasoning_ids(
    parser: Parser | Chain, tokenizer: "Tokenizer", forced_end: str = ""
) -> ReasoningIds | None:
    """Return the token ids of the marks around reasoning, such as <think>; None if the parser has no marks.
    `forced_end` is the text by which a spent budget ends the reasoning, if it ends with the end mark."""
    if parser.reasoning_marks is None:
        return None
    start, end = (_encode(mark, tokenizer) for mark in parser.reasoning_marks)
    words, mark, rest = forced_end.rpartition(parser.reasoning_marks[1])
    last_words = _encode(words, tokenizer) if mark and not rest else ()
    breaks = tuple(_encode(mark, tokenizer) for mark in parser.reasoning_breaks)
    return ReasoningIds(start, end, parser.opened, last_words, breaks)


def _encode(mark: str, tokenizer: "Tokenizer") -> tuple[int, ...]:
    return tuple(tokenizer.encode(mark, add_special_tokens=False))


def _may_think(prompt: str, parser: Parser | Chain, ids: ReasoningIds, enable_thinking: bool | None) -> bool:
    assert parser.reasoning_marks is not None
    is_over = prompt.rstrip().endswith(parser.reasoning_marks[1])
    return not is_over and (len(ids.start) == 1 if enable_thinking is None else enable_thinking)


def _check_name(table: LazyTable, name: str) -> str | None:
    if name and name not in table:
        known = ", ".join(sorted(table))
        raise ConfigError(f"unknown {table.kind} {name!r}{nearest(name, table)}; known: {known}")
    return name or None


class OutputParser:
    """Parser that splits the output of one choice into text, reasoning and tool calls, and counts reasoning
    tokens. If `parser` is None, all output is text."""

    def __init__(
        self,
        parser: Parser | Chain | None,
        *,
        reasoning: ReasoningIds | None = None,
        breaks: Iterable[tuple[int, ...]] = (),
        omit_reasoning: bool = False,
        single_call: bool = False,
    ) -> None:
        """Create a parser. The tokens between the marks `reasoning` are counted; `breaks` are other token
        sequences that end the reasoning. `omit_reasoning` drops the reasoning, `single_call` all tool calls
        after the first."""
        self._parser = parser
        self._reasoning, self._breaks = reasoning, tuple(breaks)
        self._token_ids: list[int] = []
        self._filters = omit_reasoning or single_call
        self._omit_reasoning, self._single_call = omit_reasoning, single_call

    def parse(self, output: CompletionOutput) -> list[Piece]:
        """Return the parsed pieces of an output. Text whose meaning depends on later text is held back until
        a later output, at the latest the last one."""
        if self._reasoning is not None:
            self._token_ids += output.token_ids
        pieces = self.parse_text(output.text)
        if output.finish_reason is not None and self._parser is not None:
            pieces = join(pieces + self._filter(self._parser.end()))
        return pieces

    def parse_text(self, text: str) -> list[Piece]:
        """Return the parsed pieces of new text of a choice, which is not its last text. The tokens of this
        text do not count as reasoning."""
        if self._parser is None:
            return [TextPiece(text)] if text else []
        return self._filter(self._parser.feed(text))

    @property
    def num_reasoning(self) -> int:
        """Return the number of reasoning tokens so far."""
        if self._reasoning is None:
            return 0
        return count_reasoning(self._token_ids, self._reasoning, self._breaks)

    def _filter(self, pieces: list[Piece]) -> list[Piece]:
        return [piece for piece in pieces if self._keeps(piece)] if self._filters else pieces

    def _keeps(self, piece: Piece) -> bool:
        match piece:
            case ReasoningPiece():
                return not self._omit_reasoning
            case ToolStart(index=index) | ToolArguments(index=index):
                return index == 0 or not self._single_call
        return True


def count_reasoning(token_ids: list[int], marks: ReasoningIds, breaks: Iterable[tuple[int, ...]] = ()) -> int:
    """Count the reasoning tokens: those between the start mark and the end mark, or the first of the token
    sequences `breaks`; without either, all tokens after the start mark."""
    begins = find_sequence(token_ids, marks.start, 0)
    if marks.open:
        start = len(marks.start) if begins == 0 else 0
    elif begins is None:
        return 0
    else:
        start = begins + len(marks.start)
    ends = [find_sequence(token_ids, mark, start) for mark in (marks.end, *breaks)]
    return min((end for end in ends if end is not None), default=len(token_ids)) - start


def find_sequence(token_ids: list[int], part: tuple[int, ...], start: int) -> int | None:
    """Return the index of the first occurrence of `part` in `token_ids` from index `start` on, or None."""
    if not part:
        return start
    try:
        while tuple(token_ids[start : start + len(part)]) != part:
            start = token_ids.index(part[0], start + 1)
    except ValueError:
        return None
    return start


@dataclass(slots=True)
class CalledTool:
    """A complete tool call."""

    id: str
    name: str
    arguments: str = ""
    """Arguments as JSON."""


@dataclass(slots=True)
class CollectedAnswer:
    """A complete output: its text, its reasoning and its tool calls."""

    text: str = ""
    reasoning: str = ""
    calls: list[CalledTool] = field(default_factory=list)


def collect_pieces(pieces: Iterable[Piece]) -> CollectedAnswer:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[CalledTool] = []
    for piece in pieces:
        match piece:
            case TextPiece(text):
                texts.append(text)
            case ReasoningPiece(text):
                reasoning.append(text)
            case ToolStart(_, id, name):
                calls.append(CalledTool(id, name))
            case ToolArguments(index, text):
                calls[index].arguments += text
    return CollectedAnswer("".join(texts), "".join(reasoning), calls)
