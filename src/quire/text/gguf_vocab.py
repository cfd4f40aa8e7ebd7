"""The tokenizer of a GGUF header: vocabulary, merges and pre-tokenizer regexes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from quire.errors import ConfigError
from quire.logs import get_logger, warn_once

logger = get_logger(__name__)

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_SPACE = "▁"
_SENTENCEPIECE = ("llama", "gemma4")
"""Values of tokenizer.ggml.model for vocabularies with escaped spaces. That of Gemma 4 always has merges."""
_SOURCE = "the GGUF file"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SLASH_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASH_TAIL}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SLASH_TAIL}"
)
_SEED_CODER = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕ"
    # Characters are escaped if another one looks the same after normalization.
    "\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d"
    r"ℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    r"𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_DEEPSEEK_CJK = r"[一-龥ࠀ-一가-퟿]+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True, slots=True)
class GGUFPreTokenizer:
    """Rules that split a text into words before byte-level BPE."""

    splits: tuple[str, ...]
    """Regexes, each applied to the pieces that the regex before it returns."""
    whole_words: bool = False
    """Whether a word that is a token stays undivided, regardless of the merges."""
    add_bos: bool = False
    """Whether BOS is prepended if the file does not set add_bos_token."""
    nfc: bool = False


_NAMES_BY_PRE_TOKENIZER: list[tuple[GGUFPreTokenizer, str]] = [
    (
        GGUFPreTokenizer((_GPT2,)),
        "default gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4",
    ),
    (
        GGUFPreTokenizer((_LLAMA3,), whole_words=True, add_bos=True),
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    ),
    (GGUFPreTokenizer((_LLAMA3,)), "dbrx smaug-bpe glm4 chatglm-bpe"),
    (GGUFPreTokenizer((_QWEN2,), nfc=True), "qwen2"),
    (GGUFPreTokenizer((_QWEN2,)), "deepseek-r1-qwen stablelm2 hunyuan megrez kormo solar-open"),
    (GGUFPreTokenizer((_QWEN35,), nfc=True), "qwen35"),
    (GGUFPreTokenizer((_TEKKEN,), whole_words=True, add_bos=True), "tekken"),
    (GGUFPreTokenizer((_GPT4O,)), "gpt-4o llama4 kanana2 minimax-m2"),
    (GGUFPreTokenizer((r"\p{N}", _GPT2)), "smollm starcoder refact command-r codeshell exaone minerva-7b"),
    (GGUFPreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9]+", "[0-9]{3}")), "falcon"),
    (
        GGUFPreTokenizer(
            (
                r"[\r\n]",
                _DEEPSEEK_LETTERS,
                r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
                r"\s+$",
                _DEEPSEEK_CJK,
                r"\p{N}",
            )
        ),
        "deepseek-llm",
    ),
    (GGUFPreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")), "deepseek-coder"),
    (
        GGUFPreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3)),
        "deepseek-v3 hunyuan-dense joyai-llm",
    ),
    (GGUFPreTokenizer((_SEED_CODER,)), "seed-coder"),
    (GGUFPreTokenizer((_BLOOM,)), "bloom poro-chat gpt3-finnish"),
    (GGUFPreTokenizer((_BLOOM, r"\p{N}")), "viking"),
]
PRE_TOKENIZERS = {
    name: pre_tokenizer for pre_tokenizer, names in _NAMES_BY_PRE_TOKENIZER for name in names.split()
}
"""Pre-tokenizers by the value of tokenizer.ggml.pre."""


@dataclass(frozen=True, slots=True)
class GGUFVocab:
    """The tokenizer of a GGUF header, with its special tokens and chat templates."""

    backend: Tokenizer
    special_tokens: dict[str, str] = field(default_factory=dict)
    """Named special tokens (`bos_token`, `eos_token`, `unk_token`, `pad_token`) that the file has."""
    chat_template: str | dict[str, str] | None = None


def read_vocab(metadata: Mapping[str, Any]) -> GGUFVocab:
    """Build the tokenizer from the header's key-value pairs."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", *_SENTENCEPIECE):
        known = ", ".join(("gpt2", *_SENTENCEPIECE))
        raise ConfigError(f"GGUF tokenizer {kind!r} is not supported; known: {known}")
    tokens = list(_required_list(metadata, "tokens"))
    for name in ("scores", "token_type"):
        values = metadata.get(f"tokenizer.ggml.{name}")
        if values is not None and len(values) != len(tokens):
            raise ConfigError(
                f"the GGUF file has {len(tokens)} tokens but {len(values)} tokenizer.ggml.{name}"
            )
    special = _special_tokens(metadata, tokens)
    if kind == "gpt2":
        pre_tokenizer = _pre_tokenizer(metadata.get("tokenizer.ggml.pre", "default"))
        vocab = {token: i for i, token in enumerate(tokens)}
        backend = byte_level_bpe(_SOURCE, vocab, _merges(_required_list(metadata, "merges")), pre_tokenizer)
        add_bos = pre_tokenizer.add_bos
    else:
        backend = _sentencepiece(tokens, metadata, unk_token=special.get("unk_token"))
        add_bos = True
    backend.add_special_tokens(_added_tokens(tokens, metadata, special=True))
    backend.add_tokens(_added_tokens(tokens, metadata, special=False))
    frame_text(
        backend,
        bos=special.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", add_bos) else None,
        eos=special.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    return GGUFVocab(backend, special, _chat_template(metadata))


def frame_text(backend: Tokenizer, *, bos: str | None, eos: str | None) -> None:
    """Put `bos` before and `eos` after every text that is encoded with special tokens."""
    framing = [(token, backend.token_to_id(token)) for token in (bos, eos) if token is not None]
    if framing:
        single = [f"{bos}:0"] * (bos is not None) + ["$A:0"] + [f"{eos}:0"] * (eos is not None)
        backend.post_processor = processors.TemplateProcessing(
            single=single, pair=[*single, "$B:1"], special_tokens=framing
        )


def _required_list(metadata: Mapping[str, Any], name: str) -> Sequence[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if values is None or len(values) == 0:
        raise ConfigError(f"the GGUF file has no tokenizer.ggml.{name}; convert the model again with it")
    return values  # type: ignore[no-any-return]


def _pre_tokenizer(name: str) -> GGUFPreTokenizer:
    if name not in PRE_TOKENIZERS:
        warn_once(
            logger,
            f"unknown GGUF pre-tokenizer {name!r}: using that of GPT-2, which may tokenize prompts "
            "differently from the model's training",
        )
    return PRE_TOKENIZERS.get(name, PRE_TOKENIZERS["default"])


def _merges(lines: Iterable[str]) -> list[tuple[str, str]]:
    # A piece may itself begin with a space, so the separator is searched from the second character on.
    cuts = ((line, line.find(" ", 1)) for line in lines)
    return [(line[:cut], line[cut + 1 :]) for line, cut in cuts]


def _bpe(source: str, vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    """Build the BPE model of a vocabulary; `source` is the name of its file for the error message."""
    try:
        return models.BPE(vocab=vocab, merges=merges, **options)
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{source}: the vocabulary and the merges do not match: {error}") from error


def byte_level_bpe(
    source: str, vocab: dict[str, int], merges: list[tuple[str, str]], pre_tokenizer: GGUFPreTokenizer
) -> Tokenizer:
    """Build the tokenizer of a byte-level vocabulary; `source` is the name of its file for errors."""
    backend = Tokenizer(_bpe(source, vocab, merges, ignore_merges=pre_tokenizer.whole_words))
    if pre_tokenizer.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in pre_tokenizer.splits]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(tokens: Sequence[str], metadata: Mapping[str, Any], unk_token: str | None) -> Tokenizer:
    tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    vocab = {token: i for i, token in enumerate(tokens)}
    if "tokenizer.ggml.merges" in metadata:
        merges = _merges(metadata["tokenizer.ggml.merges"])
    else:
        scores = _required_list(metadata, "scores")
        merges = merges_by_rank({token: -scores[i] for token, i in vocab.items()})
    backend = Tokenizer(_bpe(_SOURCE, vocab, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True))
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    escape = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), escape] if prefix else [escape])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)
    return backend


def merges_by_rank(ranks: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the BPE merges of a vocabulary: all pairs of tokens that join to a token, the token of the
    lowest rank first, as in SentencePiece and tiktoken."""
    return [
        (left, right)
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if (right := token[cut:]) in ranks and (left := token[:cut]) in ranks
    ]


def _special_tokens(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, str]:
    defaults = {"bos": 1, "eos": 2, "unknown": 0} if metadata["tokenizer.ggml.model"] == "llama" else {}
    special: dict[str, str] = {}
    for role, name in {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}.items():
        token_id = metadata.get(f"tokenizer.ggml.{role}_token_id", defaults.get(role))
        if token_id is not None and 0 <= token_id < len(tokens):
            special[f"{name}_token"] = tokens[token_id]
    return special


def _added_tokens(tokens: Sequence[str], metadata: Mapping[str, Any], *, special: bool) -> list[AddedToken]:
    """Return the tokens that are matched before texts are split: the special tokens if `special`, else the
    user-defined ones."""
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        named = _special_tokens(metadata, tokens)
        added = [named[name] for name in ("bos_token", "eos_token") if name in named] if special else []
    else:
        kinds = (_CONTROL, _UNKNOWN) if special else (_USER_DEFINED,)
        added = [token for token, kind in zip(tokens, types, strict=True) if kind in kinds]
    if metadata["tokenizer.ggml.model"] in _SENTENCEPIECE:
        # Runs of spaces are escaped in normalised text and are built by merges.
        added = [token for token in added if token.strip(f" {_SPACE}")]
    return [AddedToken(token, special=special, normalized=False) for token in added if token]


def _chat_template(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    default: str | None = metadata.get("tokenizer.chat_template")
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): text for key, text in metadata.items() if key.startswith(prefix)}
    if not named:
        return default
    return named if default is None else {"default": default, **named}
