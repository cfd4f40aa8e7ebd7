"""The tokenizer keys of a GGUF header, verified by reading them back."""

import json
from collections.abc import Sequence
from typing import Any

from quire.errors import ConfigError
from quire.text.gguf_vocab import PRE_TOKENIZERS, GGUFPreTokenizer, read_vocab
from quire.text.tokenizer import Tokenizer

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
"""Values of tokenizer.ggml.token_type."""
_PROBE = (
    "Hello WORLD, it's 2024 and I'LL pay $12,345.67 for 3 cafés!\n\n  def f(x):\n\treturn x**2 # <tag/>\r\n"
    "naïve Straße 你好，世界 こんにちは 안녕하세요 Привет мир ¿qué? 10000000  x_y  '...' ½ e\u0301 🙂👍🏽  "
)
_PREFERRED = {"gpt-2": "default"}
"""Maps pre-tokenizer names that llama.cpp prefers to equivalent names."""


def gguf_vocab(tokenizer: Tokenizer, size: int, eos_ids: Sequence[int]) -> dict[str, Any]:
    """Return the tokenizer entries of a GGUF header, as {key: value}; `size` is the number of rows of the
    embedding."""
    written = json.loads(tokenizer.backend.to_str())
    model = written["model"]
    if model["type"] != "BPE" or (written["decoder"] or {}).get("type") != "ByteLevel":
        raise ConfigError(
            f"the tokenizer is {model['type']} with a decoder of the kind "
            f"{(written['decoder'] or {}).get('type')}, but only byte-level BPE is supported in GGUF files; "
            "use --to fp8, int8 or int4"
        )
    header: dict[str, Any] = {"tokenizer.ggml.model": "gpt2"} | _tokens(tokenizer, model, size)
    roles = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "padding": tokenizer.pad_token_id}
    others = [i for i in eos_ids if i != roles["eos"]]
    roles["eot"] = others[0] if others else None
    header |= {f"tokenizer.ggml.{role}_token_id": i for role, i in roles.items() if i is not None}
    bos = tokenizer.bos_token_id
    header["tokenizer.ggml.add_bos_token"] = bos is not None and tokenizer.encode("a")[0] == bos
    if isinstance(tokenizer.chat_template, str):
        header["tokenizer.chat_template"] = tokenizer.chat_template
    elif tokenizer.chat_template is not None:
        header |= {f"tokenizer.chat_template.{name}": text for name, text in tokenizer.chat_template.items()}
    return header | {"tokenizer.ggml.pre": _find_pre_tokenizer(tokenizer, header)}


def _tokens(tokenizer: Tokenizer, model: dict[str, Any], size: int) -> dict[str, Any]:
    tokens, types = [f"[PAD{i}]" for i in range(size)], [_UNUSED] * size
    for token, i in tokenizer.get_vocab().items():
        if i < size:
            added = tokenizer.added_tokens.get(i)
            tokens[i] = token
            types[i] = _NORMAL if added is None else _CONTROL if added.special else _USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
    }


def _find_pre_tokenizer(tokenizer: Tokenizer, vocab: dict[str, Any]) -> str:
    """Return the name of the GGUF pre-tokenizer that splits a probe text into the tokenizer's tokens."""
    expected = tokenizer.encode(_PROBE)
    tried: dict[GGUFPreTokenizer, str] = {}
    for name, words in PRE_TOKENIZERS.items():
        tried.setdefault(words, name)
    for name in tried.values():
        backend = read_vocab(vocab | {"tokenizer.ggml.pre": name}).backend
        if backend.encode(_PROBE).ids == expected:
            return next((better for better, worse in _PREFERRED.items() if worse == name), name)
    raise ConfigError("the pre-tokenizer has no equivalent in GGUF files; use --to fp8, int8 or int4")
