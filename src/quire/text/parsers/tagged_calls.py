"""Parser of tool calls with a tag per parameter; the types of values are those of the tool's schema."""

import html
import json
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.text.parsers.calls import ToolParser, is_name, quoted, typed
from quire.text.parsers.streaming import Emit, Wait


@dataclass(frozen=True)
class Tags:
    """The tags of a format of tool calls."""

    opens: tuple[str, ...]
    """Marks that may precede a call."""
    call: str
    """Text before the function's name."""
    name_ends: tuple[str, ...]
    parameter: str
    """Text before a parameter's key."""
    key_end: str
    value_end: str
    ends: tuple[str, ...]
    """Marks that end a call."""
    closes: tuple[str, ...]
    """Marks that may follow a call."""
    before_value: str = ""
    lenient: bool = False
    """Whether a value without an end tag ends at the next parameter or the end of the call."""
    lines: bool = True
    """Whether a value is on its own lines: the line breaks next to its tags are not part of it."""
    escaped: bool = False
    """Whether names and keys are escaped as in XML."""
    cdata: bool = False
    """Whether a value may be in `<![CDATA[ ]]>`."""
    special: bool = False


class TaggedCalls(ToolParser):
    """Parser of calls between configured tags."""

    marks: Tags

    def __init__(self, tags: Tags, **options: Any) -> None:
        self.keeps_special_tokens = tags.special
        super().__init__(tags, **options)

    def script(self) -> Wait[None]:
        while (yield from self.until((*self.marks.opens, self.marks.call), self.text)):
            yield from self.section()

    def section(self) -> Wait[None]:
        """Read the marks before a call and one call, or emit what is no call as text."""
        tags = self.marks
        self.hold()
        yield from self.closing(mark for mark in tags.opens if mark != tags.call)
        if (yield from self.take(tags.call)) and (yield from self._call()):
            yield from self.closing(tags.closes)
        else:
            self.give_back()

    def _call(self) -> Wait[bool]:
        tags = self.marks
        yield from self.space()
        header = yield from self.header(*tags.name_ends)
        # Kimi-K3: `name" index="1`
        name = self._unescape((header or "").strip().lstrip("\"'").partition('"')[0].rstrip("'"))
        if not is_name(name):
            return False
        yield from self.take(*(end for end in tags.name_ends if end not in (tags.parameter, *tags.ends)))
        self.start(name)
        self.arguments("{")
        num_parameters = 0
        while True:
            char = yield from self.space()
            if not (yield from self.take(tags.parameter)):
                break
            if not (yield from self._parameter(name, ", " if num_parameters else "")):
                return False
            num_parameters += 1
        if char:
            self.arguments("}")
            yield from self.take(*tags.ends)
        return True

    def _parameter(self, function: str, comma: str) -> Wait[bool]:
        """Read one parameter; return False if the parameter is incomplete."""
        tags = self.marks
        header = yield from self.header(tags.key_end)
        if header is None:
            return False
        yield from self.take(tags.key_end)
        if tags.before_value:  # GLM-5 sometimes omits this tag
            yield from self.space()
            yield from self.take(tags.before_value)
        # DeepSeek: `key" string="true`; Kimi-K3: `key" type="string"`
        key, _, attributes = header.strip().partition('"')
        key = self._unescape(key)
        types = self.types(function, key)
        if attributes:
            types = (
                frozenset({"string"})
                if '="string' in attributes or '="true' in attributes
                else types - {"string"}
            )
        if tags.lines:
            yield from self.take("\n")
        before = f"{comma}{json.dumps(key, ensure_ascii=False)}: "
        if types == {"string"}:
            self.arguments(before + '"')
            is_complete = yield from self._value(lambda text: self.arguments(quoted(text)))
            self.arguments('"' if is_complete else "")
            return is_complete
        parts: list[str] = []
        is_complete = yield from self._value(parts.append)
        if is_complete:
            self.arguments(before + typed("".join(parts), types))
        return is_complete

    def _unescape(self, text: str) -> str:
        return html.unescape(text) if self.marks.escaped else text

    def _value(self, emit: Emit) -> Wait[bool]:
        """Pass the text of a value to `emit`, without the line break before its end tag; return False if the
        value is incomplete."""
        tags = self.marks
        if tags.cdata and (yield from self.take("<![CDATA[")):
            mark = yield from self.until((f"]]>{tags.value_end}",), emit)
            yield from self.take(f"]]>{tags.value_end}")
            return bool(mark)
        ends = (tags.value_end, *((tags.parameter, *tags.ends) if tags.lenient else ()))
        if tags.lines:
            ends = (*(f"\n{end}" for end in ends), *ends)
        while mark := (yield from self.until(ends, emit)):
            if not mark.endswith(tags.value_end):
                yield from self.take("\n" if tags.lines else "")
                break
            yield from self.take(mark)
            if (yield from self._follows()):
                break
            emit(mark)
        return bool(mark)

    def _follows(self) -> Wait[bool]:
        """Return whether the next parameter or the end of the call follows a value's end tag. If not, the tag
        belongs to the value, which may be XML with the same tag."""
        tags = self.marks
        self.hold()
        is_end = not (yield from self.space())
        mark = yield from self.take(tags.parameter, *tags.ends, *tags.opens, *tags.closes, tags.call)
        self.go_back()
        return is_end or bool(mark)


class HyV3(TaggedCalls):
    """Parser of Hunyuan 3's tool calls. Published checkpoints write `:opensource` into every tag; tags
    without it are read, too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(_hy_v3(""), **options)

    def script(self) -> Wait[None]:
        known = [_hy_v3(""), _hy_v3(":opensource")]
        marks = [mark for tags in known for mark in (*tags.opens, tags.call)]
        first = yield from self.until(tuple(marks), self.text)
        self.marks = known[":opensource" in first]
        yield from super().script()


def _hy_v3(suffix: str) -> Tags:
    opens, closes = (f"<tool_calls{suffix}>",), (f"</tool_calls{suffix}>",)
    return _arg_tags(f"<tool_sep{suffix}>", suffix, opens=opens, closes=closes)


def _arg_tags(
    name_end: str, suffix: str = "", *, opens: tuple[str, ...] = (), closes: tuple[str, ...] = ()
) -> Tags:
    """Return the tags of `<tool_call>f`, `<arg_key>k</arg_key>` and `<arg_value>v</arg_value>`."""
    return Tags(
        opens=opens,
        call=f"<tool_call{suffix}>",
        name_ends=(name_end, f"<arg_key{suffix}>", f"</tool_call{suffix}>"),
        parameter=f"<arg_key{suffix}>",
        key_end=f"</arg_key{suffix}>",
        before_value=f"<arg_value{suffix}>",
        value_end=f"</arg_value{suffix}>",
        ends=(f"</tool_call{suffix}>",),
        closes=closes,
        lines=False,
        special=True,
    )


def invoke_tags(*opens: str, closes: tuple[str, ...], prefix: str = "", lines: bool = False) -> Tags:
    """Return the tags of `<invoke name="f">` and `<parameter name="k">`."""
    return Tags(
        opens=opens,
        call=f'<{prefix}invoke name="',
        name_ends=('">',),
        parameter=f'<{prefix}parameter name="',
        key_end='">',
        value_end=f"</{prefix}parameter>",
        ends=(f"</{prefix}invoke>",),
        closes=closes,
        lines=lines,
        special=True,
    )


def _function_tags(open_: str, close: str, *, special: bool = False) -> Tags:
    """Return the tags of `<function=f>` and `<parameter=k>`."""
    return Tags(
        opens=(open_,),
        call="<function=",
        name_ends=(">",),
        parameter="<parameter=",
        key_end=">",
        value_end="</parameter>",
        ends=("</function>",),
        closes=(close,),
        lenient=True,
        special=special,
    )


def _parser(tags: Tags) -> partial[TaggedCalls]:
    return partial(TaggedCalls, tags)


QWEN3_CODER = _parser(_function_tags("<tool_call>", "</tool_call>"))
SEED_OSS = _parser(_function_tags("<seed:tool_call>", "</seed:tool_call>", special=True))
MINIMAX_M2 = _parser(invoke_tags("<minimax:tool_call>", closes=("</minimax:tool_call>",)))
DEEPSEEK_V32 = _parser(
    invoke_tags("<｜DSML｜function_calls>", closes=("</｜DSML｜function_calls>",), prefix="｜DSML｜")
)
DEEPSEEK_V4 = _parser(
    invoke_tags("<｜DSML｜tool_calls>", closes=("</｜DSML｜tool_calls>",), prefix="｜DSML｜")
)
STEP3 = _parser(
    invoke_tags(
        "<｜tool_calls_begin｜>",
        "<｜tool_call_begin｜>",
        "function<｜tool_sep｜>",
        closes=("<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
        prefix="steptml:",
    )
)
DOTS = _parser(invoke_tags("<dots_function_call>", closes=("</dots_function_call>",), lines=True))
GLM45 = _parser(_arg_tags("\n"))
KIMI_K3 = _parser(
    Tags(
        opens=("<|open|>tools<|sep|>",),
        call='<|open|>call tool="',
        name_ends=("<|sep|>",),
        parameter='<|open|>argument key="',
        key_end="<|sep|>",
        value_end="<|close|>argument<|sep|>",
        ends=("<|close|>call<|sep|>",),
        closes=("<|close|>tools<|sep|>", "<|close|>message<|sep|>"),
        lines=False,
        escaped=True,
        special=True,
    )
)
MINICPM5 = _parser(
    Tags(
        opens=("<|tool_call_start|>",),
        call='<function name="',
        name_ends=('">',),
        parameter='<param name="',
        key_end='">',
        value_end="</param>",
        ends=("</function>",),
        closes=("<|tool_call_end|>",),
        lines=False,
        cdata=True,
        special=True,
    )
)
