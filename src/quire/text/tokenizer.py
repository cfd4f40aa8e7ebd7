"""Tokenizer: text to ids and back, with the method names of Hugging Face tokenizers."""

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import tokenizers
from tokenizers import AddedToken, normalizers

from quire.checkpoint.gguf import GGUFFile
from quire.errors import ConfigError, RequestError
from quire.text.byte_level import from_byte_level
from quire.text.chat_template import choose_template, render_chat
from quire.text.gguf_vocab import read_vocab
from quire.text.tiktoken_vocab import TIKTOKEN_FILE, read_tiktoken

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


class Encoded(dict[str, Any]):
    """Result of calling a tokenizer: `input_ids` and `attention_mask`, as dict items and as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


class TokenBytes(dict[int, bytes]):
    """The bytes that tokens add to a text, by token id, computed on first use; unknown ids add no bytes."""

    def __init__(self, backend: tokenizers.Tokenizer, *, byte_level: bool, strips_first_space: bool) -> None:
        super().__init__()
        self.backend = backend
        self.byte_level = byte_level
        self.strips_first_space = strips_first_space
        """Whether decoding drops one space at the beginning of a text."""
        self._texts: dict[frozenset[int], TokenTexts] = {}

    def texts(self, skipped: frozenset[int]) -> "TokenTexts":
        if skipped not in self._texts:
            self._texts[skipped] = TokenTexts(self, skipped)
        return self._texts[skipped]

    def __missing__(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id)
        if token is None:
            data = b""
        elif self.byte_level:
            data = from_byte_level(token)
        elif match := _BYTE_TOKEN.fullmatch(token):
            data = bytes([int(match[1], 16)])
        else:
            data = token.replace(_SPACE, " ").encode()
        self[token_id] = data
        return data


class TokenTexts(dict[int, str | None]):
    """The texts of tokens by token id: None for a token with only a part of a UTF-8 character, empty for a
    skipped token."""

    def __init__(self, table: TokenBytes, skipped: frozenset[int]) -> None:
        super().__init__()
        self._table = table
        self._skipped = skipped

    def __missing__(self, token_id: int) -> str | None:
        try:
            self[token_id] = "" if token_id in self._skipped else self._table[token_id].decode()
        except UnicodeDecodeError:
            self[token_id] = None
        return self[token_id]


class Tokenizer:
    """Wraps a `tokenizers.Tokenizer` with the special tokens and the chat template of its model."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str] | None = None,
        chat_template: str | dict[str, str] | None = None,
        has_token_types: bool = True,
    ) -> None:
        # A tokenizer.json may contain the truncation and padding of the model's training.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens_map = dict(special_tokens or {})
        self.bos_token, self.bos_token_id = self._special_token("bos_token")
        self.eos_token, self.eos_token_id = self._special_token("eos_token")
        self.unk_token, self.unk_token_id = self._special_token("unk_token")
        self.pad_token, self.pad_token_id = self._special_token("pad_token")
        self.chat_template = chat_template
        self.has_token_types = has_token_types
        """Whether the model takes token type ids, which mark the tokens of a second text."""
        self.added_tokens = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in self.added_tokens.items() if token.special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        try:
            # The "fast" function does not compute character offsets.
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise _unencodable(texts) from error
        return [encoding.ids for encoding in encodings]

    def offsets(self, text: str, add_special_tokens: bool = True) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the token ids of a text, and for each token its range of characters (start, end) in the
        text."""
        encoding = self.backend.encode(text, add_special_tokens=add_special_tokens)
        return encoding.ids, encoding.offsets

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Return the token ids of two joined texts and the token type (0 or 1) of each token."""
        try:
            encoding = self.backend.encode(first, second)
        except TypeError as error:
            raise _unencodable([first, second]) from error
        return encoding.ids, self._types(encoding)

    def encode_cut(self, *texts: str, max_len: int, side: str) -> tuple[list[int], list[int]]:
        """Encode one or two texts to at most `max_len` tokens; return the token ids and types. Texts are
        truncated on `side` ("left" or "right"), the longer of two texts first; special tokens stay."""
        try:
            parts = [self.backend.encode(text, add_special_tokens=False) for text in texts]
        except TypeError as error:
            raise _unencodable(texts) from error
        budget = max(max_len - self.backend.num_special_tokens_to_add(len(parts) > 1), 0)
        lengths = [len(part) for part in parts]
        if sum(lengths) > budget and len(parts) == 1:
            lengths = [budget]
        elif sum(lengths) > budget:
            short = min(*lengths, budget // 2)
            lengths = [short, budget - short][:: 1 if lengths[0] <= lengths[1] else -1]
        for part, length in zip(parts, lengths, strict=True):
            part.truncate(length, direction=side)
        encoding = self.backend.post_process(parts[0], parts[1] if len(parts) > 1 else None)
        return encoding.ids[:max_len], self._types(encoding)[:max_len]

    def _types(self, encoding: tokenizers.Encoding) -> list[int]:
        return encoding.type_ids if self.has_token_types else [0] * len(encoding)

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> Encoded:
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return Encoded(input_ids=ids, attention_mask=[1] * len(ids))
        rows = self.encode_batch(text, add_special_tokens)
        return Encoded(input_ids=rows, attention_mask=[[1] * len(row) for row in rows])

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = True) -> str:
        id_list = [ids] if isinstance(ids, int) else list(ids)
        try:
            return self.backend.decode(id_list, skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            invalid_id = next(i for i in id_list if not 0 <= i < 2**32)
            raise RequestError(f"token id {invalid_id} is out of range: 0 to {self.max_token_id}") from error

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        documents: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str | list[int]:
        """Return the conversation formatted by the chat template: token ids, or text if not `tokenize`."""
        text = render_chat(
            choose_template(self.chat_template, chat_template, with_tools=tools is not None),
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            **{"bos_token": None, "eos_token": None, **self.special_tokens_map, **kwargs},
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str | None: ...
    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]: ...
    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | None | list[str | None]:
        """Return the tokens of these ids; None for unknown ids."""
        if isinstance(ids, int):
            return self.backend.id_to_token(ids)
        return [self.backend.id_to_token(i) for i in ids]

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...
    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]: ...
    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | None | list[int | None]:
        """Return the ids of these tokens; the id of the unknown token for tokens outside the vocabulary."""
        if isinstance(tokens, str):
            token_id = self.backend.token_to_id(tokens)
            return self.unk_token_id if token_id is None else token_id
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids

    def get_vocab(self) -> dict[str, int]:
        return self.backend.get_vocab(with_added_tokens=True)

    @property
    def added_vocab(self) -> dict[str, int]:
        return {token.content: i for i, token in sorted(self.added_tokens.items())}

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the base vocabulary; `len()` also counts added tokens."""
        return self.backend.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def max_token_id(self) -> int:
        return max(self.get_vocab().values(), default=-1)

    @cached_property
    def token_bytes(self) -> TokenBytes | None:
        """Return the bytes of each token by id, or None if decoding does not work token by token."""
        steps = _decoder_steps(self.backend)
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return TokenBytes(self.backend, byte_level=True, strips_first_space=False)
        if steps[:3] == _SENTENCEPIECE_STEPS and steps[3:] in ([], [_STRIP_STEP]):
            return TokenBytes(self.backend, byte_level=False, strips_first_space=len(steps) == 4)
        return None

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self.special_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        return [self.added_tokens[i].content for i in self.all_special_ids]

    def _special_token(self, name: str) -> tuple[str | None, int | None]:
        """Return the text and the id of a special token, such as `eos_token`; (None, None) if there is
        none."""
        token = self.special_tokens_map.get(name)
        return token, None if token is None else self.backend.token_to_id(token)


def load_tokenizer(path: Path, checkpoint_format: str, *, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer of a checkpoint: `path` is a directory (format `hf`) or a .gguf file (format
    `gguf`). Python code in the checkpoint runs only with `trust_remote_code`."""
    if checkpoint_format == "gguf":
        vocab = read_vocab(GGUFFile(path).metadata)
        return Tokenizer(
            vocab.backend, special_tokens=vocab.special_tokens, chat_template=vocab.chat_template
        )
    if checkpoint_format != "hf":
        raise ConfigError(f"unknown checkpoint format {checkpoint_format!r}; known: gguf, hf")
    return _from_directory(path, trust_remote_code)


def _from_directory(path: Path, trust_remote_code: bool) -> Tokenizer:
    config = _read_json(path / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _read_json(path / "special_tokens_map.json")
    special = {name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name))) is not None}
    if (path / "tokenizer.json").is_file():
        # As in transformers, the post-processor of tokenizer.json adds BOS and EOS: the add_bos_token
        # and add_eos_token of the config are for vocabularies without a tokenizer.json.
        backend = _read_backend(path / "tokenizer.json")
    elif (path / TIKTOKEN_FILE).is_file():
        backend = read_tiktoken(path / TIKTOKEN_FILE, config)
    else:
        backend, converted = _convert_with_transformers(path, trust_remote_code)
        special = converted | special
    try:
        _add_configured_tokens(backend, config, special)
        chat_template = _chat_template(path, config)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"cannot use {path}/tokenizer_config.json: {error!r}") from error
    _add_lowercase(backend, path)
    return Tokenizer(
        backend,
        special_tokens=special,
        chat_template=chat_template,
        has_token_types="token_type_ids" in config.get("model_input_names", ["token_type_ids"]),
    )


def _add_lowercase(backend: tokenizers.Tokenizer, path: Path) -> None:
    """Add a lowercase normalizer if the sentence-transformers config has do_lower_case."""
    if any(_read_json(file).get("do_lower_case") is True for file in path.glob("sentence_*_config.json")):
        before = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *before])


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"cannot read {file}: {error}; download the model's tokenizer again") from error


def _convert_with_transformers(
    path: Path, trust_remote_code: bool
) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Convert a vocabulary in an older file format, such as SentencePiece, with transformers. Return the
    tokenizer and the texts of its special tokens by name."""
    known = ("tokenizer.model", "spiece.model", "tekken.json", "vocab.json", "vocab.txt")
    file = next((path / name for name in known if (path / name).is_file()), None)
    if file is None:
        raise ConfigError(f"no tokenizer in {path}: expected {path / 'tokenizer.json'}")
    remedy = (
        "to convert it, `pip install transformers sentencepiece protobuf`, or save a tokenizer.json "
        "beside it with AutoTokenizer.from_pretrained(...).save_pretrained(...)"
    )
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(f"{path} has {file.name} but no tokenizer.json; {remedy}") from error
    try:
        # trust_remote_code is always passed: without it, transformers asks for permission on the terminal.
        converted = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        backend: tokenizers.Tokenizer = converted.backend_tokenizer
    except (ImportError, OSError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ConfigError(f"cannot convert {file} to a tokenizer.json ({error}); {remedy}") from error
    special = converted.special_tokens_map.items()
    return backend, {name: str(token) for name, token in special if name in _SPECIAL_NAMES}


def _add_configured_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], special: dict[str, str]
) -> None:
    """Add to `backend` the tokens that only tokenizer_config.json (`config`) or the special tokens
    (`special`, texts by name) contain."""
    present = {i: repr(token) for i, token in backend.get_added_tokens_decoder().items()}
    configured = [(int(i), AddedToken(**spec)) for i, spec in config.get("added_tokens_decoder", {}).items()]
    for i, token in sorted(configured, key=lambda item: item[0]):
        if present.get(i) != repr(token):
            backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    extra = extra.values() if isinstance(extra, dict) else extra
    names = [*special.values(), *(text for entry in extra if (text := _token_text(entry)) is not None)]
    marked = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    unmarked = [name for name in dict.fromkeys(names) if name not in marked]
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in unmarked])


def _chat_template(path: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template, or templates by name; None without one. Separate files take precedence over
    tokenizer_config.json."""
    named = {file.stem: _read_text(file) for file in sorted(path.glob("additional_chat_templates/*.jinja"))}
    if (path / "chat_template.jinja").is_file():
        named["default"] = _read_text(path / "chat_template.jinja")
    if named:
        return named["default"] if named.keys() == {"default"} else named
    template = _read_json(path / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return template


def _read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object of a file; empty if the file does not exist."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must contain a JSON object, not {type(value).__name__}")
    return value


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error


def _token_text(entry: Any) -> str | None:
    """Return the text of a special token, which a config has as a string or as an object."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else None


def _unencodable(texts: Sequence[str]) -> RequestError:
    for text in texts:
        if not isinstance(text, str):
            return RequestError(f"text must be a string, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            lone = f"U+{ord(text[error.start]):04X} at character {error.start}"
            return RequestError(
                f"text contains the lone surrogate {lone}, which is not a character; remove it"
            )
    return RequestError("text cannot be encoded")


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


_SENTENCEPIECE_STEPS: list[dict[str, Any]] = [
    {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP_STEP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
