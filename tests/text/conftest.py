"""Small vocabularies that are trained here: a byte-level and a SentencePiece vocabulary, each also as GGUF
metadata."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind; it's used to it.",
    "for i in range(10):\n        print(i, x[i] + 1)  # a comment\n\n\treturn None",
    "A quire is a gathering of pages. Pages are gathered, and the gathering is bound.",
    "Größe, naïve café, Straße; 中文字符和日本語のテキスト。한국어 문장입니다.",
    "numbers: 1 22 333 4444 55555, 3.14159 and 2024-01-31",
    "they're we've I'll you'd she's don't can't won't HE'S WE'LL",
]

SAMPLES = [
    *CORPUS,
    "",
    " ",
    " leading and trailing  ",
    "   many    spaces \n\n \t\n mixed\r\n",
    "emoji 🙂 and 👩‍👩‍👧‍👦 and 🎉🎉",
    "unseen ｆｕｌｌ ｗｉｄｔｈ, Ελληνικά, العربية, ½ ² ٣",
    "nul \0 inside",
    "e\u0301 combined",
]


@pytest.fixture(params=SAMPLES)
def sample(request: pytest.FixtureRequest) -> str:
    """Return, one per call, texts of several kinds: Unicode, code, runs of spaces, digits, contractions."""
    text: str = request.param
    return text


@pytest.fixture(scope="session")
def byte_level() -> Backend:
    """Train a byte-level BPE with two special tokens at its start and one added plain token."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GPT2_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool call>", normalized=False)])
    return backend


@pytest.fixture(scope="session")
def byte_level_metadata(byte_level: Backend) -> dict[str, Any]:
    """Return the GGUF header that a converter would write for `byte_level`."""
    vocab = byte_level.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = {"<|endoftext|>": 3, "<|im_end|>": 3, "<tool call>": 4}
    merges = json.loads(byte_level.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


@pytest.fixture(scope="session")
def spm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a SentencePiece BPE model file with byte fallback, as Llama 2 has."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=450,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("spm") / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="session")
def spm(spm_model: Path) -> Any:
    return sentencepiece.SentencePieceProcessor(model_file=str(spm_model))


@pytest.fixture(scope="session")
def spm_metadata(spm: Any) -> dict[str, Any]:
    """Return the GGUF header that a converter would write for `spm`."""

    def kind(i: int) -> int:
        return 2 if spm.is_unknown(i) else 3 if spm.is_control(i) else 6 if spm.is_byte(i) else 1

    ids = range(spm.get_piece_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [spm.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [spm.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [kind(i) for i in ids],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
