"""Tests of words and their tokens against transformers."""

import pytest
from fake_engine import byte_tokenizer

from quire.frontend.word_timestamps import words_of

TEXTS = {
    " Hello there, you (all) \"know\" it's 5.30 - don't you?": "english",
    " Ça va été œuvre": "french",
    "no space first": "english",
    " ... ": "english",
    "": "english",
    "今日は、晴れ。": "japanese",
}


class TransformersTokenizer:
    """The tokenizer interface that transformers needs."""

    eos_token_id = 1 << 20

    def decode(self, token_ids: list[int], **_: object) -> str:
        return byte_tokenizer().decode(token_ids)


@pytest.mark.parametrize("text", TEXTS)
def test_words_match_transformers(text: str) -> None:
    from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text, False)
    words, _, places = _combine_tokens_into_words(TransformersTokenizer(), ids, TEXTS[text])
    expected = [
        (word.strip(), place[0], place[-1] + 1)
        for word, place in zip(words, places, strict=True)
        if word.strip()
    ]
    actual = words_of(tokenizer, ids, spaced=TEXTS[text] != "japanese")
    assert [(word.text, word.place.start, word.place.stop) for word in actual] == expected


def test_incomplete_characters_are_kept() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(" a é", False)[:-1]
    actual = words_of(tokenizer, ids, spaced=True)
    assert [word.place for word in actual] == [slice(0, 2), slice(2, 4)]
