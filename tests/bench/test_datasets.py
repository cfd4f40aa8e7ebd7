"""Tests of benchmark prompts: repeatable, and of the requested lengths."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_text import text_model

from quire.bench.datasets import prefix_samples, random_samples, sharegpt_samples
from quire.errors import ConfigError
from quire.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(text_model(tmp_path_factory.getbasetemp()).path, "hf")


def test_random_prompts_have_the_requested_lengths() -> None:
    samples = random_samples(5, vocab=100, input_len=7, output_len=3)
    assert {(len(sample.prompt_ids), sample.output_len) for sample in samples} == {(7, 3)}
    assert all(0 <= id < 100 for sample in samples for id in sample.prompt_ids)
    assert samples == random_samples(5, vocab=100, input_len=7, output_len=3)
    assert samples != random_samples(5, vocab=100, input_len=7, output_len=3, seed=1)


def test_range_spreads_the_lengths_and_a_prefix_is_shared() -> None:
    samples = random_samples(200, vocab=100, input_len=10, output_len=4, range_ratio=0.5, prefix_len=6)
    assert len({tuple(sample.prompt_ids[:6]) for sample in samples}) == 1
    assert {len(sample.prompt_ids) - 6 for sample in samples} == set(range(5, 16))
    assert {sample.output_len for sample in samples} == {2, 3, 4, 5, 6}


def conversation(*texts: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": text} for text in texts]}


def write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_conversations_give_their_first_turn(tokenizer: Tokenizer, tmp_path: Path) -> None:
    question, answer = "One two three four five", "six seven eight nine ten"
    actual = [conversation(question, answer, "more"), conversation("a", "b"), conversation(question), {}]
    path = write(tmp_path / "talk.json", actual)
    samples = sharegpt_samples(3, path, tokenizer)
    # The short one and the one without an answer are omitted.
    assert [sample.prompt_ids for sample in samples] == [tokenizer.encode(question)] * 3
    assert samples[0].output_len == len(tokenizer.encode(answer))
    assert sharegpt_samples(1, path, tokenizer, output_len=9)[0].output_len == 9


@pytest.mark.parametrize("content", [[1], {"a": 1}, [{"conversations": [{}, {}]}], [], "text", 5])
def test_file_of_another_format_is_rejected(tokenizer: Tokenizer, tmp_path: Path, content: object) -> None:
    with pytest.raises(ConfigError, match="talk.json"):
        sharegpt_samples(3, write(tmp_path / "talk.json", content), tokenizer)


def test_missing_file_is_rejected(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.json"):
        sharegpt_samples(3, tmp_path / "nowhere.json", tokenizer)


def test_prefixes_are_repeated_and_suffixes_are_not() -> None:
    samples = prefix_samples(
        12, vocab=1000, num_prefixes=3, prefix_len=20, suffix_len=5, output_len=4, seed=1
    )
    starts = [tuple(sample.prompt_ids[:20]) for sample in samples]
    assert sorted(starts.count(start) for start in set(starts)) == [4, 4, 4]
    assert starts != sorted(starts), "they come in any order"
    assert len({tuple(sample.prompt_ids[20:]) for sample in samples}) == 12
    assert {(len(sample.prompt_ids), sample.output_len) for sample in samples} == {(25, 4)}
