"""Spans: the marks of items in a prompt's tokens give way to the tokens that stand for them."""

from collections.abc import Sequence

from quire.data.media import Item, Media
from quire.errors import RequestError
from quire.multimodal.families import Processor
from quire.multimodal.kitchen import Prepared

Mark = tuple[int, ...]


def place(
    token_ids: Sequence[int], prepared: Sequence[Prepared], processor: Processor
) -> tuple[list[int], Media]:
    """The tokens with all spans in their places. Items of a modality go to its marks in their order; a prompt
    may also have the spans already."""
    marks = {each.modality: tuple(processor.marks(each.modality)) for each in prepared}
    found = _marks_in(token_ids, marks)
    if len(found) != len(prepared):
        items = _spans_in(token_ids, prepared)
        if items is None:
            raise _mismatch(prepared, len(found))
        tokens = list(token_ids)
    else:
        tokens, items = _replaced(token_ids, _matched(found, prepared, marks), marks)
    facts = [each.processed.facts for _, each in items]
    spans = [_item(offset, each) for offset, each in items]
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
    token_ids: Sequence[int], matched: Sequence[tuple[int, Prepared]], marks: dict[str, Mark]
) -> tuple[list[int], list[tuple[int, Prepared]]]:
    tokens: list[int] = []
    items, done = [], 0
    for at, each in matched:
        tokens += token_ids[done:at]
        items.append((len(tokens), each))
        tokens += each.processed.token_ids
        done = at + len(marks[each.modality])
    tokens += token_ids[done:]
    return tokens, items


def _spans_in(token_ids: Sequence[int], prepared: Sequence[Prepared]) -> list[tuple[int, Prepared]] | None:
    """The spans as they stand in the prompt, one behind the other; None if one is not there."""
    tokens, items, start = list(token_ids), [], 0
    for each in prepared:
        span = each.processed.token_ids
        while start < len(tokens) and tokens[start : start + len(span)] != span:
            try:
                start = tokens.index(span[0], start + 1)
            except ValueError:
                return None
        if start >= len(tokens):
            return None
        items.append((start, each))
        start += len(span)
    return items


def _item(offset: int, each: Prepared) -> Item:
    processed = each.processed
    return Item(
        modality=each.modality,
        key=each.key,
        offset=offset,
        length=len(processed.token_ids),
        runs=processed.runs,
        arrays=processed.arrays,
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
