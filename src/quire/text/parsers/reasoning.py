"""Parsers of reasoning, the part of an output between two marks such as `<think>` and `</think>`."""

from dataclasses import dataclass
from functools import partial

from quire.text.parsers.streaming import Emit, Parser, Wait


@dataclass(frozen=True)
class ReasoningMarkers:
    """Texts that mark a model's reasoning."""

    start: str
    end: str
    opened: bool = True
    """Whether outputs without a start mark begin inside of reasoning, since most templates write the mark."""
    starts: tuple[str, ...] = ()
    """Alternative start marks."""
    ends: tuple[str, ...] = ()
    """Alternative end marks."""
    breaks: tuple[str, ...] = ()
    """Marks that end the reasoning and belong to the following text, such as the mark of a tool call."""
    dropped: tuple[str, ...] = ()
    """Marks around the answer after the reasoning, which are removed."""
    special: bool = False


class Reasoning(Parser):
    """Parser of reasoning between marks, followed by text. If the prompt ends with a start mark, the output
    begins inside of reasoning."""

    def __init__(self, marks: ReasoningMarkers, prompt: str = "") -> None:
        self.marks = marks
        self.opened = opened_by(marks, prompt)
        self.reasoning_marks = (marks.start, marks.end)
        self.reasoning_breaks = (*marks.ends, *marks.breaks)
        self.keeps_special_tokens = marks.special
        super().__init__()

    def script(self) -> Wait[None]:
        starts, ends = (self.marks.start, *self.marks.starts), (self.marks.end, *self.marks.ends)
        self.hold()
        yield from self.space()
        started = yield from self.take(*starts)
        if started:
            self.release()
        elif self.opened:
            self.go_back()
        else:
            self.give_back()
            yield from self._emit_until(starts, self.text)
            started = yield from self.take(*starts)
        if started or self.opened:
            yield from self.until((*ends, *self.marks.breaks), self.reasoning)
            yield from self.take(*ends)
        yield from self._emit_until((), self.text)

    def _emit_until(self, marks: tuple[str, ...], emit: Emit) -> Wait[None]:
        """Emit text up to one of the marks or the end of the output; the marks in `marks.dropped` are
        removed."""
        while (yield from self.until((*marks, *self.marks.dropped), emit)):
            if not (yield from self.take(*self.marks.dropped)):
                return


class Identity(Parser):
    """Parser that treats everything as text."""

    def __init__(self, prompt: str = "") -> None:
        super().__init__()

    def script(self) -> Wait[None]:
        yield from self.until((), self.text)


class AppendThink(Identity):
    """Parser that treats everything as text, after the start mark that the template wrote."""

    def script(self) -> Wait[None]:
        self.text("<think>")
        yield from super().script()


def opened_by(marks: ReasoningMarkers, prompt: str, default: bool | None = None) -> bool:
    """Return whether the output begins inside of reasoning, by the end of the prompt. If the prompt does not
    end with a mark, return `default` or, if that is None, `marks.opened`."""
    prompt = prompt.rstrip()
    if prompt.endswith(tuple(mark.rstrip() for mark in (marks.start, *marks.starts))):
        return True
    if prompt.endswith((marks.end, *marks.ends)):
        return False
    return marks.opened if default is None else default


def _marks(start: str, end: str, **options: object) -> partial[Reasoning]:
    return partial(Reasoning, ReasoningMarkers(start, end, **options))  # type: ignore[arg-type]


THINK = _marks("<think>", "</think>")
THINK_ASKED = _marks("<think>", "</think>", opened=False)
QWEN3 = _marks("<think>", "</think>", breaks=("<tool_call>",))
KIMI_K2 = _marks("<think>", "</think>", breaks=("<|tool_calls_section_begin|>",))
MINIMAX_M2 = _marks("<think>", "</think>", breaks=("<minimax:tool_call>",))
MINIMAX_M3 = _marks("<mm:think>", "</mm:think>", breaks=("]<]minimax[>[<tool_call>",), special=True)
HY_V3 = _marks(
    "<think>",
    "</think>",
    starts=("<think:opensource>",),
    ends=("</think:opensource>",),
    breaks=("<tool_calls>", "<tool_calls:opensource>"),
    opened=False,
    special=True,
)
KIMI_K3 = _marks(
    "<|open|>think<|sep|>",
    "<|close|>think<|sep|>",
    breaks=("<|open|>response<|sep|>", "<|open|>tools<|sep|>"),
    dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    special=True,
)
ERNIE45 = _marks(
    "<think>", "</think>", dropped=("<response>\n", "<response>", "\n</response>\n", "\n</response>")
)
HUNYUAN_A13B = _marks(
    "<think>\n",
    "\n</think>",
    opened=False,
    starts=("<think>",),
    ends=("</think>", "\n</think>\n"),
    dropped=("<answer>\n", "<answer>", "\n</answer>", "</answer>"),
)
SEED_OSS = _marks("<seed:think>", "</seed:think>", breaks=("<seed:tool_call>",))
MISTRAL = _marks("[THINK]", "[/THINK]", opened=False, special=True)
GRANITE = _marks(
    "Here is my thought process:",
    "Here is my response:",
    opened=False,
    starts=("Here's my thought process:",),
    ends=("Here's my response:",),
)
GEMMA4 = _marks("<|channel>thought\n", "<channel|>", opened=False, starts=("<|channel>",), special=True)
COHERE = _marks(
    "<|START_THINKING|>",
    "<|END_THINKING|>",
    breaks=("<|START_RESPONSE|>", "<|START_ACTION|>"),
    dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    opened=False,
    special=True,
)
