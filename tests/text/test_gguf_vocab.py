"""Tests of gguf_vocab: vocabularies written as GGUF metadata must be restored as the same tokenizer."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from quire.errors import ConfigError
from quire.text.gguf_vocab import PRE_TOKENIZERS, merges_by_rank, read_vocab

ANY_TEXT = st.text(st.characters(codec="utf-8"), max_size=40)
relaxed = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def plain_ids(backend: Backend, text: str) -> list[int]:
    return backend.encode(text, add_special_tokens=False).ids


def cut(pre: str, text: str) -> list[str]:
    """Return the words into which a pre-tokenizer splits an ASCII text."""
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
    }
    backend = read_vocab(metadata).backend
    return [word.replace("Ġ", " ") for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


def test_byte_level_ids_survive_the_header(
    byte_level: Backend, byte_level_metadata: dict[str, Any], sample: str
) -> None:
    """Catches merges or ids that are shifted by the header."""
    backend = read_vocab(byte_level_metadata).backend
    assert plain_ids(backend, sample) == plain_ids(byte_level, sample)
    assert backend.decode(plain_ids(backend, sample)) == sample


@relaxed
@given(text=ANY_TEXT)
def test_byte_level_decodes_any_text(byte_level_metadata: dict[str, Any], text: str) -> None:
    """Catches a byte that is lost in encoding."""
    backend = read_vocab(byte_level_metadata).backend
    assert backend.decode(plain_ids(backend, text), skip_special_tokens=False) == text


def test_sentencepiece_ids_match_sentencepiece(spm: Any, spm_metadata: dict[str, Any], sample: str) -> None:
    """Catches merges in the wrong order, a missing byte fallback, a wrong space prefix."""
    backend = read_vocab(spm_metadata).backend
    if "\0" not in sample:  # sentencepiece's own normaliser stops at NUL
        assert plain_ids(backend, sample) == spm.encode(sample)
    assert backend.decode(plain_ids(backend, sample)) == sample


def test_sentencepiece_without_space_prefix(spm_metadata: dict[str, Any]) -> None:
    """Catches add_space_prefix=False being ignored, in encoding or decoding."""
    backend = read_vocab({**spm_metadata, "tokenizer.ggml.add_space_prefix": False}).backend
    assert not backend.encode("the dog", add_special_tokens=False).tokens[0].startswith("▁")
    assert backend.decode(plain_ids(backend, " the dog")) == " the dog"


def test_sentencepiece_of_gemma(spm_metadata: dict[str, Any]) -> None:
    """Catches a run of line breaks, or a turn marker, that is split into bytes."""
    tokens = [*spm_metadata["tokenizer.ggml.tokens"], "\n\n", "<start_of_turn>"]
    changes = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [*spm_metadata["tokenizer.ggml.scores"], -1000.0, -1000.0],
        "tokenizer.ggml.token_type": [*spm_metadata["tokenizer.ggml.token_type"], 4, 3],
        "tokenizer.ggml.add_space_prefix": False,
    }
    backend = read_vocab({**spm_metadata, **changes}).backend
    ids = plain_ids(backend, "<start_of_turn>the\n\ndog")
    assert (ids[0], ids.count(len(tokens) - 2)) == (len(tokens) - 1, 1)
    assert backend.decode(ids) == "the\n\ndog"


def test_vocabulary_of_gemma_4_has_merges(spm_metadata: dict[str, Any], sample: str) -> None:
    """Catches merges that are ignored, or a space that is added."""
    tokens = spm_metadata["tokenizer.ggml.tokens"]
    ranks = {
        token: -score for token, score in zip(tokens, spm_metadata["tokenizer.ggml.scores"], strict=True)
    }
    changes = {"tokenizer.ggml.add_space_prefix": False}
    expected = read_vocab(spm_metadata | changes).backend
    changes |= {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges_by_rank(ranks)],
        "tokenizer.ggml.unknown_token_id": 0,
    }
    backend = read_vocab(spm_metadata | changes).backend
    assert plain_ids(backend, sample) == plain_ids(expected, sample)
    assert backend.decode(plain_ids(backend, sample)) == sample


def test_control_and_user_defined_tokens_stay_whole(byte_level_metadata: dict[str, Any]) -> None:
    """Catches a chat marker split into pieces, and a user-defined token that decoding skips."""
    backend = read_vocab(byte_level_metadata).backend
    ids = plain_ids(backend, "dog<|im_end|><tool call>")
    tokens = byte_level_metadata["tokenizer.ggml.tokens"]
    assert ids[-2:] == [tokens.index("<|im_end|>"), tokens.index("<tool call>")]
    assert backend.decode(ids, skip_special_tokens=True) == "dog<tool call>"


@pytest.mark.parametrize(
    ("changes", "framed"),
    [
        ({}, (False, False)),
        ({"add_bos_token": True}, (True, False)),
        ({"add_eos_token": True}, (False, True)),
        ({"pre": "llama-bpe"}, (True, False)),
        ({"pre": "llama-bpe", "add_bos_token": False}, (False, False)),
    ],
)
def test_bos_and_eos_follow_the_header(
    byte_level_metadata: dict[str, Any], changes: dict[str, Any], framed: tuple[bool, bool]
) -> None:
    """Catches a prompt without BOS or with a second one."""
    metadata = {**byte_level_metadata, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
    ids = read_vocab(metadata).backend.encode("the dog").ids
    assert (ids[0] == 0, ids[-1] == 1) == framed


def test_sentencepiece_kind_adds_bos_by_default(spm: Any, spm_metadata: dict[str, Any]) -> None:
    """Catches Llama 2 files without an add_bos_token key that lose their BOS."""
    assert read_vocab(spm_metadata).backend.encode("the dog").ids == [1, *spm.encode("the dog")]


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "it's 1234 IT'S", ["it", "'s", " 1234", " IT", "'", "S"]),
        ("llama-bpe", "IT'S 1234\n\nx", ["IT", "'S", " ", "123", "4", "ĊĊ", "x"]),
        ("qwen2", "a 123", ["a", " ", "1", "2", "3"]),
        ("smollm", "a 123", ["a", " ", "1", "2", "3"]),
        ("starcoder", "x12 y", ["x", "1", "2", " y"]),
        ("falcon", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
        ("deepseek-v3", "12345 abc", ["123", "45", " abc"]),
        ("deepseek-coder", "ab 12\n", ["ab", " ", "1", "2", "Ċ"]),
        ("deepseek-llm", "ab, 12", ["ab", ",", " ", "1", "2"]),
        ("tekken", "fooBar 12", ["foo", "Bar", " ", "1", "2"]),
        ("gpt-4o", "fooBar's 1234", ["foo", "Bar's", " ", "123", "4"]),
        ("chatglm-bpe", "IT'S 1234\n\nx", ["IT", "'S", " ", "123", "4", "ĊĊ", "x"]),
        ("glm4", "a 1234", ["a", " ", "123", "4"]),
        ("dbrx", "WE'LL 1234", ["WE", "'LL", " ", "123", "4"]),
        ("smaug-bpe", "a 1234", ["a", " ", "123", "4"]),
        ("refact", "a 123 b", ["a", " ", "1", "2", "3", " b"]),
        ("command-r", "it's 12", ["it", "'s", " ", "1", "2"]),
        ("seed-coder", "a 12+\n", ["a", " ", "1", "2", "+", "Ċ"]),
    ],
)
def test_pre_tokenizer_splits(pre: str, text: str, words: list[str]) -> None:
    """Catches a regex that differs from the one used in training."""
    assert cut(pre, text) == words


@relaxed
@given(text=ANY_TEXT)
def test_gpt2_words_equal_the_library(text: str) -> None:
    """Catches an error in the GPT-2 regex: the library has its own copy."""
    reference = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend = read_vocab(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.tokens": ["a", "b", "ab"],
            "tokenizer.ggml.merges": ["a b"],
        }
    ).backend
    actual = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert actual == [word for word, _ in reference.pre_tokenize_str(text)]


def test_every_regex_compiles_and_loses_nothing() -> None:
    """Catches a regex that the library rejects, or that drops characters."""
    text = "Hello, wörld's 12345 中文\n\n  x\t"
    for pre in PRE_TOKENIZERS:
        assert "".join(cut(pre, "Hello, world's 12345 x")) == "Hello, world's 12345 x"
        assert cut(pre, text)


def test_known_regexes_equal_those_of_transformers() -> None:
    """Catches an error in the regexes that are assembled from parts."""
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    splits = getattr(mapping, "GGUF_PRE_TOKENIZER_SPLITS", None)
    if splits is None:
        pytest.skip("this version of transformers has no such table")
    for pre, split in splits.items():
        if pre in PRE_TOKENIZERS:
            assert PRE_TOKENIZERS[pre].splits == (split,), pre


def test_unknown_pre_tokenizer_falls_back_to_gpt2(
    byte_level_metadata: dict[str, Any], byte_level: Backend
) -> None:
    """Catches a crash on a model newer than the table."""
    backend = read_vocab({**byte_level_metadata, "tokenizer.ggml.pre": "from-the-future"}).backend
    assert plain_ids(backend, "it's 12 dogs") == plain_ids(byte_level, "it's 12 dogs")


def test_llama3_words_that_are_tokens_ignore_merges() -> None:
    """Catches a whole-word token that the merges cannot reach and that is split."""
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "c", "ab", "abc"],
        "tokenizer.ggml.merges": ["a b"],
    }
    assert plain_ids(read_vocab({**metadata, "tokenizer.ggml.pre": "llama-bpe"}).backend, "abc") == [4]
    assert plain_ids(read_vocab({**metadata, "tokenizer.ggml.pre": "gpt-2"}).backend, "abc") == [3, 2]


def test_header_without_token_types_has_bos_and_eos(byte_level_metadata: dict[str, Any]) -> None:
    """Catches old files with an EOS that would be split and printed."""
    metadata = {k: v for k, v in byte_level_metadata.items() if not k.endswith("token_type")}
    backend = read_vocab(metadata).backend
    assert backend.decode(plain_ids(backend, "dog<|im_end|>")) == "dog"


def test_named_chat_templates() -> None:
    """Catches the loss of a file's second template."""
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.chat_template": "one",
    }
    assert read_vocab(metadata).chat_template == "one"
    both = read_vocab({**metadata, "tokenizer.chat_template.tool_use": "two"})
    assert both.chat_template == {"default": "one", "tool_use": "two"}


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "rwkv"),
        ({"tokenizer.ggml.model": "gpt2"}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"]}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a"]}, "no tokenizer.ggml.scores"),
        (
            {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.tokens": ["a"],
                "tokenizer.ggml.scores": [1.0, 2.0],
            },
            "1 tokens but 2",
        ),
        (
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.tokens": ["a"],
                "tokenizer.ggml.merges": ["x y"],
            },
            "do not match",
        ),
    ],
)
def test_broken_headers_are_config_errors(metadata: dict[str, Any], named: str) -> None:
    """Catches a traceback from the library instead of a clear message."""
    with pytest.raises(ConfigError, match=named):
        read_vocab(metadata)
