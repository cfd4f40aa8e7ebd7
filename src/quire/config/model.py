"""What a model is: every fact read once from config.json or the GGUF header."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quire.config.gguf import GGUFFile
from quire.config.keys import Keys, read_json
from quire.errors import ConfigError, nearest
from quire.logs import get_logger, warn_once

logger = get_logger(__name__)

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
"""The rope types that a config.json may name."""
DTYPES = ("float32", "float16", "bfloat16")

# What a config.json may call the longest sequence, and what is assumed when it calls it nothing.
_MAX_LEN_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
_FALLBACK_MAX_LEN = 2048
_GENERATION_KEYS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p", "max_new_tokens")


@dataclass(frozen=True, slots=True)
class RopeFacts:
    """Rotary embedding as the checkpoint describes it; `kind` is a key of the table in `layers/rope.py`."""

    theta: float = 10000.0
    dim: int = 0
    """How many of the head's dimensions rotate."""
    max_len: int = 2048
    """The checkpoint's max_position_embeddings."""
    kind: str = "default"
    """default | linear | dynamic | llama3 | yarn | factors"""
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()
    """`factors` only: the divisor of each frequency, as a GGUF file's rope_freqs tensor carries them."""


@dataclass(frozen=True, slots=True)
class ArchFacts:
    """The shape of a decoder: all that a model file may ask for."""

    architecture: str
    """A key of the model table, such as LlamaForCausalLM."""
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeFacts
    activation: str = "silu"
    tied: bool = False
    """Whether the output head shares the embedding's weight."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer, None for full attention; empty means all full."""

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None


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


@dataclass(frozen=True, slots=True)
class Family:
    """How the checkpoints of one architecture differ where their config.json does not say so."""

    model_type: str
    """config.json's model_type and, for the families that have one, the GGUF architecture."""
    qkv_bias: bool = False
    """Query, key and value always have a bias, whatever attention_bias says."""
    bias_keys: bool = False
    """attention_bias and mlp_bias are read."""
    qk_norm: bool = False
    head_dim: int | None = None
    """The head size where config.json names none; None: hidden / heads."""
    window: str = "none"
    """Sliding windows: `none`, `all` layers, or `upper` layers when use_sliding_window is set."""


FAMILIES = {
    "LlamaForCausalLM": Family("llama", bias_keys=True),
    "MistralForCausalLM": Family("mistral", window="all"),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, window="upper"),
    "Qwen3ForCausalLM": Family("qwen3", bias_keys=True, qk_norm=True, head_dim=128, window="upper"),
}
_GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


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
    architecture = _architecture(keys)
    for key in ("quantization_config", "compression_config"):
        if quantization := keys.get(key):
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise ConfigError(
                f"{keys.source}: {key} says quantized weights ({method}), which is not supported yet; "
                "use the unquantized checkpoint or a GGUF file"
            )
    facts = _facts(keys, architecture)
    dtype = _dtype(keys)
    generation_path = path / "generation_config.json"
    generation = Keys(str(generation_path), read_json(generation_path) if generation_path.is_file() else {})
    sampling = {key: generation.get(key) for key in _GENERATION_KEYS if generation.get(key) is not None}
    for key, value in sampling.items():
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise generation.wrong(key, "a number")
    bos_ids = generation.token_ids("bos_token_id") or keys.token_ids("bos_token_id")
    return Checkpoint(
        path=path,
        format="hf",
        facts=facts,
        dtype=dtype,
        derived_max_len=_derived_max_len(facts.rope),
        bos_id=bos_ids[0] if bos_ids else None,
        eos_ids=generation.token_ids("eos_token_id") or keys.token_ids("eos_token_id"),
        generation=sampling,
    )


def _architecture(keys: Keys) -> str:
    named: Any = keys.get("architectures")
    if named is None:
        named = [name for name, family in FAMILIES.items() if family.model_type == keys.get("model_type")]
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise keys.wrong("architectures", "a list of names")
    known = [str(name) for name in named if name in FAMILIES]
    if known:
        return known[0]
    unknown = named[0] if named else str(keys.get("model_type"))
    raise ConfigError(
        f"{keys.source}: the architecture {unknown!r} is not supported; "
        f"known: {', '.join(sorted(FAMILIES))}{nearest(unknown, FAMILIES)}"
    )


def _dtype(keys: Keys) -> str:
    key = "dtype" if keys.get("dtype") is not None else "torch_dtype"
    name = str(keys.get(key) or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise keys.wrong(key, f"one of {', '.join(DTYPES)}")
    return name


def _facts(keys: Keys, architecture: str) -> ArchFacts:
    family = FAMILIES[architecture]
    activation = keys.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise keys.wrong("hidden_act", "silu (no other activation is supported for this architecture)")
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    kv_heads = keys.size("num_key_value_heads", heads)
    if keys.get("head_dim") is None and family.head_dim is None and hidden % heads:
        raise ConfigError(
            f"{keys.source}: hidden_size {hidden} is not divisible by num_attention_heads {heads} "
            "and no head_dim is given"
        )
    head_dim = keys.size("head_dim", family.head_dim or hidden // heads)
    _check_heads(keys.source, heads, kv_heads)
    layers = keys.size("num_hidden_layers")
    return ArchFacts(
        architecture=architecture,
        vocab=keys.size("vocab_size"),
        hidden=hidden,
        intermediate=keys.size("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope=_rope(keys, head_dim),
        tied=keys.flag("tie_word_embeddings"),
        qkv_bias=family.qkv_bias or (family.bias_keys and keys.flag("attention_bias")),
        out_bias=family.bias_keys and keys.flag("attention_bias"),
        mlp_bias=architecture == "LlamaForCausalLM" and keys.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        windows=_windows(keys, family, layers),
    )


def _check_heads(source: str, heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise ConfigError(
            f"{source}: {heads} attention heads cannot share {kv_heads} key/value heads evenly; "
            "the first must be a multiple of the second"
        )


def _windows(keys: Keys, family: Family, layers: int) -> tuple[int | None, ...]:
    if family.window == "none" or (family.window == "upper" and not keys.flag("use_sliding_window")):
        return ()
    # An absent key means the default of these families; null means full attention.
    if "sliding_window" in keys.values and keys.get("sliding_window") is None:
        return ()
    window = keys.size("sliding_window", 4096)
    if family.window == "all":
        return (window,) * layers
    kinds = keys.get("layer_types")
    if kinds is None:
        first = keys.get("max_window_layers")
        first = 28 if first is None else first
        if not isinstance(first, int) or first < 0:
            raise keys.wrong("max_window_layers", "a number of layers")
        return tuple(window if layer >= first else None for layer in range(layers))
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise keys.wrong("layer_types", f"{layers} entries, each one of {', '.join(known)}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _max_len(keys: Keys) -> int:
    found = [keys.size(key) for key in _MAX_LEN_KEYS if keys.get(key) is not None]
    if not found:
        warn_once(
            logger,
            f"{keys.source} names no maximum length ({', '.join(_MAX_LEN_KEYS)}); "
            f"assuming {_FALLBACK_MAX_LEN}",
        )
    return min(found, default=_FALLBACK_MAX_LEN)


def _rope(keys: Keys, head_dim: int) -> RopeFacts:
    """Rope of a config.json: `rope_parameters`, or the older `rope_theta` + `rope_scaling`."""
    given: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        block = keys.get(name) or {}
        if not isinstance(block, dict) or any(isinstance(value, dict) for value in block.values()):
            raise keys.wrong(name, "one flat object for all layers")
        given |= {key: value for key, value in block.items() if value is not None}
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ConfigError(
            f"{keys.source}: the rope type {kind!r} is not supported; known: {', '.join(ROPE_KINDS)}"
        )
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if keys.get(name) is not None:
            given.setdefault(name, keys.get(name))
    rope = Keys(f"{keys.source}, rope_parameters", given)
    max_len = _max_len(keys)
    original = rope.size("original_max_position_embeddings", max_len)
    factor = 1.0
    if kind == "yarn" and "original_max_position_embeddings" in given:
        factor = rope.number("factor", max_len / original)
    elif kind != "default":
        factor = rope.number("factor")
    facts = RopeFacts(
        theta=rope.number("rope_theta", 10000.0),
        dim=int(head_dim * rope.number("partial_rotary_factor", 1.0)),
        max_len=max_len,
        kind=kind,
        factor=factor,
        original_max_len=original,
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )
    _check_rope(rope.source, facts, head_dim)
    return facts


def _check_rope(source: str, rope: RopeFacts, head_dim: int) -> None:
    if rope.dim % 2 or not 2 <= rope.dim <= head_dim:
        raise ConfigError(f"{source}: {rope.dim} rotating dimensions of {head_dim}; expected an even number")
    if rope.theta <= 1:
        raise ConfigError(f"{source}: rope_theta is {rope.theta}, expected more than 1")
    if rope.kind == "dynamic" and rope.dim == 2:
        raise ConfigError(f"{source}: dynamic rope needs more than 2 rotating dimensions")
    if rope.kind == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        raise ConfigError(
            f"{source}: high_freq_factor {rope.high_freq_factor} must be greater than "
            f"low_freq_factor {rope.low_freq_factor}"
        )


def _derived_max_len(rope: RopeFacts) -> int:
    """The longest sequence. Scaling stretches it, except llama3: max_position_embeddings counts that in."""
    if rope.kind in ("linear", "dynamic"):
        return int(rope.max_len * rope.factor)
    return int(rope.original_max_len * rope.factor) if rope.kind == "yarn" else rope.max_len


def _read_gguf(path: Path) -> Checkpoint:
    file = GGUFFile(path)
    name = file.metadata.get("general.architecture")
    if name not in _GGUF_ARCHITECTURES:
        raise ConfigError(
            f"{path}: the GGUF architecture {name!r} is not supported; "
            f"known: {', '.join(sorted(_GGUF_ARCHITECTURES))}{nearest(str(name), _GGUF_ARCHITECTURES)}"
        )
    arch = Keys(f"{path}, {name}.*", _strip(file.metadata, f"{name}."))
    if arch.get("expert_count"):
        raise ConfigError(f"{path}: mixture-of-experts (expert_count) is not supported yet")
    tokenizer = Keys(f"{path}, tokenizer.ggml.*", _strip(file.metadata, "tokenizer.ggml."))
    ends = [i for kind in ("eos", "eot", "eom") for i in tokenizer.token_ids(f"{kind}_token_id")]
    bos_ids = tokenizer.token_ids("bos_token_id")
    facts = _gguf_facts(file, arch, _GGUF_ARCHITECTURES[name])
    return Checkpoint(
        path=path,
        format="gguf",
        facts=facts,
        dtype="float32",
        derived_max_len=_derived_max_len(facts.rope),
        bos_id=bos_ids[0] if bos_ids else None,
        eos_ids=tuple(dict.fromkeys(ends)),
    )


def _strip(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}


def _gguf_facts(file: GGUFFile, arch: Keys, architecture: str) -> ArchFacts:
    hidden, heads = arch.size("embedding_length"), arch.size("attention.head_count")
    kv_heads = arch.size("attention.head_count_kv", heads)
    if arch.get("attention.key_length") is None and hidden % heads:
        raise ConfigError(f"{arch.source}: embedding_length {hidden} is not divisible by {heads} heads")
    head_dim = arch.size("attention.key_length", hidden // heads)
    if arch.size("attention.value_length", head_dim) != head_dim:
        raise arch.wrong("attention.value_length", f"attention.key_length, {head_dim}")
    _check_heads(arch.source, heads, kv_heads)
    embedding = file.tensors.get("token_embd.weight")
    return ArchFacts(
        architecture=architecture,
        vocab=embedding.shape[0] if embedding and embedding.shape else arch.size("vocab_size"),
        hidden=hidden,
        intermediate=arch.size("feed_forward_length"),
        layers=arch.size("block_count"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=arch.number("attention.layer_norm_rms_epsilon"),
        rope=_gguf_rope(file, arch, head_dim),
        tied="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm=FAMILIES[architecture].qk_norm,
    )


def _gguf_rope(file: GGUFFile, arch: Keys, head_dim: int) -> RopeFacts:
    kind = arch.get("rope.scaling.type") or "none"
    if kind not in ("none", "linear", "yarn"):
        raise arch.wrong("rope.scaling.type", "none, linear or yarn (no other is supported)")
    factor = 1.0 if kind == "none" else arch.number("rope.scaling.factor")
    # Files from before rope.scaling.* have this key alone.
    if kind == "none" and arch.number("rope.scale_linear", 1.0) != 1.0:
        kind, factor = "linear", arch.number("rope.scale_linear")
    attention_factor = None
    if kind == "yarn" and arch.get("rope.scaling.attn_factor") is not None:
        attention_factor = arch.number("rope.scaling.attn_factor") * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    dim = arch.size("rope.dimension_count", head_dim)
    factors: tuple[float, ...] = ()
    if tensor := file.tensors.get("rope_freqs.weight"):
        if tensor.type != "F32" or tensor.shape != (dim // 2,):
            raise ConfigError(
                f"{file.path}: rope_freqs.weight is {tensor.type} {tensor.shape}, expected F32 ({dim // 2},)"
            )
        kind, factors = "factors", tuple(file.raw("rope_freqs.weight").view(np.float32).tolist())
    max_len = arch.size("context_length", _FALLBACK_MAX_LEN)
    facts = RopeFacts(
        theta=arch.number("rope.freq_base", 10000.0),
        dim=dim,
        max_len=max_len,
        kind="default" if kind == "none" else kind,
        factor=factor,
        original_max_len=arch.size("rope.scaling.original_context_length", max_len),
        attention_factor=attention_factor,
        factors=factors,
    )
    _check_rope(arch.source, facts, head_dim)
    return facts
