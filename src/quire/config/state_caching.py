"""Models with SSM states: the settings of prefix caching, and the default number of running requests."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.layout import DTYPE_BYTES, CacheSpec, has_ssm_state, row_bytes
from quire.config.machine import Machine
from quire.config.sections import CacheSection
from quire.errors import ConfigError
from quire.logs import get_logger, warn_once

logger = get_logger(__name__)

_NAMES = ("mamba_cache_mode", "mamba_block_size", "prefix_cache_retention_interval")
_BLOCK_SIZES = {"align": 64, "all": 512}
"""Default of mamba_block_size in tokens, by mamba_cache_mode. Multiples of 64 never split a chunk of the scan
kernels, and prompts with fewer tokens need no additional step."""

_MAX_OWN_CACHES = 16
"""Default of max_num_seqs with transformers' own cache, which computes one sequence at a time."""


def resolve_state_caching(
    args: Mapping[str, Any], specs: Sequence[CacheSpec | None], block_size: int, off_reason: str = ""
) -> dict[str, Any]:
    """Return the cache settings, with those for kept SSM states (checkpoints) resolved. `specs` are the
    caches of the model's layers; `off_reason` names a setting that excludes checkpoints, and is empty without
    one."""
    if not has_ssm_state(specs):
        return _without_states(args, specs)
    is_hybrid = any(spec is not None and spec.is_paged for spec in specs)
    is_on = args.get("enable_prefix_caching", is_hybrid)
    if is_on and off_reason:
        warn_once(logger, f"Prefix caching is off: SSM states are kept only at ends of steps, {off_reason}")
        is_on = False
    if not is_on:
        if "mamba_block_size" in args and not off_reason:
            raise ConfigError("--mamba-block-size can only be set with --enable-prefix-caching")
        if args.get("mamba_cache_mode", "none") != "none":
            warn_once(logger, "mamba_cache_mode has no effect without prefix caching and is 'none'")
        rest = {name: value for name, value in args.items() if name not in _NAMES}
        return {**rest, "enable_prefix_caching": False}
    mode = args.get("mamba_cache_mode", "none")
    mode = "align" if mode == "none" else mode
    unit = args.get("mamba_block_size", max(_BLOCK_SIZES[mode], block_size))
    if unit % block_size:
        raise ConfigError(
            f"mamba_block_size={unit} must be a multiple of block_size ({block_size}): use"
            f" {-(-unit // block_size) * block_size}"
        )
    interval = unit if mode == "all" else args.get("prefix_cache_retention_interval")
    if interval and interval % unit:
        raise ConfigError(
            f"prefix_cache_retention_interval={interval} must be a multiple of mamba_block_size ({unit}): use"
            f" {-(-interval // unit) * unit}"
        )
    return {**args, "enable_prefix_caching": True, **dict(zip(_NAMES, (mode, unit, interval), strict=True))}


def resolve_own_cache(values: dict[str, Any], facts: ArchFacts) -> dict[str, Any]:
    """Adjust the settings of a model that uses transformers' own cache: prefix caching is off, and few
    requests run at once, since their caches are outside the planned memory."""
    if facts.borrowed is None or not facts.borrowed.own_cache:
        return values
    if values.get("speculative_config"):
        raise ConfigError(
            "speculative_config is not supported with transformers' own cache, which cannot drop rejected"
            " drafts: leave it out"
        )
    if values.get("enable_prefix_caching"):
        warn_once(logger, "Prefix caching is off: this model uses the cache of transformers, without blocks")
    return {"max_num_seqs": _MAX_OWN_CACHES, **values, "enable_prefix_caching": False}


def _without_states(args: Mapping[str, Any], specs: Sequence[CacheSpec | None]) -> dict[str, Any]:
    """Return the settings of a model without SSM states."""
    interval = args.get("prefix_cache_retention_interval")
    if interval and not any(spec is not None and spec.window for spec in specs):
        raise ConfigError(
            f"prefix_cache_retention_interval={interval} is for models with SSM states or sliding windows,"
            " and this model has neither: leave it out"
        )
    for name in (name for name in _NAMES if args.get(name, "none") not in ("none", 0)):
        warn_once(logger, f"{name} has no effect: this model has no SSM states")
    return {name: value for name, value in args.items() if name not in _NAMES}


def limit_seqs_for_states(
    values: dict[str, Any],
    specs: Sequence[CacheSpec | None],
    cache: CacheSection,
    machine: Machine,
    *,
    default: int,
    num_states: int,
) -> dict[str, Any]:
    """Limit the default max_num_seqs of a model with SSM states, so that the states (`num_states` per
    request) leave most memory to weights and KV cache. `specs` are the caches of the layers on one device.
    Raise if the states of max_num_seqs requests exceed the memory."""
    per_row = row_bytes(specs, DTYPE_BYTES[cache.kv_cache_dtype], num_states)
    if not per_row:
        return values
    times = f", {num_states} times for num_speculative_tokens={num_states - 1}" if num_states > 1 else ""
    size = row_bytes(specs, DTYPE_BYTES[cache.kv_cache_dtype]) / 2**20
    states = f"each running request has an SSM state of {size:.1f} MiB{times}"
    if (num_seqs := values.get("max_num_seqs")) is not None:
        if num_seqs * per_row <= machine.total_bytes:
            return values
        fewer = " or num_speculative_tokens" if num_states > 1 else ""
        raise ConfigError(
            f"max_num_seqs={num_seqs} exceeds the memory of {machine.total_bytes / 2**30:.1f} GiB: {states}."
            f" Lower max_num_seqs (to at most {machine.total_bytes // per_row}){fewer}"
        )
    room = cache.kv_cache_memory_bytes or cache.kv_cache_memory_limit
    room = room // 2 if room else int(machine.total_bytes * cache.gpu_memory_utilization) // 4
    max_seqs = max(room // per_row, 1)
    if max_seqs >= default:
        return values
    logger.info("max_num_seqs is %d instead of %d: %s", max_seqs, default, states)
    return values | {"max_num_seqs": max_seqs}
