"""Memory of each layout that fits, as an SVG chart."""

from html import escape

from quire.memory import human
from quire.plan.devices import Accelerator
from quire.plan.estimate import MemoryFit

_COLOURS = {
    "weights": "#4c72b0",
    "activations": "#dd8452",
    "graphs": "#937860",
    "libraries": "#8c8c8c",
    "KV cache": "#55a868",
}
_WIDTH, _LEFT, _BAR, _GAP, _TOP = 860, 130, 26, 14, 64


def svg(title: str, device: Accelerator, fits: list[MemoryFit]) -> str:
    """Draw a bar for one device of each layout; the frame is the device's memory."""
    bars = [fit for fit in fits if fit.memory is not None and fit.cache is not None]
    height = _TOP + len(bars) * (_BAR + _GAP) + 20
    scale = (_WIDTH - _LEFT - 20) / device.total_bytes
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="12" y="22" font-size="15">{escape(title)}: one {escape(device.label)}, '
        f"{human(device.total_bytes)}</text>",
        *_legend(),
    ]
    for number, fit in enumerate(bars):
        parts += _bar(fit, _TOP + number * (_BAR + _GAP), scale, device.total_bytes)
    return "\n".join([*parts, "</svg>\n"])


def _legend() -> list[str]:
    parts, x = [], 12
    for name, colour in _COLOURS.items():
        parts.append(f'<rect x="{x}" y="36" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="46">{name}</text>')
        x += 110
    return parts


def _bar(fit: MemoryFit, y: int, scale: float, total: int) -> list[str]:
    assert fit.memory is not None and fit.cache is not None
    label = f"{fit.precision} tp{fit.tp}" + (f" pp{fit.pp}" if fit.pp > 1 else "")
    parts = [f'<text x="12" y="{y + 17}">{escape(label)}</text>']
    x = float(_LEFT)
    for name, size in {**fit.memory.terms(), "KV cache": fit.cache.num_bytes}.items():
        width = size * scale
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{_COLOURS[name]}">'
            f"<title>{name}: {human(size)}</title></rect>"
        )
        x += width
    frame = f'<rect x="{_LEFT}" y="{y}" width="{total * scale:.1f}" height="{_BAR}" fill="none"'
    return [*parts, f'{frame} stroke="#444"/>']
