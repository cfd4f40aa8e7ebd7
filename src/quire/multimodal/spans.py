"""Spans: the marks of items in a prompt's tokens give way to the tokens that stand for them."""

from collections.abc import Callable, Sequence

import numpy as np

from quire.data.media import Item, Media
from quire.errors import RequestError
from quire.multimodal.families import Joins, Processor
from quire.multimodal.kitchen import Prepared

_ID_BYTES = 4
Mark = tuple[int, ...]
Join = Callable[[int, int], int | None]
"""See `Joins`."""


def place(
    token_ids: Sequence[int], prepared: Sequence[Prepared], processor: Processor
) -> tuple[list[int], Media]:
    """The tokens with all spans in their places. Items of a modality go to its marks in their order; a prompt
    may also have the spans already. Items of a modality without a mark have no span."""
    marks = {each.modality: tuple(processor.marks(each.modality)) for each in prepared}
    if not all(marks.values()):
        return list(token_ids), Media([_item(0, each) for each in prepared])
    joined = processor.joined if isinstance(processor, Joins) else _apart
    found = _marks_in(token_ids, marks)
    if len(found) != len(prepared):
        there = _spans_in(token_ids, prepared)
        if there is None:
            raise _mismatch(prepared, len(found))
        tokens, spans = list(token_ids), [_item(offset, each) for offset, each in there]
        facts = [each.processed.facts for _, each in there]
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
    prepared: Sequence[Prepared],
    marks: dict[str, Mark],
) -> list[tuple[int, Prepared]]:
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
    matched: Sequence[tuple[int, Prepared]],
    marks: dict[str, Mark],
    joined: Join,
) -> tuple[list[int], list[Item]]:
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


def _spans_in(token_ids: Sequence[int], prepared: Sequence[Prepared]) -> list[tuple[int, Prepared]] | None:
    """The spans as they stand in the prompt, one behind the other; None if one is not there."""
    tokens, items, start = _bytes(token_ids), [], 0
    for each in prepared:
        span = _bytes(each.processed.token_ids)
        start = tokens.find(span, start)
        while start > 0 and start % _ID_BYTES:
            start = tokens.find(span, start + 1)
        if start < 0:
            return None
        items.append((start // _ID_BYTES, each))
        start += len(span)
    return items


def _bytes(token_ids: Sequence[int]) -> bytes:
    """In which a span is found in a time that does not grow with both lengths multiplied."""
    return np.asarray(token_ids, np.int32).tobytes()


def _item(offset: int, each: Prepared, cut: int = 0) -> Item:
    """Of which the first so many tokens are not its own."""
    processed = each.processed
    return Item(
        modality=each.modality,
        key=each.key,
        offset=offset,
        length=len(processed.token_ids) - cut,
        runs=[(first - cut, count) for first, count in processed.runs],
        arrays=processed.arrays,
        stored=processed.stored,
    )


def _mismatch(prepared: Sequence[Prepared], num_marks: int) -> RequestError:
    kinds = ", ".join(
        f"{sum(each.modality == kind for each in prepared)} {kind}(s)"
        for kind in dict.fromkeys(each.modality for each in prepared)
    )
    return RequestError(
        f"the prompt has {num_marks} places for media, and {kinds} came with it: write the model's mark once "
        "for each item, and nowhere else",
        param="prompt",
    )
