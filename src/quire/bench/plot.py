"""Charts as SVG: bars and stacked bars."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

_COLOURS = ("#b0b7c3", "#4c72b0", "#55a868", "#dd8452", "#937860")
_WIDTH = 860
BLUE, RED = "#4c72b0", "#c44e52"


def document(width: int, height: int, parts: Sequence[str], *, attributes: str = "") -> str:
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
        parts.append(f'<path d="M{x:g} {top - 6}V{y - gap + 6}" stroke="{RED}" stroke-dasharray="4 4"/>')
    return document(_WIDTH, y, parts, attributes=f' viewBox="0 0 {_WIDTH} {y}"')


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
    return document(_WIDTH, top + len(bars) * (bar + gap) + 20, parts)
