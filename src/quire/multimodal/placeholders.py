"""Spans: the marks of items in a prompt's tokens give way to the tokens that stand for them."""

from collections.abc import Callable, Sequence

import numpy as np

from quire.data.multimodal import Media, MediaItem
from quire.errors import RequestError
from quire.multimodal.processing import PreparedItem
from quire.multimodal.processors import Processor, joins

_ID_BYTES = 4
Mark = tuple[int, ...]
Join = Callable[[int, int], int | None]
"""See `Joins`."""


def place(
    token_ids: Sequence[int], prepared: Sequence[PreparedItem], processor: Processor
) -> tuple[list[int], Media]:
    """The tokens with all spans in their places. Items of a modality go to its marks in their order; a prompt
    may also have the spans already. Items of a modality without a mark have no span."""
    marks = {each.modality: tuple(processor.marks(each.modality)) for each in prepared}
    if not all(marks.values()):
        return list(token_ids), Media([_item(0, each) for each in prepared])
    joined = processor.joined if joins(processor) else _apart
    found = _marks_in(token_ids, marks)
    if len(found) != len(prepared):
        there = _spans_in(token_ids, prepared, joined)
        if there is None:
            raise _mismatch(prepared, len(found))
        tokens, spans = list(token_ids), there
        facts = [each.processed.facts for each in prepared]
    else:
        matched = _matched(found, prepared, marks)
        tokens, spans = _replaced(token_ids, matched, marks, joined)
        facts = [each.processed.facts for _, each in matched]
    return tokens, Media(spans, processor.positions(tokens, spans, facts))


def _marks_in(token_ids: Sequence[int], marks: dict[str, Mark]) -> list[tuple[int, Mark]]:
    """Where there is a mark, and which."""
    first: dict[int, list[Mark]] = {}
    for mark in sorted({*marks.values()}, key=len, reverse=True):
        first.setdefault(mark[0], []).append(mark)
    found, end = [], 0
    for at, token_id in enumerate(token_ids):
        if at < end or token_id not in first:
            continue
        for mark in first[token_id]:
            if tuple(token_ids[at : at + len(mark)]) == mark:
                found.append((at, mark))
                end = at + len(mark)
                break
    return found


def _matched(
    found: Sequence[tuple[int, Mark]],
    prepared: Sequence[PreparedItem],
    marks: dict[str, Mark],
) -> list[tuple[int, PreparedItem]]:
    """To each mark the first item left that it may be of."""
    left, matched = list(prepared), []
    for at, mark in found:
        fitting = next((k for k, each in enumerate(left) if marks[each.modality] == mark), None)
        if fitting is None:
            raise _mismatch(prepared, len(found))
        matched.append((at, left.pop(fitting)))
    return matched


def _replaced(
    token_ids: Sequence[int],
    matched: Sequence[tuple[int, PreparedItem]],
    marks: dict[str, Mark],
    joined: Join,
) -> tuple[list[int], list[MediaItem]]:
    tokens: list[int] = []
    items, done = [], 0
    for at, each in matched:
        _append(tokens, token_ids[done:at], joined)
        offset = len(tokens)
        cut = _append(tokens, each.processed.token_ids, joined)
        items.append(_item(offset, each, cut))
        done = at + len(marks[each.modality])
    _append(tokens, token_ids[done:], joined)
    return tokens, items


def _append(tokens: list[int], more: Sequence[int], joined: Join) -> int:
    """How many of `more` have become one with what stands before them."""
    both = joined(tokens[-1], more[0]) if tokens and more else None
    if both is None:
        tokens += more
        return 0
    tokens[-1] = both
    tokens += more[1:]
    return 1


def _apart(before: int, after: int) -> int | None:
    return None


def _spans_in(
    token_ids: Sequence[int], prepared: Sequence[PreparedItem], joined: Join = _apart
) -> list[MediaItem] | None:
    """The spans as they stand in the prompt, one behind the other; None if one is not there. Their first and
    last tokens may have become one with what is around them."""
    tokens, items, end = _bytes(token_ids), list[MediaItem](), 0
    for each in prepared:
        span = each.processed.token_ids
        front, back = (int(joined(span[edge], span[edge]) is not None) for edge in (0, -1))
        inner = span[front : len(span) - back]
        place = _find(tokens, _bytes(inner), max(end, front))
        if place is None:
            return None
        behind = place + len(inner)
        around = [*token_ids[place - front : place], *token_ids[behind : behind + back]]
        if len(around) < front + back or any(joined(id, span[0]) is None for id in around):
            return None
        is_own = not front or (token_ids[place - 1] == span[0] and place - 1 >= end)
        items.append(_item(place - front if is_own else place, each, 0 if is_own else 1))
        end = behind + back
    return items


def _find(tokens: bytes, wanted: bytes, start: int) -> int | None:
    place = tokens.find(wanted, start * _ID_BYTES)
    while place > 0 and place % _ID_BYTES:
        place = tokens.find(wanted, place + 1)
    return None if place < 0 else place // _ID_BYTES


def _bytes(token_ids: Sequence[int]) -> bytes:
    """In which a span is found in a time that does not grow with both lengths multiplied."""
    return np.asarray(token_ids, np.int32).tobytes()


def _item(offset: int, each: PreparedItem, cut: int = 0) -> MediaItem:
    """Of which the first so many tokens are not its own."""
    processed = each.processed
    return MediaItem(
        modality=each.modality,
        key=each.key,
        offset=offset,
        length=len(processed.token_ids) - cut,
        runs=[(first - cut, count) for first, count in processed.runs],
        arrays=processed.arrays,
        stored=processed.stored,
    )


def _mismatch(prepared: Sequence[PreparedItem], num_marks: int) -> RequestError:
    kinds = ", ".join(
        f"{sum(each.modality == kind for each in prepared)} {kind}(s)"
        for kind in dict.fromkeys(each.modality for each in prepared)
    )
    return RequestError(
        f"the prompt has {num_marks} places for media, and {kinds} came with it: write the model's mark once "
        "for each item, and nowhere else",
        param="prompt",
    )
