"""Tests of tiktoken_vocab: a tiktoken.model file must tokenize as the tiktoken package does with the split
pattern of Kimi's published tokenizer code."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import make_tiny
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from quire import LLM, SamplingParams
from quire.data.params import StructuredOutputsParams
from quire.errors import ConfigError
from quire.text.byte_level import from_byte_level
from quire.text.tokenizer import Tokenizer, load_tokenizer

UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "The quick brown fox doesn't mind; it's used to it. WE'LL see, HE'S here, they'd say 12345 67.",
    "def f(x: int) -> int:\n        return x[0] + 1  # a comment\n\n\tprint('done')\r\n",
    "人工智能正在改变世界。模型支持超长上下文, 1万亿。日本語のテキスト。한국어 문장. Größe café",
]
SPECIAL = {0: ("[BOS]", True), 1: ("[EOS]", True), 2: ("<|im_end|>", True), 21: ("<|media_pad|>", False)}
"""Named special tokens, by the distance of their id from the first reserved id."""
SAMPLES = [
    *CORPUS,
    "",
    " leading and trailing  ",
    "   many    spaces \n\n \t\n mixed\r\n",
    "emoji 🙂 and 👩‍👩‍👧‍👦 and 🎉🎉",
    "unseen ｆｕｌｌ ｗｉｄｔｈ, Ελληνικά, العربية, nul \0 inside",
]
MORE = [
    "中English文 abc中文def A中B 中's 中'se ⼀⼁ 々中〇",
    "it'ſ IT'S Ǆ ǅ İstanbul ﬁnancial naïve e\u0301\u0302 x\u0301 ٣٤٥٦ ½²Ⅷ",
    "a/\nb }\n/// doc\n  \n\n\t x   y\u2028z\u0085w\u3000v",
    "1234567890 3.14 100,000 v2.6",
]


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """Train a small byte-level BPE; a rank is a token id."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS * 3, trainer)
    return {from_byte_level(token): i for token, i in backend.get_vocab().items()}


def write(folder: Path, ranks: dict[bytes, int], **config: Any) -> Path:
    """Write the files of a Kimi checkpoint."""
    lines = [f"{base64.b64encode(token).decode()} {i}" for token, i in ranks.items()]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    added = {len(ranks) + i: {"content": text, "special": flag} for i, (text, flag) in SPECIAL.items()}
    named = {
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_end|>"],
        "auto_map": {"AutoTokenizer": ["tokenization_moonshot.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "chat_template": "{{ messages[0].content }}<|im_end|>",
        "eos_token": "[EOS]",
        "tokenizer_class": "TikTokenTokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(named | config))
    return folder


def oracle(ranks: dict[bytes, int]) -> tiktoken.Encoding:
    count = len(ranks)
    names = {i: SPECIAL.get(i, (f"<|reserved_token_{count + i}|>", False))[0] for i in range(256)}
    special = {name: count + i for i, name in names.items()}
    return tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


@pytest.fixture(scope="module")
def both(
    tmp_path_factory: pytest.TempPathFactory, ranks: dict[bytes, int]
) -> tuple[Tokenizer, tiktoken.Encoding]:
    return load_tokenizer(write(tmp_path_factory.mktemp("kimi"), ranks), "hf"), oracle(ranks)


@pytest.mark.parametrize("before", ["", *MORE])
def test_ids_equal_tiktoken(both: tuple[Tokenizer, tiktoken.Encoding], before: str) -> None:
    """Catches another split of words, merges in another order, and special tokens that are cut."""
    tokenizer, reference = both
    for text in SAMPLES:
        for after in (
            "",
            "<|im_end|>fox",
            "<|media_pad|><|media_pad|> b",
            f"<|reserved_token_{reference.max_token_value}|>",
        ):
            ids = tokenizer.encode(before + text + after)
            assert ids == reference.encode(before + text + after, allowed_special="all")
            assert tokenizer.decode(ids, skip_special_tokens=False) == before + text + after


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(codec="utf-8"), max_size=40) | st.text("ab'sTL 1中文\n\r\té", max_size=40))
def test_any_text_equals_tiktoken(both: tuple[Tokenizer, tiktoken.Encoding], text: str) -> None:
    tokenizer, reference = both
    ids = tokenizer.encode(text)
    assert reference.decode(ids) == tokenizer.decode(ids, skip_special_tokens=False) == text
    if text.isascii() or set(text) <= {*"ab'sTL 1中文\n\r\té"}:  # their Unicode versions may differ
        assert ids == reference.encode(text, allowed_special="all")


def test_special_tokens(both: tuple[Tokenizer, tiktoken.Encoding], ranks: dict[bytes, int]) -> None:
    """Catches ids that are shifted, and tool or media tokens that vanish from answers."""
    tokenizer, count = both[0], len(ranks)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (count, count + 1)
    assert len(tokenizer) == count + 256 and tokenizer.vocab_size == count
    assert tokenizer.all_special_ids == [count, count + 1, count + 2]
    assert (
        tokenizer.decode([count + 2, count + 21, count + 5]) == f"<|media_pad|><|reserved_token_{count + 5}|>"
    )
    assert tokenizer.apply_chat_template([{"role": "user", "content": "the"}])[-1] == count + 2
    token_bytes = tokenizer.token_bytes
    assert token_bytes is not None
    assert all(token_bytes[i] == token for token, i in ranks.items())


def test_engine_starts_with_the_files_as_published(tmp_path: Path) -> None:
    """Moonlight is a DeepSeek-V3 with a tiktoken.model: a whole engine reads texts and returns answers and
    structured output."""
    path, _ = make_tiny("DeepseekV3ForCausalLM", tmp_path, vocab_size=512)
    (path / "tokenizer.json").unlink(missing_ok=True)
    write(path, {bytes([byte]): byte for byte in range(256)})
    llm = LLM(str(path), dtype="float32", max_model_len=64, max_num_seqs=2, use_tqdm_on_load=False)
    params = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[中é]{2}"))
    (output,) = llm.generate(["a中<|im_end|>"], params, use_tqdm=False)
    assert output.prompt_token_ids == [*"a中".encode(), 258]
    assert re.fullmatch("[中é]{2}", output.outputs[0].text)


def test_tokens_beyond_the_reserved_ids(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    """Catches the two tokens of Kimi-Linear after the 256 reserved ones."""
    added = {len(ranks) + 257: {"content": "[PAD]", "special": True}}
    tokenizer = load_tokenizer(write(tmp_path, ranks, added_tokens_decoder=added, bos_token=None), "hf")
    assert tokenizer.convert_tokens_to_ids("[PAD]") == len(ranks) + 257
    assert tokenizer.convert_tokens_to_ids(f"<|reserved_token_{len(ranks)}|>") == len(ranks)


@pytest.mark.parametrize(
    ("config", "is_known"),
    [
        (
            {
                "auto_map": {
                    "AutoTokenizer": ["moonshotai/Kimi-K2--tokenization_kimi.TikTokenTokenizer", None]
                }
            },
            True,
        ),
        ({"auto_map": {"AutoTokenizer": "tokenization_kimi.TikTokenTokenizer"}}, True),
        ({"auto_map": None}, True),
        ({"auto_map": {"AutoTokenizer": ["tokenization_kimia.TikTokenTokenizer", None]}}, False),
        ({"auto_map": None, "tokenizer_class": "HYTokenizer"}, False),
        ({"auto_map": None, "tokenizer_class": None}, False),
    ],
)
def test_unknown_tokenizer_code_is_refused(
    tmp_path: Path, ranks: dict[bytes, int], config: dict[str, Any], is_known: bool
) -> None:
    """Catches the split pattern of Kimi for another tokenizer, which would give wrong ids silently."""
    folder = write(tmp_path, ranks, **config)
    if is_known:
        assert load_tokenizer(folder, "hf").encode("the") == oracle(ranks).encode("the")
    else:
        with pytest.raises(ConfigError, match="split pattern.*tokenization_kimi.*tokenizer.json"):
            load_tokenizer(folder, "hf")


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("IQ== 0\n!!! 1\n", "line 2: expected a token in base64"),
        ("IQ== 0\nIg==\n", "line 2: expected a token in base64"),
        ("IQ== x\n", "line 1: expected a token in base64"),
        ("IQ== 0\n", "the byte 0x00 has no token"),
        (None, "the ranks are not consecutive"),
    ],
)
def test_broken_file_is_refused(
    tmp_path: Path, ranks: dict[bytes, int], lines: str | None, problem: str
) -> None:
    write(tmp_path, ranks if lines else {token: i + (i > 400) for token, i in ranks.items()})
    if lines:
        (tmp_path / "tiktoken.model").write_text(lines)
    with pytest.raises(ConfigError, match=problem):
        load_tokenizer(tmp_path, "hf")


def test_named_token_with_the_id_of_another_is_refused(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    """Catches a special token that is also in the file, and would move all ids after it."""
    word = max((token.decode() for token in ranks if token.isalpha()), key=len)
    added = {len(ranks): {"content": word, "special": True}}
    with pytest.raises(ConfigError, match=f"gives '{word}' the id {len(ranks)}"):
        load_tokenizer(write(tmp_path, ranks, added_tokens_decoder=added), "hf")
