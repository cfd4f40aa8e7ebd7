"""Expansion of the placeholder (mark) of each item in a prompt to the item's span of placeholder tokens."""

from collections.abc import Callable, Sequence

import numpy as np

from quire.data.multimodal import Media, MediaItem
from quire.errors import RequestError
from quire.multimodal.processing import PreparedItem
from quire.multimodal.processors import Processor, merges_tokens, stands_alone

_ID_BYTES = 4
Mark = tuple[int, ...]
Join = Callable[[int, int], int | None]
"""Signature of `MergesTokens.joined`: returns the token that two adjacent tokens merge into, or None."""


def place(
    token_ids: Sequence[int], prepared: Sequence[PreparedItem], processor: Processor
) -> tuple[list[int], Media]:
    """Return the prompt's tokens with the span of every item, and the media with the positions of the spans.

    Each mark is the placeholder of an item in the prompt. The marks of a modality are replaced by the spans
    of its items, in order. A prompt may also contain the spans already. Items of a modality without marks, to
    which the model cross-attends, have no span."""
    if stands_alone(processor):
        processor.check_alone(token_ids, len(prepared))
        return list(prepared[0].processed.token_ids), Media([_build_item(0, prepared[0])])
    marks = {item.modality: tuple(processor.marks(item.modality)) for item in prepared}
    if not all(marks.values()):
        return list(token_ids), Media([_build_item(0, item) for item in prepared])
    joined = processor.joined if merges_tokens(processor) else _never_joined
    mark_places = _find_marks(token_ids, marks)
    if len(mark_places) != len(prepared):
        present = _find_spans(token_ids, prepared, joined)
        if present is None:
            raise _mismatch(prepared, len(mark_places))
        tokens, spans = list(token_ids), present
        facts = [item.processed.facts for item in prepared]
    else:
        matched = _match_items(mark_places, prepared, marks)
        tokens, spans = _replace_marks(token_ids, matched, marks, joined)
        facts = [item.processed.facts for _, item in matched]
    return tokens, Media(spans, processor.positions(tokens, spans, facts))


def _find_marks(token_ids: Sequence[int], marks: dict[str, Mark]) -> list[tuple[int, Mark]]:
    """Return the position in the prompt and the token ids of every mark. `marks` maps a modality to the token
    ids of its mark."""
    first: dict[int, list[Mark]] = {}
    for mark in sorted({*marks.values()}, key=len, reverse=True):
        first.setdefault(mark[0], []).append(mark)
    mark_places, end = [], 0
    for at, token_id in enumerate(token_ids):
        if at < end or token_id not in first:
            continue
        for mark in first[token_id]:
            if tuple(token_ids[at : at + len(mark)]) == mark:
                mark_places.append((at, mark))
                end = at + len(mark)
                break
    return mark_places


def _match_items(
    mark_places: Sequence[tuple[int, Mark]], prepared: Sequence[PreparedItem], marks: dict[str, Mark]
) -> list[tuple[int, PreparedItem]]:
    """Match each mark to the next item of its modality; return pairs of the mark's position and the item."""
    left, matched = list(prepared), []
    for at, mark in mark_places:
        fitting = next((k for k, item in enumerate(left) if marks[item.modality] == mark), None)
        if fitting is None:
            raise _mismatch(prepared, len(mark_places))
        matched.append((at, left.pop(fitting)))
    return matched


def _replace_marks(
    token_ids: Sequence[int],
    matched: Sequence[tuple[int, PreparedItem]],
    marks: dict[str, Mark],
    joined: Join,
) -> tuple[list[int], list[MediaItem]]:
    tokens: list[int] = []
    items, done = [], 0
    for at, item in matched:
        _append(tokens, token_ids[done:at], joined)
        offset = len(tokens)
        num_merged = _append(tokens, item.processed.token_ids, joined)
        items.append(_build_item(offset, item, num_merged))
        done = at + len(marks[item.modality])
    _append(tokens, token_ids[done:], joined)
    return tokens, items


def _append(tokens: list[int], more: Sequence[int], joined: Join) -> int:
    """Append tokens to the list `tokens`. If the last token of the list and the first new one merge into one
    token (`joined`), replace both by it. Return 1 if they merged, else 0."""
    both = joined(tokens[-1], more[0]) if tokens and more else None
    if both is None:
        tokens += more
        return 0
    tokens[-1] = both
    tokens += more[1:]
    return 1


def _never_joined(before: int, after: int) -> int | None:
    return None


def _find_spans(
    token_ids: Sequence[int], prepared: Sequence[PreparedItem], joined: Join = _never_joined
) -> list[MediaItem] | None:
    """Return the items at the spans that the prompt already contains, in order, or None if a span is missing.
    The first and last tokens of a span may be merged with adjacent tokens."""
    tokens, items, end = _bytes(token_ids), list[MediaItem](), 0
    for item in prepared:
        span = item.processed.token_ids
        front, back = (int(joined(span[edge], span[edge]) is not None) for edge in (0, -1))
        inner = span[front : len(span) - back]
        place = _find(tokens, _bytes(inner), max(end, front))
        if place is None:
            return None
        behind = place + len(inner)
        around = [*token_ids[place - front : place], *token_ids[behind : behind + back]]
        if len(around) < front + back or any(joined(id, span[0]) is None for id in around):
            return None
        is_apart = not front or (token_ids[place - 1] == span[0] and place - 1 >= end)
        items.append(_build_item(place - front if is_apart else place, item, 0 if is_apart else 1))
        end = behind + back
    return items


def _find(tokens: bytes, pattern: bytes, start: int) -> int | None:
    place = tokens.find(pattern, start * _ID_BYTES)
    while place > 0 and place % _ID_BYTES:
        place = tokens.find(pattern, place + 1)
    return None if place < 0 else place // _ID_BYTES


def _bytes(token_ids: Sequence[int]) -> bytes:
    """Return the token ids as bytes, since `bytes.find` searches in linear time."""
    return np.asarray(token_ids, np.int32).tobytes()


def _build_item(offset: int, item: PreparedItem, num_merged: int = 0) -> MediaItem:
    """Return the media item of a placeholder span at position `offset` of the prompt. The first `num_merged`
    tokens of the span are left out, since they are merged with text."""
    processed = item.processed
    return MediaItem(
        modality=item.modality,
        key=item.key,
        offset=offset,
        length=len(processed.token_ids) - num_merged,
        runs=[(first - num_merged, count) for first, count in processed.runs],
        arrays=processed.arrays,
        stored=processed.stored,
    )


def _mismatch(prepared: Sequence[PreparedItem], num_marks: int) -> RequestError:
    kinds = ", ".join(
        f"{sum(item.modality == kind for item in prepared)} {kind}(s)"
        for kind in dict.fromkeys(item.modality for item in prepared)
    )
    return RequestError(
        f"the prompt has {num_marks} placeholders for media, and {kinds} came with it: write the model's "
        "placeholder once for each item, and nowhere else",
        param="prompt",
    )
