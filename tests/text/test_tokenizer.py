"""Tests of the tokenizer: loading from a directory or a GGUF file must agree with transformers."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors
from transformers import AutoTokenizer

from quire.errors import ConfigError, RequestError
from quire.text.gguf_vocab import read_vocab
from quire.text.tokenizer import Tokenizer, load_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"


def write_model(path: Path, backend: Backend, **config: Any) -> Path:
    backend.save(str(path / "tokenizer.json"))
    named = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "unk_token": None}
    (path / "tokenizer_config.json").write_text(json.dumps({**named, **config}))
    return path


def copy_of(backend: Backend) -> Backend:
    return Backend.from_str(backend.to_str())


@pytest.fixture
def model(tmp_path: Path, byte_level: Backend) -> Path:
    return write_model(tmp_path, byte_level)


@pytest.mark.parametrize("ending", ["", "<|im_end|>fox", "<tool call>b"])
def test_encode_and_decode_equal_transformers(model: Path, sample: str, ending: str) -> None:
    """Catches added or special tokens that are parsed differently than by HF tokenizers."""
    tokenizer, reference = load_tokenizer(model, "hf"), AutoTokenizer.from_pretrained(model)
    ids = tokenizer.encode(sample + ending)
    assert ids == reference.encode(sample + ending)
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(
            ids, skip_special_tokens=skip
        )


@pytest.mark.parametrize(
    "kind", ["LlamaTokenizer", "Qwen2Tokenizer", "GPT2Tokenizer", "PreTrainedTokenizerFast"]
)
@pytest.mark.parametrize(
    "flags", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}]
)
@pytest.mark.parametrize("framed", [False, True])
def test_bos_and_eos_equal_transformers(
    tmp_path: Path, byte_level: Backend, kind: str, flags: dict[str, bool], framed: bool
) -> None:
    """Catches a BOS that is doubled, lost, or added unlike in transformers with the same files."""
    backend = copy_of(byte_level)
    if framed:
        backend.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    path = write_model(tmp_path, backend, tokenizer_class=kind, **flags)
    actual, expected = (
        load_tokenizer(path, "hf").encode("dog"),
        AutoTokenizer.from_pretrained(path).encode("dog"),
    )
    assert (actual[0] == 0, actual[-1] == 1) == (expected[0] == 0, expected[-1] == 1)
    assert (actual[0] == 0) == framed


def test_hf_attributes_exist(model: Path) -> None:
    """Catches a missing or wrong attribute of the HF interface."""
    tokenizer, reference = load_tokenizer(model, "hf"), AutoTokenizer.from_pretrained(model)
    same = [
        "vocab_size",
        "bos_token",
        "bos_token_id",
        "eos_token",
        "eos_token_id",
        "pad_token",
        "pad_token_id",
    ]
    assert {name: getattr(tokenizer, name) for name in same} == {
        name: getattr(reference, name) for name in same
    }
    assert len(tokenizer) == len(reference) == tokenizer.max_token_id + 1
    assert tokenizer.get_vocab() == reference.get_vocab()
    assert tokenizer.added_vocab == reference.get_added_vocab()
    assert sorted(tokenizer.all_special_ids) == sorted(reference.all_special_ids)
    assert sorted(tokenizer.all_special_tokens) == sorted(reference.all_special_tokens)
    assert tokenizer.is_special(1) and not tokenizer.is_special(
        tokenizer.convert_tokens_to_ids("<tool call>")
    )


def test_calling_and_converting(model: Path) -> None:
    """Catches a call that returns no `input_ids`, as key or as attribute, and lossy conversions."""
    tokenizer = load_tokenizer(model, "hf")
    single, batch = tokenizer("the dog"), tokenizer(["the dog", "fox"])
    assert single.input_ids == single["input_ids"] == tokenizer.encode("the dog")
    assert batch.input_ids == [tokenizer.encode("the dog"), tokenizer.encode("fox")]
    assert [len(row) for row in batch.attention_mask] == [len(row) for row in batch.input_ids]
    tokens = tokenizer.convert_ids_to_tokens(single.input_ids)
    assert tokenizer.convert_tokens_to_ids(tokens) == single.input_ids
    assert tokenizer.convert_ids_to_tokens(10**6) is None
    assert tokenizer.convert_tokens_to_ids("no such token") is None


def test_truncation_and_padding_of_training_are_off(tmp_path: Path, byte_level: Backend) -> None:
    """Catches long prompts cut to the length that tokenizer.json was saved with."""
    backend = copy_of(byte_level)
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = load_tokenizer(write_model(tmp_path, backend), "hf")
    text = "the quick brown fox jumps over the lazy dog"
    assert tokenizer.encode(text) == byte_level.encode(text).ids


def test_special_tokens_of_the_config_file(tmp_path: Path, byte_level: Backend) -> None:
    """Catches an end-of-turn token that is printed because tokenizer.json does not mark it as special."""
    added = {
        "501": {"content": "<|eot|>", "special": True, "normalized": False},
        "502": {"content": "<think>", "special": False, "normalized": False},
    }
    path = write_model(tmp_path, byte_level, added_tokens_decoder=added, eos_token="<|eot|>")
    tokenizer, reference = load_tokenizer(path, "hf"), AutoTokenizer.from_pretrained(path)
    ids = tokenizer.encode("dog<think>fox<|eot|>")
    assert ids == reference.encode("dog<think>fox<|eot|>")
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True) == "dog<think>fox"
    assert tokenizer.eos_token_id == reference.eos_token_id


def test_special_tokens_map_names_tokens(tmp_path: Path, byte_level: Backend) -> None:
    """Catches older models with an EOS only in special_tokens_map.json."""
    byte_level.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    assert load_tokenizer(tmp_path, "hf").eos_token_id == 1


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"tokenizer_config.json": {"chat_template": "one"}}, "one"),
        (
            {"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "one"}]}},
            {"default": "one"},
        ),
        ({"chat_template.json": {"chat_template": "two"}}, "two"),
        ({"tokenizer_config.json": {"chat_template": "one"}, "chat_template.jinja": "three"}, "three"),
        (
            {"chat_template.jinja": "three", "additional_chat_templates/rag.jinja": "four"},
            {"default": "three", "rag": "four"},
        ),
    ],
)
def test_chat_template_locations(
    tmp_path: Path, byte_level: Backend, files: dict[str, Any], expected: Any
) -> None:
    """Catches a template file that is not read, or that an older one overrides."""
    byte_level.save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    assert load_tokenizer(tmp_path, "hf").chat_template == expected


def test_apply_chat_template_equals_transformers(tmp_path: Path, byte_level: Backend) -> None:
    """Catches a second BOS in chat prompts, and special tokens that the template cannot access."""
    path = write_model(tmp_path, byte_level, chat_template=TEMPLATE)
    tokenizer, reference = load_tokenizer(path, "hf"), AutoTokenizer.from_pretrained(path)
    messages = [{"role": "user", "content": "the dog"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == reference.apply_chat_template(messages, tokenize=False) == "user: the dog<|im_end|>"
    assert tokenizer.apply_chat_template(messages) == reference.apply_chat_template(messages)["input_ids"]


def test_sentencepiece_file_is_converted(spm_model: Path, spm: Any, tmp_path: Path) -> None:
    """Catches a model directory with tokenizer.model alone that cannot be served."""
    pytest.importorskip("google.protobuf")
    shutil.copy(spm_model, tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    tokenizer = load_tokenizer(tmp_path, "hf")
    assert tokenizer.encode("the lazy dog", add_special_tokens=False) == spm.encode("the lazy dog")
    assert tokenizer.eos_token_id == spm.eos_id()


def test_vocab_and_merges_files_are_converted(tmp_path: Path, byte_level: Backend) -> None:
    """Catches older models with a vocabulary in vocab.json and merges.txt."""
    byte_level.model.save(str(tmp_path))
    named = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    tokenizer = load_tokenizer(tmp_path, "hf")
    assert tokenizer.encode("the lazy dog<|im_end|>") == byte_level.encode("the lazy dog<|im_end|>").ids
    assert tokenizer.eos_token_id == 1


def test_sentencepiece_file_without_transformers(
    spm_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an ImportError instead of the package to install."""
    shutil.copy(spm_model, tmp_path / "tokenizer.model")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="tokenizer.model.*pip install transformers sentencepiece"):
        load_tokenizer(tmp_path, "hf")


def test_missing_and_corrupt_files_are_named(tmp_path: Path, byte_level: Backend) -> None:
    """Catches errors without the name of the file."""
    with pytest.raises(ConfigError, match="tokenizer.json"):
        load_tokenizer(tmp_path, "hf")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="tokenizer.json"):
        load_tokenizer(tmp_path, "hf")
    byte_level.save(str(tmp_path / "tokenizer.json"))
    for config in (
        *("[]", "[" * 200_000, '{"chat_template": [{"name": 5}]}'),
        *('{"added_tokens_decoder": {"x": {"content": "a"}}}', '{"added_tokens_decoder": 5}'),
    ):
        (tmp_path / "tokenizer_config.json").write_text(config)
        with pytest.raises(ConfigError, match="tokenizer_config.json"):
            load_tokenizer(tmp_path, "hf")
    with pytest.raises(ConfigError, match="known: gguf, hf"):
        load_tokenizer(tmp_path, "onnx")


def test_invalid_text_and_ids_are_refused(byte_level: Backend) -> None:
    """Catches a lone surrogate, a NUL or a negative id that ends the process."""
    tokenizer = Tokenizer(copy_of(byte_level))
    with pytest.raises(RequestError, match="U\\+D800 at character 2"):
        tokenizer.encode("ab\ud800")
    with pytest.raises(RequestError, match="not int"):
        tokenizer.encode(5)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="-1"):
        tokenizer.decode([3, -1])
    assert tokenizer.decode(tokenizer.encode("a\0b")) == "a\0b"
    assert tokenizer.decode([10**6]) == ""
    assert tokenizer.decode(5) == tokenizer.decode([5])


def test_gguf_file(tmp_path: Path, byte_level: Backend, byte_level_metadata: dict[str, Any]) -> None:
    """Catches a header key that is read under another name than converters write."""
    from gguf import GGUFWriter

    writer = GGUFWriter(str(tmp_path / "tiny.gguf"), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(byte_level_metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(byte_level_metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(byte_level_metadata["tokenizer.ggml.merges"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = load_tokenizer(tmp_path / "tiny.gguf", "gguf")
    assert tokenizer.encode("the dog's") == [0, *byte_level.encode("the dog's").ids]
    assert (tokenizer.eos_token, tokenizer.chat_template) == ("<|im_end|>", TEMPLATE)


@pytest.mark.parametrize("kind", ["byte_level_metadata", "spm_metadata"])
def test_token_bytes_join_to_the_text(request: pytest.FixtureRequest, kind: str, sample: str) -> None:
    """Catches a token with bytes that differ from its decoded text: grammars and streams depend on them."""
    vocab = read_vocab(request.getfixturevalue(kind))
    tokenizer = Tokenizer(vocab.backend, special_tokens=vocab.special_tokens)
    table = tokenizer.token_bytes
    assert table is not None
    joined = b"".join(table[i] for i in tokenizer.encode(sample, add_special_tokens=False))
    assert joined == ((b" " if sample and table.strips_first_space else b"") + sample.encode())
    assert table[10**6] == b""


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_keeps_the_special_tokens(side: str) -> None:
    """The truncated tokens equal those of the tokenizers library, which can only truncate for all requests
    alike."""
    words = [*"abcdefghij", "[CLS]", "[SEP]"]
    backend = Backend(models.WordLevel({word: index for index, word in enumerate(words)}))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", 10), ("[SEP]", 11)]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    tokenizer, cutting = Tokenizer(backend), Backend.from_str(backend.to_str())
    long, short = "a b c d e f g", "h i j"
    for texts in ((long,), (long, short), (short, long), (long, long)):
        for max_len in range(4, 20):
            cutting.enable_truncation(max_len, direction=side)
            expected = cutting.encode(*texts)
            truncated = tokenizer.encode_cut(*texts, max_len=max_len, side=side)
            assert truncated == (expected.ids, expected.type_ids)
    assert tokenizer.encode_cut(long, max_len=1, side=side)[0] == [10]


def test_sentence_transformers_lower_case(tmp_path: Path, byte_level: Backend) -> None:
    path = write_model(tmp_path, byte_level)
    plain = load_tokenizer(path, "hf").encode("the quick fox")
    assert load_tokenizer(path, "hf").encode("The QUICK fox") != plain
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 512, "do_lower_case": true}')
    assert load_tokenizer(path, "hf").encode("The QUICK fox") == plain


def test_token_types_follow_model_input_names(tmp_path: Path) -> None:
    """As in transformers, `model_input_names` decides whether there are token types."""
    backend = Backend(models.WordLevel({"[SEP]": 0, "one": 1, "two": 2}, unk_token="[SEP]"))
    backend.post_processor = processors.TemplateProcessing(
        single="$A [SEP]", pair="$A [SEP] $B:1 [SEP]:1", special_tokens=[("[SEP]", 0)]
    )
    with_types = load_tokenizer(write_model(tmp_path, backend), "hf")
    untold = load_tokenizer(
        write_model(tmp_path, backend, model_input_names=["input_ids", "attention_mask"]), "hf"
    )
    assert with_types.encode_pair("one", "two") == ([1, 0, 2, 0], [0, 0, 1, 1])
    assert untold.encode_pair("one", "two") == ([1, 0, 2, 0], [0, 0, 0, 0])
    assert untold.encode_cut("one", "two", max_len=4, side="right")[1] == [0, 0, 0, 0]
