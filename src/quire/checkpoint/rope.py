"""Reading the rotary embedding of config.json and GGUF headers."""

import math
from typing import Any

import numpy as np

from quire.checkpoint.facts import RopeFacts
from quire.checkpoint.gguf import GGUFFile
from quire.checkpoint.reader import ConfigReader
from quire.errors import ConfigError
from quire.logs import get_logger, warn_once

logger = get_logger(__name__)

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
"""The rope types that a config.json may name."""
FALLBACK_MAX_LEN = 2048
# Keys of the maximum sequence length in config.json; FALLBACK_MAX_LEN is assumed if none is set.
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


def read_rope(keys: ConfigReader, head_dim: int, *, pairs: bool = False) -> RopeFacts:
    """Read the rotary embedding of a config.json from `rope_parameters`, or from the older keys `rope_theta`
    and `rope_scaling`."""
    params: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        block = keys.get(name) or {}
        if not isinstance(block, dict) or any(isinstance(value, dict) for value in block.values()):
            raise keys.wrong(name, "one flat object for all layers")
        params |= {key: value for key, value in block.items() if value is not None}
    kind = params.get("rope_type", params.get("type", "default"))
    kind = "default" if kind == "mrope" else kind
    if kind not in ROPE_KINDS:
        raise ConfigError(
            f"{keys.source}: the rope type {kind!r} is not supported; known: {', '.join(ROPE_KINDS)}"
        )
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if keys.get(name) is not None:
            params.setdefault(name, keys.get(name))
    rope = ConfigReader(f"{keys.source}, rope_parameters", params)
    max_len = max_len_of(keys)
    original = rope.size("original_max_position_embeddings", max_len)
    factor = 1.0
    if kind == "longrope":
        factor = rope.number("factor", max(max_len / original, 1.0))
    elif kind == "yarn" and "original_max_position_embeddings" in params:
        factor = rope.number("factor", max_len / original)
    elif kind == "proportional":
        return _proportional(rope, head_dim, max_len)
    elif kind != "default":
        factor = rope.number("factor")
    dim = int(head_dim * rope.number("partial_rotary_factor", 1.0))
    facts = RopeFacts(
        theta=rope.number("rope_theta", 10000.0),
        dim=dim,
        max_len=max_len,
        kind=kind,
        pairs=pairs,
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
        factors=_factors(rope, "short_factor", dim) if kind == "longrope" else (),
        long_factors=_factors(rope, "long_factor", dim) if kind == "longrope" else (),
        sections=_sections(rope, dim),
        interleaved=rope.flag("mrope_interleaved", rope.flag("interleaved", False)),
    )
    _check_rope(rope.source, facts, head_dim)
    return facts


def _proportional(rope: ConfigReader, head_dim: int, max_len: int) -> RopeFacts:
    """Read proportional rope: only the first frequencies of the head rotate."""
    num_rotated = int(rope.number("partial_rotary_factor", 1.0) * head_dim // 2)
    factors = (rope.number("factor", 1.0),) * num_rotated + (math.inf,) * (head_dim // 2 - num_rotated)
    theta = rope.number("rope_theta", 10000.0)
    facts = RopeFacts(theta=theta, dim=head_dim, max_len=max_len, kind="factors", factors=factors)
    _check_rope(rope.source, facts, head_dim)
    return facts


def read_gguf_rope(file: GGUFFile, arch: ConfigReader, head_dim: int, *, pairs: bool = False) -> RopeFacts:
    kind = str("none" if arch.get("rope.scaling.type") is None else arch.get("rope.scaling.type"))
    if kind == "longrope" and "rope_factors_long.weight" in file.tensors:
        kind = "none"  # the tensors contain all factors
    if kind not in ("none", "linear", "yarn"):
        raise arch.wrong("rope.scaling.type", "none, linear or yarn (no other is supported)")
    factor = 1.0 if kind == "none" else arch.number("rope.scaling.factor")
    # Files older than rope.scaling.* have only this key.
    if kind == "none" and arch.number("rope.scale_linear", 1.0) != 1.0:
        kind, factor = "linear", arch.number("rope.scale_linear")
    attention_factor = None
    if kind == "yarn" and arch.get("rope.scaling.attn_factor") is not None:
        attention_factor = arch.number("rope.scaling.attn_factor") * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    dim = arch.size("rope.dimension_count", head_dim)
    factors = _gguf_factors(file, "rope_freqs", dim)
    long_factors = _gguf_factors(file, "rope_factors_long", dim)
    if factors:
        kind = "factors"
    elif long_factors:
        kind, factors = "longrope", _gguf_factors(file, "rope_factors_short", dim) or long_factors
        attention_factor = arch.number("rope.scaling.attn_factor", 1.0)
    max_len = arch.size("context_length", FALLBACK_MAX_LEN)
    facts = RopeFacts(
        theta=arch.number("rope.freq_base", 10000.0),
        dim=dim,
        max_len=max_len,
        kind="default" if kind == "none" else kind,
        pairs=pairs,
        factor=factor,
        original_max_len=arch.size("rope.scaling.original_context_length", max_len),
        beta_fast=arch.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=arch.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=attention_factor,
        factors=factors,
        long_factors=long_factors,
    )
    _check_rope(arch.source, facts, head_dim)
    return facts


def _gguf_factors(file: GGUFFile, name: str, dim: int) -> tuple[float, ...]:
    """Return the values of the tensor `name`, one for each of the dim / 2 frequencies; empty if the file does
    not have the tensor."""
    tensor = file.tensors.get(f"{name}.weight")
    if tensor is None:
        return ()
    if tensor.type != "F32" or tensor.shape != (dim // 2,):
        raise ConfigError(
            f"{file.path}: {name}.weight is {tensor.type} {tensor.shape}, expected F32 ({dim // 2},)"
        )
    return tuple(file.raw(tensor.name).view(np.float32).tolist())


def longest(rope: RopeFacts) -> int:
    """Return the maximum sequence length in tokens that this rotary embedding allows. Scaling of the kinds
    linear, dynamic and yarn extends it; for other kinds max_position_embeddings includes the scaling."""
    if rope.kind in ("linear", "dynamic"):
        return int(rope.max_len * rope.factor)
    return int(rope.original_max_len * rope.factor) if rope.kind == "yarn" else rope.max_len


def _factors(rope: ConfigReader, key: str, dim: int) -> tuple[float, ...]:
    factors = rope.get(key)
    if not isinstance(factors, list) or len(factors) != dim // 2:
        raise rope.wrong(key, f"{dim // 2} numbers")
    return tuple(map(float, factors))


def _sections(rope: ConfigReader, dim: int) -> tuple[int, ...]:
    """Return the M-RoPE sections of time, height and width."""
    sections = rope.get("mrope_section")
    if sections is None:
        return ()
    fits = isinstance(sections, list) and len(sections) == 3 and all(type(size) is int for size in sections)
    if not fits or min(sections) < 0 or sum(sections) != dim // 2:
        raise rope.wrong("mrope_section", f"three sizes, {dim // 2} in all")
    return tuple(sections)


def max_len_of(keys: ConfigReader) -> int:
    """Return the maximum sequence length in config.json in tokens, without rope scaling; FALLBACK_MAX_LEN if
    there is none."""
    lengths = [keys.size(key) for key in _MAX_LEN_KEYS if keys.get(key) is not None]
    if not lengths:
        warn_once(
            logger,
            f"{keys.source} names no maximum length ({', '.join(_MAX_LEN_KEYS)}); "
            f"assuming {FALLBACK_MAX_LEN}",
        )
    return min(lengths, default=FALLBACK_MAX_LEN)


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
