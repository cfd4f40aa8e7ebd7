"""A chart of latency against throughput; Pareto-optimal points are joined by a line."""

import math
from collections.abc import Sequence
from typing import Protocol

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _EDGE = 760, 440, 70, 50, 24


class Plotted(Protocol):
    """A measured point."""

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
    """Return the Pareto-optimal points, fastest first."""
    best: list[Plotted] = []
    for point in sorted(points, key=lambda point: (point.itl_ms, -point.tok_s)):
        if not best or point.tok_s > best[-1].tok_s:
            best.append(point)
    return best


def svg(points: Sequence[Plotted], ttft_ms: float, itl_ms: float) -> str:
    """Draw tokens per second over the time between tokens, on a log scale. Filled dots meet both limits."""
    low = math.log10(max(min(point.itl_ms for point in points), 0.01) * 0.8)
    high = math.log10(max(*(point.itl_ms for point in points), itl_ms) * 1.25)
    top = max(point.tok_s for point in points) * 1.1

    def place(x_ms: float, tok_s: float) -> tuple[float, float]:
        share = (math.log10(max(x_ms, 0.01)) - low) / (high - low)
        x = _LEFT + share * (_WIDTH - _LEFT - _EDGE)
        return round(x, 1), round(_HEIGHT - _BOTTOM - tok_s / top * (_HEIGHT - _BOTTOM - _EDGE), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<path d="M{_LEFT} {_EDGE}V{_HEIGHT - _BOTTOM}H{_WIDTH - _EDGE}" fill="none" stroke="#444"/>',
        f'<text x="{_LEFT}" y="{_HEIGHT - 14}">ms between tokens, p95 (dashed: the limit)</text>',
        f'<text x="12" y="16">tokens per second, up to {top / 1.1:,.0f}</text>',
    ]
    limit = place(itl_ms, 0)[0]
    parts.append(f'<path d="M{limit} {_EDGE}V{_HEIGHT - _BOTTOM}" stroke="#c44e52" stroke-dasharray="5 4"/>')
    line = " ".join(f"{x},{y}" for x, y in (place(point.itl_ms, point.tok_s) for point in frontier(points)))
    parts.append(f'<polyline points="{line}" fill="none" stroke="#4c72b0"/>')
    for point in points:
        x, y = place(point.itl_ms, point.tok_s)
        fill = "#4c72b0" if point.keeps(ttft_ms, itl_ms) else "white"
        label = f"{point.concurrency} concurrent: {point.ttft_ms:.0f} ms first, {point.itl_ms:.1f} ms between"
        dot = f'<circle cx="{x}" cy="{y}" r="5" fill="{fill}" stroke="#4c72b0">'
        parts.append(f"{dot}<title>{label}</title></circle>")
        parts.append(f'<text x="{x + 7}" y="{y + 4}" fill="#666">{point.concurrency}</text>')
    return "\n".join([*parts, "</svg>\n"])
