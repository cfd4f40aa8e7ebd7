"""Shapes for the SVG drawings of docs/."""

from collections.abc import Sequence
from html import escape

COLOURS = ("#4c72b0", "#55a868", "#dd8452", "#937860", "#8172b3", "#c44e52", "#64b5cd")
INK, PAPER, PALE = "#333", "white", "#e8e8e8"


def frame(width: int, height: int, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="{PAPER}"/>', *parts, "</svg>\n"])


def box(x: float, y: float, width: float, height: float, fill: str, text: str = "", tooltip: str = "") -> str:
    title = f"<title>{escape(tooltip)}</title>" if tooltip else ""
    rect = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{PAPER}">'
    ink = INK if fill in (PALE, PAPER) else "white"
    label = f'<text x="{x + width / 2:g}" y="{y + height / 2 + 4:g}" text-anchor="middle" fill="{ink}">'
    return f"{rect}{title}</rect>" + (f"{label}{escape(text)}</text>" if text else "")


def words(
    x: float, y: float, text: str, anchor: str = "middle", *, size: int = 12, mono: bool = False
) -> str:
    family = ' font-family="monospace" xml:space="preserve"' if mono else ""
    head = f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{INK}"{family}>'
    return f"{head}{escape(text)}</text>"


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """Draw a straight arrow along one of the axes."""
    if y == to_y:
        tip = to_x - 7 if to_x > x else to_x + 7
        line, head = f"M{x:g} {y:g}H{tip:g}", f"M{to_x:g} {y:g}L{tip:g} {y - 4:g}V{y + 4:g}Z"
    else:
        tip = to_y - 7 if to_y > y else to_y + 7
        line, head = f"M{x:g} {y:g}V{tip:g}", f"M{x:g} {to_y:g}L{x - 4:g} {tip:g}H{x + 4:g}Z"
    return f'<path d="{line}" stroke="{INK}"/><path d="{head}" fill="{INK}"/>'
