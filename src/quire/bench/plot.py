"""Charts as SVG: bars, stacked bars, and latency against throughput."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple, Protocol

_COLOURS = ("#b0b7c3", "#4c72b0", "#55a868", "#dd8452", "#937860")
_WIDTH = 860
_BLUE, _RED = "#4c72b0", "#c44e52"


def _document(width: int, height: int, parts: Sequence[str], *, attributes: str = "") -> str:
    size = f'width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}{attributes} font-family="sans-serif"'
    return "\n".join([f'{head} font-size="12">', f'<rect {size} fill="white"/>', *parts, "</svg>\n"])


def _title(text: str) -> str:
    return f'<text x="12" y="22" font-size="15">{escape(text)}</text>'


def _legend(colours: Mapping[str, str], *, step: int | None = None) -> list[str]:
    """Return a square and a name for each series, `step` pixels apart or as far as the names need."""
    parts, x = [], 12
    for name, colour in colours.items():
        parts.append(f'<rect x="{x}" y="36" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="46">{escape(name)}</text>')
        x += step or 40 + 7 * len(name)
    return parts


# ---- bars


class BarGroup(NamedTuple):
    """A labelled group of bars that are compared with each other."""

    label: str
    values: Mapping[str, float]
    """Length of each bar, by name of its series; a series without a value has no bar."""
    texts: Mapping[str, str]
    """Labels behind the bars, by series."""


def bar_chart(title: str, groups: Sequence[BarGroup], *, mark: float | None = None) -> str:
    """Return an SVG chart with a bar for each value, all on one scale; `mark` is the value at which a
    dashed line crosses them."""
    left, right, bar, gap, top = 210, 150, 15, 12, 62
    series = list(dict.fromkeys(name for group in groups for name in group.values))
    first = 1 if len(series) == 1 else 0
    colours = {name: _COLOURS[(first + number) % len(_COLOURS)] for number, name in enumerate(series)}
    scale = (_WIDTH - left - right) / max(value for group in groups for value in group.values.values())
    parts, y = [_title(title), *_legend(colours)], top
    for group in groups:
        middle = y + len(group.values) * bar / 2 + 4
        parts.append(f'<text x="{left - 10}" y="{middle:g}" text-anchor="end">{escape(group.label)}</text>')
        for name, value in group.values.items():
            width = round(max(value * scale, 1.0), 1)
            rect = f'<rect x="{left}" y="{y}" width="{width:g}" height="{bar - 2}" fill="{colours[name]}"/>'
            text = escape(group.texts[name])
            parts += [rect, f'<text x="{left + width + 6:g}" y="{y + 11}" fill="#444">{text}</text>']
            y += bar
        y += gap
    if mark is not None:
        x = round(left + mark * scale, 1)
        parts.append(f'<path d="M{x:g} {top - 6}V{y - gap + 6}" stroke="{_RED}" stroke-dasharray="4 4"/>')
    return _document(_WIDTH, y, parts, attributes=f' viewBox="0 0 {_WIDTH} {y}"')


def stacked_chart(
    title: str,
    bars: Sequence[tuple[str, Mapping[str, int]]],
    *,
    total: int,
    colours: Mapping[str, str],
    text: Callable[[int], str],
) -> str:
    """Return an SVG chart with a stacked bar for each (label, sizes of its parts by name), in a frame of
    the size `total`. `colours` are by part; `text` formats a size for the tooltip of a part."""
    left, bar, gap, top = 130, 26, 14, 64
    scale = (_WIDTH - left - 20) / total
    parts = [_title(title), *_legend(colours, step=110)]
    for number, (label, sizes) in enumerate(bars):
        x, y = float(left), top + number * (bar + gap)
        parts.append(f'<text x="12" y="{y + 17}">{escape(label)}</text>')
        for name, size in sizes.items():
            width = size * scale
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{bar}" fill="{colours[name]}">'
                f"<title>{name}: {text(size)}</title></rect>"
            )
            x += width
        frame = f'<rect x="{left}" y="{y}" width="{total * scale:.1f}" height="{bar}" fill="none"'
        parts.append(f'{frame} stroke="#444"/>')
    return _document(_WIDTH, top + len(bars) * (bar + gap) + 20, parts)


# ---- latency against throughput


class Plotted(Protocol):
    """A measured point: TTFT and ITL (inter-token latency), and tokens per second, at one concurrency."""

    @property
    def concurrency(self) -> int: ...
    @property
    def ttft_ms(self) -> float: ...
    @property
    def itl_ms(self) -> float: ...
    @property
    def tok_s(self) -> float: ...
    def keeps(self, ttft_ms: float, itl_ms: float) -> bool: ...


def frontier(points: Sequence[Plotted]) -> list[Plotted]:
    """Return the Pareto-optimal points of latency and throughput, the lowest inter-token latency first."""
    best: list[Plotted] = []
    for point in sorted(points, key=lambda point: (point.itl_ms, -point.tok_s)):
        if not best or point.tok_s > best[-1].tok_s:
            best.append(point)
    return best


def pareto_chart(points: Sequence[Plotted], ttft_ms: float, itl_ms: float) -> str:
    """Return an SVG chart of tokens per second over the time between tokens, on a log scale. Filled dots
    meet both limits in milliseconds; a line joins the Pareto-optimal points."""
    width, height, left, bottom, edge = 760, 440, 70, 50, 24
    low = math.log10(max(min(point.itl_ms for point in points), 0.01) * 0.8)
    high = math.log10(max(*(point.itl_ms for point in points), itl_ms) * 1.25)
    top = max(point.tok_s for point in points) * 1.1

    def place(x_ms: float, tok_s: float) -> tuple[float, float]:
        share = (math.log10(max(x_ms, 0.01)) - low) / (high - low)
        x = left + share * (width - left - edge)
        return round(x, 1), round(height - bottom - tok_s / top * (height - bottom - edge), 1)

    limit = place(itl_ms, 0)[0]
    line = " ".join(f"{x},{y}" for x, y in (place(point.itl_ms, point.tok_s) for point in frontier(points)))
    parts = [
        f'<path d="M{left} {edge}V{height - bottom}H{width - edge}" fill="none" stroke="#444"/>',
        f'<text x="{left}" y="{height - 14}">ms between tokens, p95 (dashed: the limit)</text>',
        f'<text x="12" y="16">tokens per second, up to {top / 1.1:,.0f}</text>',
        f'<path d="M{limit} {edge}V{height - bottom}" stroke="{_RED}" stroke-dasharray="5 4"/>',
        f'<polyline points="{line}" fill="none" stroke="{_BLUE}"/>',
    ]
    for point in points:
        x, y = place(point.itl_ms, point.tok_s)
        fill = _BLUE if point.keeps(ttft_ms, itl_ms) else "white"
        label = f"{point.concurrency} concurrent: {point.ttft_ms:.0f} ms first, {point.itl_ms:.1f} ms between"
        dot = f'<circle cx="{x}" cy="{y}" r="5" fill="{fill}" stroke="{_BLUE}">'
        parts.append(f"{dot}<title>{label}</title></circle>")
        parts.append(f'<text x="{x + 7}" y="{y + 4}" fill="#666">{point.concurrency}</text>')
    return _document(width, height, parts)
