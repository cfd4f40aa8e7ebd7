"""A checkpoint: what config.json or the GGUF header describes, read once."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from quire.checkpoint.facts import ArchFacts, MediaFacts
from quire.checkpoint.families import ALIASES, FAMILIES, GGUF_FAMILIES, Family
from quire.checkpoint.gguf import SAMPLING_KEYS, GGUFFile
from quire.checkpoint.multimodal import MEDIA_FAMILIES
from quire.checkpoint.pooling import GENERATIVE, RETRIEVAL, StoredPooling, read_gguf_pooling, read_pooling
from quire.checkpoint.quant import read_quant
from quire.checkpoint.quant.facts import QuantFacts
from quire.checkpoint.reader import ConfigReader, read_json
from quire.checkpoint.transformers_config import (
    IMPL_OWN_CACHE,
    RUN_BY_TRANSFORMERS,
    has_setting,
    is_installed,
    read_transformers_model,
    source_of,
)
from quire.errors import ConfigError, UnsupportedSetting, nearest
from quire.logs import get_logger, warn_once

logger = get_logger(__name__)

DTYPES = ("float32", "float16", "bfloat16")
_OTHER_ENDINGS = ("ForSequenceClassification", "ForTokenClassification", "ForMaskedLM", "Model")
_HEADED = re.compile(r"(\w+?)For[A-Z]\w*")
"""Pattern of an architecture name with a head, such as BertForMaskedLM."""
_CLASS_KEYS = ("id2label", "num_labels", "problem_type", "embedding_dim")
_GENERATION_KEYS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p", "max_new_tokens")
_SPEECH_KEYS = ("max_initial_timestamp_index", "alignment_heads")
"""Keys of generation_config.json for speech-to-text models."""
_SUPPRESS_KEYS = ("suppress_tokens", "begin_suppress_tokens")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk: its path, architecture, special tokens and defaults."""

    path: Path
    """A directory with config.json, or a .gguf file."""
    format: str
    """Format of the files: `hf` (a directory with config.json) or `gguf`."""
    facts: ArchFacts
    dtype: str
    """float32, float16 or bfloat16, from the checkpoint; float32 for a GGUF file."""
    derived_max_len: int
    """Maximum sequence length of the checkpoint in tokens, rope scaling included."""
    bos_id: int | None
    eos_ids: tuple[int, ...]
    """Token ids that end generation; the primary one first."""
    generation: dict[str, Any] = field(default_factory=dict)
    """Sampling defaults under the names of generation_config.json (only the keys that Quire reads)."""
    pooling: StoredPooling = StoredPooling()
    quant: QuantFacts | None = None
    """Quantization of the layers, if any; None for a GGUF file, where each tensor has a type."""


def read_checkpoint(
    path: Path,
    overrides: dict[str, Any] | None = None,
    *,
    config_path: Path | None = None,
    model_impl: str = "auto",
    trust_remote_code: bool = False,
    family: Family | None = None,
) -> Checkpoint:
    """Read the checkpoint at `path`. `overrides` (hf_overrides) are merged into config.json, which is in
    `config_path` if that is set. Unless `family` is set, the reader of the config is selected by its
    architecture name."""
    path = Path(path)
    if path.is_dir():
        config = _read_config(config_path or path, overrides or {})
        return _read_directory(path, config, model_impl, trust_remote_code, family)
    if not path.exists():
        raise ConfigError(f"there is no model at {path}: give a directory with config.json or a .gguf file")
    if config_path is not None:
        warn_once(
            logger, f"hf_config_path has no effect: {path} is a GGUF file, which contains its configuration"
        )
    if overrides:
        raise ConfigError(f"hf_overrides change config.json, but {path} is a GGUF file, which has none")
    if model_impl in RUN_BY_TRANSFORMERS:
        raise ConfigError(f"model_impl={model_impl!r} needs a model directory, but {path} is a GGUF file")
    return _read_gguf(path)


def _merge(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` updated with `changes`; nested objects are merged in the same way."""
    out = dict(base)
    for key, value in changes.items():
        old = out.get(key)
        out[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return out


def _read_config(folder: Path, overrides: dict[str, Any]) -> ConfigReader:
    file = folder / "config.json"
    if not file.is_file():
        raise ConfigError(f"{folder} is not a model directory: it has no config.json")
    return ConfigReader(str(file), _merge(read_json(file), overrides))


def _read_directory(
    path: Path, keys: ConfigReader, model_impl: str, trusted: bool, family: Family | None
) -> Checkpoint:
    whole = keys
    media: MediaFacts | None = None
    if model_impl not in RUN_BY_TRANSFORMERS:
        keys, media = _split_multimodal(keys)
    if family is None:
        can_borrow = model_impl == "auto" and keys is whole
        architecture, facts = _read_facts(keys, path, model_impl, trusted, can_borrow=can_borrow)
        facts = replace(facts, media=media)
    else:
        architecture, facts = family.model_type, family.read(keys)
    dtype = _read_dtype(keys)
    generation_path = path / "generation_config.json"
    generation = ConfigReader(
        str(generation_path), read_json(generation_path) if generation_path.is_file() else {}
    )
    sampling = {key: generation.get(key) for key in _GENERATION_KEYS if generation.get(key) is not None}
    for key in sampling:
        generation.any_number(key)
    if media is not None and media.transcribes:
        sources = {key: generation if key in generation.values else keys for key in _SUPPRESS_KEYS}
        sampling |= {key: [*source.token_ids(key)] for key, source in sources.items()}
        sampling |= {key: generation.get(key) for key in _SPEECH_KEYS if generation.get(key) is not None}
    bos_ids = generation.token_ids("bos_token_id") or keys.token_ids("bos_token_id")
    pooling = read_pooling(path, *_pooling_keys(whole, keys, architecture))
    return Checkpoint(
        path=path,
        format="hf",
        facts=facts,
        dtype=dtype,
        derived_max_len=min(facts.max_len, pooling.max_len or sys.maxsize),
        bos_id=bos_ids[0] if bos_ids else None,
        eos_ids=generation.token_ids("eos_token_id") or keys.token_ids("eos_token_id"),
        generation=sampling,
        pooling=pooling,
        quant=read_quant(keys, path),
    )


def _split_multimodal(keys: ConfigReader) -> tuple[ConfigReader, MediaFacts | None]:
    """Split a config into the keys of the decoder, as in a text-only config.json, and its multimodal inputs
    (None if the config is not multimodal, or only the decoder is supported)."""
    named = [_media_family(name) for name in _architectures(keys)]
    read = next((MEDIA_FAMILIES[name] for name in named if name in MEDIA_FAMILIES), None)
    if read is None:
        return keys, None
    text, media = read(keys)
    if media is not None and _architectures(text)[0].startswith(("Granite", "HyperCLOVAX")):
        media = replace(media, scale=text.number("embedding_multiplier", 1.0))
    return text, media


def _pooling_keys(whole: ConfigReader, decoder: ConfigReader, named: str) -> tuple[ConfigReader, str]:
    """Return a reader of the settings from which pooling is set up, and the architecture name. A multimodal
    classifier has its labels at the top level of config.json (`whole`); they override those of its text
    config (`decoder`)."""
    named = next((name for name in _architectures(whole) if name.endswith(RETRIEVAL)), named)
    architecture = next((name for name in _architectures(whole) if _media_family(name) != name), named)
    class_keys = {key: whole.get(key) for key in _CLASS_KEYS if whole.get(key) is not None}
    return decoder.but(**class_keys), architecture


def _read_facts(
    keys: ConfigReader, path: Path, model_impl: str, trusted: bool, *, can_borrow: bool
) -> tuple[str, ArchFacts]:
    """Return the architecture name in config.json, and the facts of the model. A model without code in Quire
    runs through transformers, if possible; with `can_borrow`, also a model with a setting that only the code
    of transformers supports."""
    named = _architectures(keys)
    known = [name for name in named if _family(name) in FAMILIES]
    if known and model_impl not in RUN_BY_TRANSFORMERS:
        architecture = _family(known[0])
        try:
            return known[0], replace(FAMILIES[architecture].read(keys), architecture=architecture)
        except UnsupportedSetting as error:
            kind = str(keys.get("model_type") or FAMILIES[architecture].model_type)
            if not can_borrow or not has_setting(known[0], kind, error.key):
                raise
            warn_once(logger, f"{error}; the model runs through transformers instead")
    if model_impl in RUN_BY_TRANSFORMERS and not is_installed():
        raise ConfigError(
            f"model_impl={model_impl!r} needs the transformers package: install it, or use 'auto'"
        )
    name = named[0] if named else str(keys.get("model_type") or "")
    if not name:
        raise keys.wrong("architectures", "the name of a model's class")
    if keys.get("is_encoder_decoder") is True:
        raise keys.wrong(
            "is_encoder_decoder",
            f"false: {name} is an encoder-decoder model, and such models are not supported yet, except"
            " Whisper",
        )
    source = None
    generates = name.endswith(GENERATIVE) or not (name.endswith("Model") or _HEADED.fullmatch(name))
    if model_impl in ("auto", *RUN_BY_TRANSFORMERS) and generates:
        source = source_of(keys, name, trusted=trusted)
    if source is None:
        raise ConfigError(f"{keys.source}: {_unsupported_message(keys, name, model_impl)}")
    try:
        own_cache = model_impl == IMPL_OWN_CACHE
        return name, read_transformers_model(keys, path, remote=source == "checkpoint", own_cache=own_cache)
    except ConfigError as error:
        raise ConfigError(f"the architecture {name!r} is not supported: {error}") from error


def _architectures(keys: ConfigReader) -> list[str]:
    named: Any = keys.get("architectures")
    if named is None:
        named = [name for name, family in FAMILIES.items() if family.model_type == keys.get("model_type")]
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise keys.wrong("architectures", "a list of names")
    return named


def _unsupported_message(keys: ConfigReader, name: str, model_impl: str) -> str:
    """Return the error message for an architecture that is not supported."""
    more = ", besides the decoders of the installed transformers"
    if model_impl not in ("auto", *RUN_BY_TRANSFORMERS):
        more = "; model_impl='auto' also supports the decoders of transformers"
    elif not is_installed():
        more = "; with the transformers package installed, also its decoders"
    elif keys.get("auto_map"):
        more += "; trust_remote_code=True would run the code in the checkpoint"
    if (headed := _HEADED.fullmatch(name)) and _family(body := f"{headed[1]}Model") in FAMILIES:
        return (
            f"{name} has a head that is not supported; supported are ForCausalLM,"
            " ForSequenceClassification and ForTokenClassification; to use the model without its head for"
            f" embeddings, set hf_overrides={{'architectures': ['{body}']}}"
        )
    count = len(FAMILIES.keys() | MEDIA_FAMILIES.keys())
    known = f"docs/models.md lists the {count} that are{more}"
    return f"the architecture {name!r:.100} is not supported; {known}{_nearest_architecture(keys, name)}"


def _nearest_architecture(keys: ConfigReader, name: str) -> str:
    """Return a hint that names the architecture with the nearest model_type, or else the nearest name."""
    kinds = {family.model_type: architecture for architecture, family in FAMILIES.items()}
    close = get_close_matches(str(keys.get("model_type")), kinds, n=1, cutoff=0.7)
    if close:
        return f"; the nearest is {kinds[close[0]]!r} (model_type {close[0]!r})"
    return nearest(name, [*FAMILIES, *MEDIA_FAMILIES])


def _family(name: str) -> str:
    """Return the key of FAMILIES for an architecture name: classifiers, headless models and text parts of
    multimodal models have the key of their decoder. Unknown names are returned unchanged."""
    if name in ALIASES:
        return ALIASES[name]
    bases = [name.removesuffix(end) for end in _OTHER_ENDINGS if name.endswith(end)]
    bases += [base.removesuffix("Text") for base in bases if base.endswith("Text")]
    others = [base + ending for base in bases for ending in ("ForCausalLM", "Model", "LMHeadModel")]
    return next((candidate for candidate in (name, *others) if candidate in FAMILIES), name)


def _media_family(name: str) -> str:
    """Return the key of MEDIA_FAMILIES for the name of a multimodal classifier; other names are returned
    unchanged."""
    body = name.removesuffix(_OTHER_ENDINGS[0])
    known = f"{body}ForConditionalGeneration"
    return known if body != name and known in MEDIA_FAMILIES else name


def _read_dtype(keys: ConfigReader) -> str:
    key = "dtype" if keys.get("dtype") is not None else "torch_dtype"
    name = str(keys.get(key) or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise keys.wrong(key, f"one of {', '.join(DTYPES)}")
    return name


def _read_gguf(path: Path) -> Checkpoint:
    file = GGUFFile(path)
    name = file.metadata.get("general.architecture")
    if name not in GGUF_FAMILIES:
        raise ConfigError(
            f"{path}: the GGUF architecture {name!r} is not supported; "
            f"known: {', '.join(sorted(GGUF_FAMILIES))}{nearest(str(name), GGUF_FAMILIES)}"
        )
    arch = ConfigReader(f"{path}, {name}.*", _strip(file.metadata, f"{name}."))
    tokenizer = ConfigReader(f"{path}, tokenizer.ggml.*", _strip(file.metadata, "tokenizer.ggml."))
    ends = [i for kind in ("eos", "eot", "eom") for i in tokenizer.token_ids(f"{kind}_token_id")]
    bos_ids = tokenizer.token_ids("bos_token_id")
    family = GGUF_FAMILIES[name]
    facts = replace(family.read(file, arch), architecture=family.architecture)
    return Checkpoint(
        path=path,
        format="gguf",
        facts=facts,
        dtype="float32",
        derived_max_len=facts.max_len,
        bos_id=bos_ids[0] if bos_ids else None,
        eos_ids=tuple(dict.fromkeys(ends)),
        generation=_read_gguf_sampling(ConfigReader(str(path), file.metadata)),
        pooling=read_gguf_pooling(arch),
    )


def _read_gguf_sampling(header: ConfigReader) -> dict[str, Any]:
    """Return the default sampling parameters of a GGUF header. Numbers are rounded to 7 digits: a header has
    float32, in which 0.95 is not exact."""
    stored = {name: key for name, key in SAMPLING_KEYS.items() if header.get(key) is not None}
    numbers = ((name, header.any_number(key)) for name, key in stored.items())
    return {name: float(f"{value:.7g}") if isinstance(value, float) else value for name, value in numbers}


def _strip(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
