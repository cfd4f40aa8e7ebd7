"""Words: what was said, word by word, with the moments between them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from string import punctuation

from quire.text.tokenizer import Tokenizer

UNSPACED = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages that put no spaces between words: each character is one."""
_BEFORE = "\"'“¿([{-"
_BEHIND = "\"'.。,，!！?？:：”)]}、"
_BROKEN = "\ufffd"


@dataclass(frozen=True, slots=True)
class WordTimestamp:
    """A word, and the tokens that it is made of."""

    text: str
    place: slice


def words_of(tokenizer: Tokenizer, token_ids: Sequence[int], *, spaced: bool) -> list[WordTimestamp]:
    """A text in words; what stands before or behind a word belongs to it."""
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
    """As few tokens as are whole characters."""
    whole = tokenizer.decode(token_ids)
    found, start, offset = list[WordTimestamp](), 0, 0
    for end in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[start:end])
        broken = text.find(_BROKEN)
        if broken < 0 or whole[offset + broken : offset + broken + 1] == _BROKEN:
            found.append(WordTimestamp(text, slice(start, end)))
            start, offset = end, offset + len(text)
    if start < len(token_ids):
        found.append(WordTimestamp(whole[offset:], slice(start, len(token_ids))))
    return found


def _joined(first: WordTimestamp, second: WordTimestamp) -> WordTimestamp:
    return WordTimestamp(first.text + second.text, slice(first.place.start, second.place.stop))


def _with_punctuation(words: Sequence[WordTimestamp]) -> list[WordTimestamp]:
    ahead = list[WordTimestamp]()
    for word in reversed(words):
        text = word.text
        if ahead and text.startswith(" ") and text.strip() in _BEFORE:
            ahead[-1] = _joined(word, ahead[-1])
        else:
            ahead.append(word)
    found = list[WordTimestamp]()
    for word in reversed(ahead):
        if found and not found[-1].text.endswith(" ") and word.text and word.text in _BEHIND:
            found[-1] = _joined(found[-1], word)
        else:
            found.append(word)
    return [replace(word, text=word.text.strip()) for word in found if word.text.strip()]
