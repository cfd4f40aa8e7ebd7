"""Drawings of the stages of a request, computed by the code that they illustrate."""

import json
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from canvas import COLOURS, INK, PALE, PAPER, arrow, box, frame, words

from quire.config.parallel import Rank, stage_layers
from quire.data.control import MODES
from quire.data.output_pieces import Piece, ReasoningPiece, TextPiece, ToolArguments, ToolStart
from quire.data.outputs import RequestStateStats
from quire.data.params import StructuredOutputsParams
from quire.data.timeline import RequestTimeline
from quire.server.anthropic.bodies import MessagesBody
from quire.server.anthropic.translate import as_chat
from quire.server.responses.output import ResponseItems
from quire.text.grammar import Grammars, Vocabulary
from quire.text.parsers import answer_parser

# ---- parsing an answer

_PARTS = (
    "The weather: a tool ",
    "knows.</thi",
    "nk>Let me look. <tool",
    '_call>{"name": "get_weather", ',
    '"arguments": {"city"',
    ': "Paris"}}</tool_call>',
)
_KINDS = {
    ReasoningPiece: ("reasoning", COLOURS[4]),
    TextPiece: ("content", COLOURS[0]),
    ToolStart: ("tool_calls[0].name", COLOURS[2]),
    ToolArguments: ("tool_calls[0].arguments", COLOURS[1]),
}


def tools() -> str:
    """Draw what a parser makes of an answer that arrives in parts."""
    parser = answer_parser(reasoning="qwen3", tools="hermes", prompt="<think>\n")
    parts = [
        words(12, 22, "the model writes", "start", size=14),
        words(390, 22, "the client is sent", "start", size=14),
    ]
    y = 36
    for text in _PARTS:
        pieces = parser.feed(text)
        height = 26 * max(1, len(pieces))
        parts.append(box(12, y, 290, 24, PALE))
        parts.append(words(20, y + 16, text, "start", mono=True))
        if not pieces:
            parts.append(words(390, y + 16, "nothing yet: it may become a call", "start"))
        for number, piece in enumerate(pieces):
            at = y + 26 * number
            parts += [arrow(306, y + 12, 384, y + 12)] if not number else []
            parts += _piece(390, at, piece)
        y += height + 6
    assert parser.end() == []
    return frame(860, y + 6, parts)


def _piece(x: float, y: float, piece: Piece) -> list[str]:
    kind, fill = _KINDS[type(piece)]
    text = piece.name if isinstance(piece, ToolStart) else piece.text
    return [box(x, y, 170, 24, fill, kind), words(x + 180, y + 16, text, "start", mono=True)]


# ---- structured output

_TOKENS = ('{"', "age", "name", '":', " ", "4", "42", "forty", '"', "}", "Sure", "<end>")
_ANSWER = ('{"', "age", '":', " ", "42", "}", "<end>")
_SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


def _encode(text: str) -> list[int]:
    """Tokenize a text greedily by the longest token, or by a byte if no token matches."""
    ids = []
    while text:
        token = max((item for item in _TOKENS if text.startswith(item)), key=len, default=text[0])
        ids.append(_TOKENS.index(token) if token in _TOKENS else len(_TOKENS) + ord(token))
        text = text[len(token) :]
    return ids


def structured() -> str:
    """Draw which tokens of a small vocabulary may follow, step by step."""
    tokens = [item.encode() for item in _TOKENS] + [bytes([code]) for code in range(256)]
    end = _TOKENS.index("<end>")
    grammars = Grammars(lambda: Vocabulary(tokens, [end], (end,), _encode))
    request = StructuredOutputsParams(json=_SCHEMA, disable_additional_properties=True)
    matcher = grammars.compile(request)
    title = f"Tokens that may come next: {json.dumps(_SCHEMA)}"
    parts, y, text = [words(12, 22, title, "start")], 36, ""
    for chosen in _ANSWER:
        bits = np.zeros((1, grammars.num_words), np.uint32)
        grammars.fill([(matcher, 0)], bits)
        may = np.unpackbits(bits.view(np.uint8), bitorder="little")
        parts.append(words(12, y + 17, text or "(nothing yet)", "start", mono=bool(text)))
        for place, token in enumerate(_TOKENS):
            fill = COLOURS[2] if token == chosen else COLOURS[1] if may[place] else PALE
            message = "sampled" if token == chosen else "may come" if may[place] else "never"
            parts.append(box(120 + 60 * place, y, 56, 26, fill, "space" if token == " " else token, message))
            assert may[place] or token != chosen
        y += 32
        text += chosen
        matcher.advance(_TOKENS.index(chosen))
    for x, fill, legend in (
        (120, COLOURS[2], "sampled"),
        (220, COLOURS[1], "allowed"),
        (320, PALE, "masked"),
    ):
        parts += [box(x, y + 4, 12, 12, fill), words(x + 17, y + 14, legend, "start")]
    return frame(850, y + 28, parts)


# ---- timeline

_STATS = RequestStateStats(
    queued_ts=1.012, scheduled_ts=1.142, first_token_ts=1.300, last_token_ts=1.860, latency=0.88,
    preempted_s=0.18, num_preemptions=1, step_share_s=0.31,
)  # fmt: skip
_ARRIVED = 1.0


def timeline() -> str:
    """Draw the events of a request, and the fields that measure the times between them."""
    times, scale, left = RequestTimeline.of(_STATS, 0), 0.85, 40.0
    stations = {
        "arrives": _ARRIVED, "in the line": _STATS.queued_ts, "first step": _STATS.scheduled_ts,
        "first token": _STATS.first_token_ts, "last token": _STATS.last_token_ts,
        "told": _ARRIVED + _STATS.latency,
    }  # fmt: skip
    at = {name: left + 1000 * (when - _ARRIVED) * scale for name, when in stations.items()}
    parts = []
    for number, (name, x) in enumerate(at.items()):
        y = 18 if number % 2 else 36
        parts.append(words(x, y, name))
        parts.append(f'<path d="M{x:g} {y + 4}V96" stroke="#bbb" stroke-dasharray="3 4"/>')
    for start, end, fill, field in (
        ("in the line", "first step", COLOURS[2], "queue_ms"),
        ("first step", "first token", COLOURS[0], "prefill_ms"),
        ("first token", "last token", COLOURS[1], "decode_ms"),
    ):
        width = at[end] - at[start]
        parts.append(box(at[start], 60, width, 30, fill, f"{field} {getattr(times, field):.0f}"))
    away, share = times.preempted_ms * scale, times.step_share_ms * scale
    parts.append(
        box(at["first token"] + 120, 96, away, 22, COLOURS[5], f"preempted_ms {times.preempted_ms:.0f}")
    )
    parts.append(
        words(at["first token"] + 126 + away, 111, "within decode_ms: its row was another's", "start")
    )
    parts.append(
        box(at["first step"], 124, share, 22, COLOURS[4], f"step_share_ms {times.step_share_ms:.0f}")
    )
    parts.append(words(at["first step"] + share + 6, 139, "of its steps its own part, put together", "start"))
    total = times.total_ms * scale
    parts.append(box(left, 152, total, 22, PALE, f"total_ms {times.total_ms:.0f}"))
    parts.append(
        words(left, 192, "What no bar covers is the API process: template, tokens, the way, text.", "start")
    )
    return frame(840, 204, parts)


# ---- control routes


def operate() -> str:
    """Draw the states running, paused and asleep, and the routes between them."""
    assert set(MODES) == {"abort", "wait", "keep"}
    states = {
        "running": (40, "steps are taken", COLOURS[1]),
        "paused": (330, "no steps; all stays", COLOURS[0]),
        "asleep": (620, "memory is given back", COLOURS[4]),
    }
    parts = []
    for name, (x, what, fill) in states.items():
        parts.append(box(x, 60, 150, 56, fill))
        parts.append(
            f'<text x="{x + 75}" y="84" text-anchor="middle" fill="white" font-size="14">{name}</text>'
        )
        parts.append(f'<text x="{x + 75}" y="104" text-anchor="middle" fill="white">{what}</text>')
    parts += [arrow(192, 76, 328, 76), words(260, 68, "/pause?mode="), arrow(328, 100, 192, 100)]
    parts += [words(260, 118, "/resume"), arrow(482, 76, 618, 76), words(550, 68, "/sleep?level=")]
    parts += [f'<path d="M695 116V146H115V124" stroke="{INK}" fill="none"/>']
    parts += [f'<path d="M115 117L111 124H119Z" fill="{INK}"/>', words(405, 140, "/wake_up")]
    parts += [f'<path d="M115 60V34H695V52" stroke="{INK}" fill="none"/>']
    parts += [f'<path d="M695 59L691 52H699Z" fill="{INK}"/>']
    parts += [words(405, 28, "/sleep?level=1&mode=abort pauses by itself")]
    rows = {
        "mode=abort": "requests end with what they have",
        "mode=wait": "they go on to their end first",
        "mode=keep": "they stay, and go on afterwards",
    }
    for number, (mode, what) in enumerate(rows.items()):
        parts += [words(40, 178 + 20 * number, mode, "start", mono=True)]
        parts += [words(140, 178 + 20 * number, what, "start")]
    levels = {
        "level=1": "weights to host memory, cache dropped",
        "level=2": "both dropped; weights are loaded once more",
    }
    for number, (level, what) in enumerate(levels.items()):
        parts += [words(400, 178 + 20 * number, level, "start", mono=True)]
        parts += [words(480, 178 + 20 * number, what, "start")]
    parts.append(
        words(400, 218, "Requests that come meanwhile wait in the line; /health stays 200.", "start")
    )
    return frame(820, 236, parts)


# ---- processes over machines


@dataclass(frozen=True)
class _Sizes:
    """The sizes of an engine with `-tp 4 -pp 2`."""

    tensor_parallel_size: int = 4
    pipeline_parallel_size: int = 2


_PLANS = ("plans, by one ring of shared memory", "started by the agent; plans from the core, by TCP")


def ranks() -> str:
    """Draw eight ranks on two machines."""
    sizes, layers = _Sizes(), stage_layers(80, 2)
    parts = [words(12, 22, "quire serve MODEL -tp 4 -pp 2 --nnodes 2 ..., 80 layers", "start", mono=True)]
    every = [Rank.of(index, sizes) for index in range(8)]
    for machine, (pp, machine_ranks) in enumerate(groupby(every, key=lambda rank: rank.pp)):
        y = 36 + 150 * machine
        parts.append(f'<rect x="12" y="{y}" width="836" height="136" fill="{PAPER}" stroke="#999" rx="6"/>')
        span = f"layers {layers[pp][0]} to {layers[pp][-1]}"
        parts.append(words(24, y + 20, f"machine {machine}" + (", --headless" if machine else ""), "start"))
        parts.append(words(836, y + 20, span, "end"))
        if machine:
            parts.append(box(24, y + 44, 230, 70, COLOURS[3], "agent"))
        else:
            parts.append(box(24, y + 44, 100, 70, COLOURS[0], "API process"))
            parts += [arrow(126, y + 79, 152, y + 79), box(154, y + 44, 100, 70, COLOURS[1], "core")]
        parts.append(arrow(256, y + 79, 294, y + 79))
        parts.append(words(296, y + 42, _PLANS[machine], "start"))
        for rank in machine_ranks:
            x = 296 + 136 * rank.tp
            parts.append(box(x, y + 50, 128, 40, COLOURS[2], f"Worker_PP{rank.pp}_TP{rank.tp}"))
        parts.append(f'<path d="M296 {y + 104}H832" stroke="{COLOURS[5]}" stroke-width="3"/>')
        parts.append(words(564, y + 122, "sums between the shares of a layer, in each of them"))
    parts += [arrow(204, 152, 204, 228), words(212, 190, "when to start", "start")]
    parts += [
        arrow(738, 128, 738, 234),
        words(730, 182, "activations, to the same share of the next stage", "end"),
    ]
    return frame(860, 336, parts)


# ---- two more APIs

_PIECES = (
    ReasoningPiece("A tool knows."),
    TextPiece("Let me"),
    TextPiece(" look."),
    ToolStart(0, "call-1", "get_weather"),
    ToolArguments(0, '{"city": "Paris"}'),
)


def responses() -> str:
    """Draw the events of a stream of the Responses API, item by item."""
    output = ResponseItems()
    events = [event for piece in _PIECES for event in output.add(piece)]
    events += output.end("completed")
    kinds = iter(
        [
            (item["type"], fill)
            for item, fill in zip(output.as_list(), (COLOURS[4], COLOURS[0], COLOURS[2]), strict=True)
        ]
    )
    parts, y, fill = [words(24, 20, "response.created, response.in_progress", "start", mono=True)], 34, PALE
    top, item = y, ""
    for event in events:
        name = event["type"].removeprefix("response.")
        if name == "output_item.added":
            (item, fill), top = next(kinds), y
        parts.append(words(190, y + 14, name, "start", mono=True))
        if "delta" in event:
            parts.append(words(480, y + 14, event["delta"], "start", mono=True))
        y += 20
        if name == "output_item.done":
            parts.append(box(24, top, 150, y - top, fill, item))
            y += 8
    parts.append(words(24, y + 12, "response.completed", "start", mono=True))
    parts.append(words(480, 20, "what is said", "start"))
    return frame(720, y + 26, parts)


_BODY = {
    "model": "m",
    "max_tokens": 100,
    "system": "Be brief.",
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "stop_sequences": ["END"],
    "messages": [
        {"role": "user", "content": "Weather in Paris?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "A tool knows.", "signature": ""},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Paris"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "clear"}]},
    ],
}


def messages() -> str:
    """Draw a body of the Messages API, and the chat request that it becomes."""
    chat = as_chat(MessagesBody.model_validate(_BODY), budgets=True).model_dump(exclude_unset=True)
    parts: list[str] = []
    sides = (("POST /v1/messages", _BODY, 12), ("the chat that is answered", chat, 440))
    heights = []
    for title, body, x in sides:
        parts.append(words(x, 22, title, "start", size=14))
        y = 36.0
        for name in (
            "system",
            "messages",
            "thinking",
            "thinking_token_budget",
            "chat_template_kwargs",
            *_ENDS,
        ):
            if name not in body:
                continue
            for line in body[name] if name == "messages" else [{name: body[name]}]:
                reported = _lines(line)
                fill = _ROLES.get(line.get("role", "system" if name == "system" else ""), PALE)
                parts.append(box(x, y, 6, 16 * len(reported) + 8, fill))
                parts += [
                    words(x + 14, y + 16 + 16 * at, text, "start", mono=True)
                    for at, text in enumerate(reported)
                ]
                y += 16 * len(reported) + 14
        heights.append(y)
    parts.append(arrow(404, 28 + 60, 432, 28 + 60))
    return frame(860, int(max(heights)) + 4, parts)


_ENDS = ("stop_sequences", "stop", "max_tokens")
_ROLES = {"system": COLOURS[3], "user": COLOURS[0], "assistant": COLOURS[1], "tool": COLOURS[2]}


def _lines(expected: dict[str, object]) -> list[str]:
    """Return a line for each field, with blocks and calls on separate lines."""
    results = []
    for name, value in expected.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            results.append(f"{name}:")
            results += [f"  {line}" for item in value for line in _short(item)]
        elif value not in ([], ""):
            results.append(f"{name}: {value if isinstance(value, str) else json.dumps(value)}")
    return results


def _short(block: dict[str, object]) -> list[str]:
    call = block.get("function")
    if isinstance(call, dict):
        return [f"{block['type']} {block['id']}: {call['name']}", f"  arguments: {call['arguments']!r}"]
    kind = block["type"]
    if kind == "tool_use":
        return [f"tool_use {block['id']}: {block['name']}", f"  input: {json.dumps(block['input'])}"]
    if kind == "tool_result":
        return [f"tool_result {block['tool_use_id']}: {block['content']}"]
    return [f"{kind}: {block[str(kind)]}"]
