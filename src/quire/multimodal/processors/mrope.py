"""M-RoPE positions of a prompt with images and videos: time, height and width of each token."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.data.multimodal import MediaItem
from quire.multimodal.processors.grid import PatchSpans


def mrope_positions(
    num_tokens: int,
    items: Sequence[MediaItem],
    facts: Sequence[Mapping[str, Any]],
    merge: int,
    *,
    has_time: bool = False,
) -> NDArray[np.int32]:
    """Return the M-RoPE positions of a prompt, [3, num_tokens]: time, height and width.

    Text advances by one on all axes; the tokens of an item have their positions in its grid. Text after a
    grid continues after the larger of height and width or, with `has_time`, after the largest of all axes.
    `facts` are the `ProcessedItem.facts`; `merge` is the side of the square of patches of one token."""
    out = np.empty((3, num_tokens), np.int32)
    done = at = 0
    for item, known in zip(items, facts, strict=True):
        grid = PatchSpans(*known["grid"])
        rows, columns = grid.height // merge, grid.width // merge
        places = item.places()
        steps = grid.steps // len(places)
        time = (np.arange(steps, dtype=np.float32) * np.float32(known.get("step", 1.0))).astype(np.int32)
        axes = np.meshgrid(time, np.arange(rows), np.arange(columns), indexing="ij")
        cells = np.stack(axes).reshape(3, -1)
        for first, count in places:
            out[:, done:first] = at + np.arange(first - done)
            at += first - done
            out[:, first : first + count] = at + cells
            at += max(rows, columns, int(time[-1]) + 1 if has_time else 0)
            done = first + count
    out[:, done:] = at + np.arange(num_tokens - done)
    return out
