"""A bar chart as SVG."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

_WIDTH, _LEFT, _RIGHT, _BAR, _GAP, _TOP = 860, 210, 150, 15, 12, 62
_COLOURS = ("#b0b7c3", "#4c72b0", "#55a868", "#dd8452", "#937860")


class BarGroup(NamedTuple):
    """Bars that are compared with each other."""

    label: str
    values: Mapping[str, float]
    """By series; a series without a value has no bar."""
    texts: Mapping[str, str]
    """Labels behind the bars, by series."""


def svg(title: str, groups: Sequence[BarGroup], *, mark: float | None = None) -> str:
    """Draw a bar for each value, all on one scale; `mark` is a dashed line across them."""
    series = list(dict.fromkeys(name for group in groups for name in group.values))
    first = 1 if len(series) == 1 else 0
    colours = {name: _COLOURS[(first + number) % len(_COLOURS)] for number, name in enumerate(series)}
    scale = (_WIDTH - _LEFT - _RIGHT) / max(value for group in groups for value in group.values.values())
    parts, y = [*_legend(colours)], _TOP
    for group in groups:
        middle = y + len(group.values) * _BAR / 2 + 4
        parts.append(f'<text x="{_LEFT - 10}" y="{middle:g}" text-anchor="end">{escape(group.label)}</text>')
        for name, value in group.values.items():
            width = round(max(value * scale, 1.0), 1)
            parts.append(
                f'<rect x="{_LEFT}" y="{y}" width="{width:g}" height="{_BAR - 2}" fill="{colours[name]}"/>'
            )
            text = escape(group.texts[name])
            parts.append(f'<text x="{_LEFT + width + 6:g}" y="{y + 11}" fill="#444">{text}</text>')
            y += _BAR
        y += _GAP
    if mark is not None:
        x = round(_LEFT + mark * scale, 1)
        parts.append(f'<path d="M{x:g} {_TOP - 6}V{y - _GAP + 6}" stroke="#c44e52" stroke-dasharray="4 4"/>')
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y}" viewBox="0 0 {_WIDTH} {y}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{y}" fill="white"/>',
        f'<text x="12" y="22" font-size="15">{escape(title)}</text>',
    ]
    return "\n".join([*head, *parts, "</svg>\n"])


def _legend(colours: Mapping[str, str]) -> list[str]:
    parts, x = [], 12
    for name, colour in colours.items():
        parts.append(f'<rect x="{x}" y="36" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="46">{escape(name)}</text>')
        x += 40 + 7 * len(name)
    return parts
