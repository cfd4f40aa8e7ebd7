"""The tokenizer of a tiktoken.model file.

The file has only the ranks of tokens. The split pattern and the names of reserved tokens are copied from the
checkpoint's Python code, which is not run."""

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from quire.errors import ConfigError
from quire.text.byte_level import to_byte_level
from quire.text.gguf_vocab import GGUFPreTokenizer, byte_level_bpe, merges_by_rank

TIKTOKEN_FILE = "tiktoken.model"
_KIMI_MODULES = ("tokenization_kimi", "tokenization_moonshot")
"""Modules of Moonlight, Kimi-VL, Kimi-K2 and Kimi-Linear, which split text in the same way."""
_KIMI_CLASS = "TikTokenTokenizer"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_SPLIT = "|".join(
    (
        r"\p{Han}+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_NUM_RESERVED = 256
"""Number of reserved ids after those of the file; tokenizer_config.json has names for some of them."""


def read_tiktoken(file: Path, config: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer of a Kimi checkpoint from its ranks and its tokenizer_config.json."""
    _check_family(file, config)
    vocab = _read_ranks(file)
    pre_tokenizer = GGUFPreTokenizer((KIMI_SPLIT,), whole_words=True)
    backend = byte_level_bpe(str(file), vocab, merges_by_rank(vocab), pre_tokenizer)
    _add_reserved(backend, len(vocab), file, config)
    return backend


def _check_family(file: Path, config: Mapping[str, Any]) -> None:
    """Raise a ConfigError unless the split pattern of the checkpoint's tokenizer code is known."""
    auto_map = config.get("auto_map")
    code = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else None
    code = code[0] if isinstance(code, list) and code else code
    if isinstance(code, str):  # [REPOSITORY--]MODULE.CLASS
        name = code.rpartition("--")[2].partition(".")[0]
        is_known = name in _KIMI_MODULES
    else:
        name = str(config.get("tokenizer_class"))
        is_known = name == _KIMI_CLASS
    if not is_known:
        raise ConfigError(
            f"{file} needs the split pattern of the tokenizer {name!r} in tokenizer_config.json, which is "
            f"unknown; known: {', '.join((*_KIMI_MODULES, _KIMI_CLASS))}. Save a tokenizer.json beside it"
        )


def _read_ranks(file: Path) -> dict[str, int]:
    """Return the id of each token, in the byte-level alphabet. A line has a token in base64 and its id."""
    vocab: dict[str, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            vocab[to_byte_level(base64.b64decode(token, validate=True))] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ConfigError(
                f"{file}, line {number}: expected a token in base64 and its rank ({error}); "
                "download the file again"
            ) from error
    missing = [byte for byte in range(256) if to_byte_level(bytes([byte])) not in vocab]
    if missing or sorted(vocab.values()) != list(range(len(vocab))):
        problem = f"the byte {missing[0]:#04x} has no token" if missing else "the ranks are not consecutive"
        raise ConfigError(f"{file}: {problem}; download the file again")
    return vocab


def _add_reserved(backend: Tokenizer, first: int, file: Path, config: Mapping[str, Any]) -> None:
    """Add the reserved tokens, with ids from `first` on; tokenizer_config.json may have their names."""
    named = {int(i): AddedToken(**spec) for i, spec in (config.get("added_tokens_decoder") or {}).items()}
    last = max(first + _NUM_RESERVED - 1, *named, 0)
    reserved = {
        i: named.get(i) or AddedToken(f"<|reserved_token_{i}|>", normalized=False)
        for i in range(first, last + 1)
    }
    backend.add_tokens(list(reserved.values()))
    for i, token in reserved.items():
        if backend.token_to_id(token.content) != i:
            raise ConfigError(
                f"tokenizer_config.json gives {token.content!r} the id {i}, but {file} has it as "
                f"{backend.token_to_id(token.content)}; download both files again"
            )
