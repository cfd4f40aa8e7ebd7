"""Tests of prompts for servers: ids or texts of the requested lengths."""

import json
from pathlib import Path

import pytest
from tiny_text import text_model

from quire.bench.datasets import Query, custom_queries, random_queries, random_samples, sharegpt_queries
from quire.errors import ConfigError
from quire.text.tokenizer import Tokenizer, load_tokenizer

QUESTION, ANSWER = "One two three four five six", "six seven eight nine ten"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(text_model(tmp_path_factory.getbasetemp()).path, "hf")


def test_random_prompts_are_ids_without_a_tokenizer() -> None:
    samples = random_samples(3, vocab=50, input_len=6, output_len=2)
    assert random_queries(samples, None) == [Query(sample.prompt_ids, 6, 2) for sample in samples]


def test_random_texts_have_the_requested_number_of_tokens(tokenizer: Tokenizer) -> None:
    """Check that nearly all lengths are exact after decoding and encoding random ids."""
    samples = random_samples(40, vocab=tokenizer.vocab_size, input_len=20, output_len=2)
    actual = random_queries(samples, tokenizer)
    lengths = [len(tokenizer.encode(str(item.prompt), add_special_tokens=False)) for item in actual]
    assert sum(length == 20 for length in lengths) >= 36
    assert [item.prompt_len for item in actual] == [length + 1 for length in lengths], "with the <s>"


def test_conversations_without_a_tokenizer_are_selected_by_bytes(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "talk.json"
    turns = [[QUESTION, ANSWER], ["hi", ANSWER], ["x" * 5000, ANSWER]]
    path.write_text(json.dumps([{"conversations": [{"value": text} for text in turn]} for turn in turns]))
    assert sharegpt_queries(2, path, None) == [Query(QUESTION, 0, len(ANSWER) // 4)] * 2
    (counted,) = sharegpt_queries(1, path, tokenizer, output_len=8)
    assert counted == Query(QUESTION, len(tokenizer.encode(QUESTION)), 8)


def test_custom_dataset_lines(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b", "output_tokens": 3}\n')
    actual = custom_queries(4, path, None, output_len=9)
    assert sorted({(item.prompt, item.output_len) for item in actual}) == [("a", 9), ("b", 3)]
    assert len(actual) == 4 and actual[:2] == actual[2:]
    assert custom_queries(1, path, tokenizer, output_len=9)[0].prompt_len == 2


@pytest.mark.parametrize(
    "line", ["{", "[1]", '{"text": "a"}', '{"prompt": 5}', '{"prompt": "a", "output_tokens": "x"}']
)
def test_invalid_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"mine\.jsonl, line 2"):
        custom_queries(1, path, None, output_len=9)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        custom_queries(1, tmp_path / "nowhere", None, output_len=9)
    (tmp_path / "empty").write_text("")
    with pytest.raises(ConfigError, match="no prompt"):
        custom_queries(1, tmp_path / "empty", None, output_len=9)
