"""A model on disk: what config.json or the GGUF header says of it, read once."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quire.config.facts import ArchFacts
from quire.config.families import FAMILIES, GGUF_FAMILIES
from quire.config.gguf import GGUFFile
from quire.config.keys import Keys, read_json
from quire.config.pooling import StoredPooling, read_gguf_pooling, read_pooling
from quire.errors import ConfigError, nearest

DTYPES = ("float32", "float16", "bfloat16")
_OTHER_ENDINGS = ("ForSequenceClassification", "ForMaskedLM", "Model")
_GENERATION_KEYS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p", "max_new_tokens")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk: where it is, what it is, and what it says about text."""

    path: Path
    """A directory with config.json, or a .gguf file."""
    format: str
    """`hf` or `gguf`."""
    facts: ArchFacts
    dtype: str
    """float32, float16 or bfloat16, as the checkpoint says (a GGUF file counts as float32)."""
    derived_max_len: int
    """Longest sequence the checkpoint was made for, rope scaling counted in."""
    bos_id: int | None
    eos_ids: tuple[int, ...]
    """The ids that end a generation: the primary one first."""
    generation: dict[str, Any] = field(default_factory=dict)
    """Sampling defaults of generation_config.json (only the keys that Quire reads)."""
    pooling: StoredPooling = StoredPooling()


def read_checkpoint(path: Path, overrides: dict[str, Any] | None = None) -> Checkpoint:
    """Every fact of the model at `path`; `overrides` (hf_overrides) are merged into its config.json first."""
    path = Path(path)
    if path.is_dir():
        return _read_directory(path, overrides or {})
    if not path.exists():
        raise ConfigError(f"there is no model at {path}: give a directory with config.json or a .gguf file")
    if overrides:
        raise ConfigError(f"hf_overrides change config.json, but {path} is a GGUF file, which has none")
    return _read_gguf(path)


def _merge(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` on top; objects inside are merged the same way."""
    out = dict(base)
    for key, value in changes.items():
        old = out.get(key)
        out[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return out


def _read_directory(path: Path, overrides: dict[str, Any]) -> Checkpoint:
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} is not a model directory: it has no config.json")
    keys = Keys(str(path / "config.json"), _merge(read_json(path / "config.json"), overrides))
    named, architecture = _architecture(keys)
    for key in ("quantization_config", "compression_config"):
        if quantization := keys.get(key):
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise ConfigError(
                f"{keys.source}: {key} says quantized weights ({method}), which is not supported yet; "
                "use the unquantized checkpoint or a GGUF file"
            )
    facts = replace(FAMILIES[architecture].read(keys), architecture=architecture)
    dtype = _dtype(keys)
    generation_path = path / "generation_config.json"
    generation = Keys(str(generation_path), read_json(generation_path) if generation_path.is_file() else {})
    sampling = {key: generation.get(key) for key in _GENERATION_KEYS if generation.get(key) is not None}
    for key, value in sampling.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise generation.wrong(key, "a number")
    bos_ids = generation.token_ids("bos_token_id") or keys.token_ids("bos_token_id")
    pooling = read_pooling(path, keys, named)
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
    )


def _architecture(keys: Keys) -> tuple[str, str]:
    """As config.json names it, and the family's that it is read and built as."""
    named: Any = keys.get("architectures")
    if named is None:
        named = [name for name, family in FAMILIES.items() if family.model_type == keys.get("model_type")]
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise keys.wrong("architectures", "a list of names")
    for name in named:
        if (family := _family(name)) in FAMILIES:
            return name, family
    unknown = named[0] if named else str(keys.get("model_type"))
    raise ConfigError(
        f"{keys.source}: the architecture {unknown!r} is not supported; "
        f"known: {', '.join(sorted(FAMILIES))}{nearest(unknown, FAMILIES)}"
    )


def _family(name: str) -> str:
    """A classifier's body, or one that was saved without its head or with another, is its family's."""
    bases = [name.removesuffix(end) for end in _OTHER_ENDINGS if name.endswith(end)]
    others = [base + ending for base in bases for ending in ("ForCausalLM", "Model", "LMHeadModel")]
    return next((each for each in (name, *others) if each in FAMILIES), name)


def _dtype(keys: Keys) -> str:
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
    arch = Keys(f"{path}, {name}.*", _strip(file.metadata, f"{name}."))
    tokenizer = Keys(f"{path}, tokenizer.ggml.*", _strip(file.metadata, "tokenizer.ggml."))
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
        pooling=read_gguf_pooling(arch),
    )


def _strip(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
