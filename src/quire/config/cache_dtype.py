"""resolve_cache_dtype: the KV cache dtype that `--kv-cache-dtype` selects for a model."""

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.layout import INT8_CACHE, SCALE_BYTES, cache_specs
from quire.checkpoint.model import Checkpoint
from quire.config.machine import Machine
from quire.errors import ConfigError
from quire.logs import get_logger, warn_once

logger = get_logger(__name__)

_FP8_CACHE = "fp8_per_token_head"
_SHORT_NAMES = {"fp8": "fp8_e4m3", "int8": INT8_CACHE, _FP8_CACHE: INT8_CACHE}


def resolve_cache_dtype(requested: str, dtype: str, machine: Machine, checkpoint: Checkpoint) -> str:
    """Return the KV cache dtype for `requested`, a --kv-cache-dtype; `dtype` is the dtype of the model."""
    resolved = _SHORT_NAMES.get(requested, requested)
    known = ("auto", dtype, "fp8", "fp8_e4m3", "fp8_e5m2", "int8", INT8_CACHE)
    auto = (checkpoint.quant and checkpoint.quant.cache) or dtype
    if resolved not in known:
        raise ConfigError(
            f"kv_cache_dtype={requested!r} is not supported on this {machine.device}; "
            f"known: {', '.join(known)} ('auto' is {auto!r} here)"
        )
    if requested == _FP8_CACHE:
        warn_once(logger, f"kv_cache_dtype={requested!r} is read as {INT8_CACHE!r}, which is more precise")
    if resolved == INT8_CACHE:
        _check_heads(requested, checkpoint.facts)
    return auto if resolved == "auto" else resolved


def _check_heads(requested: str, facts: ArchFacts) -> None:
    """Raise if the KV cache of a model cannot have a scale per token and head."""
    kinds = {spec.kind for spec in cache_specs(facts) if spec is not None}
    head_dims = {facts.of_layer(layer).head_dim for layer in facts.layers}
    reason = None
    if "latent" in kinds:
        reason = "MLA, which caches latents without heads"
    elif "cross_attention" in kinds:
        reason = "cross-attention states, which are written whole"
    elif any(head_dim % SCALE_BYTES for head_dim in head_dims):
        reason = f"a head size that is not a multiple of {SCALE_BYTES}"
    if reason is not None:
        raise ConfigError(
            f"kv_cache_dtype={requested!r} has a scale for each token and head, but {facts.architecture} has "
            f"{reason}; use auto or fp8"
        )
