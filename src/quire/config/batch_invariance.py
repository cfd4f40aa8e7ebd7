"""Resolves `batch_invariant` (equal results in any batch), and checks that the model supports it on a GPU."""

from collections.abc import Mapping
from typing import Any

from quire.checkpoint.facts import ArchFacts
from quire.config.attention_backends import check_backend
from quire.config.env import Env
from quire.config.machine import Machine
from quire.errors import ConfigError


def resolve_batch_invariant(
    facts: ArchFacts, machine: Machine, values: Mapping[str, Any], env: Env, *, pools: bool
) -> bool:
    """Return whether batch-invariant mode is on. Raise a `ConfigError` if the model or a setting does not
    support it on a GPU; nothing is checked on a CPU. `values` are the user's settings; `pools` is True for a
    pooling model."""
    is_on: bool = values.get("batch_invariant", env.batch_invariant)
    if not is_on or machine.device != "cuda":
        return is_on
    backend = check_backend(values.get("attention_backend") or env.attention_backend or "AUTO")
    if backend not in ("AUTO", "TRITON_ATTN"):
        raise ConfigError(
            f"batch_invariant needs the attention backend TRITON_ATTN, not {backend}: leave attention_backend"
            " out"
        )
    for reason, applies in _reasons(facts, values, pools=pools).items():
        if applies:
            raise ConfigError(
                f"batch_invariant is not supported on a GPU for {facts.architecture} with {reason}; leave it"
                " out, and unset QUIRE_BATCH_INVARIANT and VLLM_BATCH_INVARIANT"
            )
    return is_on


def _reasons(facts: ArchFacts, values: Mapping[str, Any], *, pools: bool) -> dict[str, bool]:
    """Return the features without batch-invariant kernels, each with whether the model or its settings use
    it."""
    return {
        "enable_eplb, which moves experts between devices": values.get("enable_eplb", False),
        "alternating updates (AltUp)": facts.altup is not None,
        "the code of transformers, which selects its own kernels": facts.borrowed is not None,
        "pooling": pools,
        "a media encoder, which encodes items of several requests at once (language_model_only loads none)": (
            facts.media is not None
        ),
    }
