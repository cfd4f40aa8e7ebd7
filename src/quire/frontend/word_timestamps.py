"""Splitting of transcribed tokens into words."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from string import punctuation

from quire.text.tokenizer import Tokenizer

UNSPACED = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages without spaces between words: each character is a word."""
_OPENING = "\"'“¿([{-"
_CLOSING = "\"'.。,，!！?？:：”)]}、"
_BROKEN = "\ufffd"


@dataclass(frozen=True, slots=True)
class WordTimestamp:
    """A word, and the slice (`place`) of the transcribed tokens that it consists of."""

    text: str
    place: slice


def words_of(tokenizer: Tokenizer, token_ids: Sequence[int], *, spaced: bool) -> list[WordTimestamp]:
    """Split transcribed tokens into words; punctuation belongs to the word next to it. `spaced` means that
    the language has spaces between words."""
    words = list[WordTimestamp]()
    for piece in _pieces(tokenizer, token_ids):
        bare = piece.text.strip()
        goes_on = spaced and not piece.text.startswith(" ") and bare not in punctuation
        if words and goes_on:
            words[-1] = _joined(words[-1], piece)
        else:
            words.append(piece)
    return _with_punctuation(words)


def _pieces(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[WordTimestamp]:
    """Split tokens into the shortest runs whose text consists of whole characters."""
    full_text = tokenizer.decode(token_ids)
    pieces, start, offset = list[WordTimestamp](), 0, 0
    for end in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[start:end])
        broken = text.find(_BROKEN)
        if broken < 0 or full_text[offset + broken : offset + broken + 1] == _BROKEN:
            pieces.append(WordTimestamp(text, slice(start, end)))
            start, offset = end, offset + len(text)
    if start < len(token_ids):
        pieces.append(WordTimestamp(full_text[offset:], slice(start, len(token_ids))))
    return pieces


def _joined(first: WordTimestamp, second: WordTimestamp) -> WordTimestamp:
    return WordTimestamp(first.text + second.text, slice(first.place.start, second.place.stop))


def _with_punctuation(words: Sequence[WordTimestamp]) -> list[WordTimestamp]:
    ahead = list[WordTimestamp]()
    for word in reversed(words):
        text = word.text
        if ahead and text.startswith(" ") and text.strip() in _OPENING:
            ahead[-1] = _joined(word, ahead[-1])
        else:
            ahead.append(word)
    result = list[WordTimestamp]()
    for word in reversed(ahead):
        if result and not result[-1].text.endswith(" ") and word.text and word.text in _CLOSING:
            result[-1] = _joined(result[-1], word)
        else:
            result.append(word)
    return [replace(word, text=word.text.strip()) for word in result if word.text.strip()]
