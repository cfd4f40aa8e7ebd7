"""Whether a model and its settings can return the experts that tokens were routed to."""

from collections.abc import Mapping
from typing import Any

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.layout import cache_specs, layout
from quire.config.sections import CacheSection, ParallelSection
from quire.errors import ConfigError


def check_routed_experts(
    values: Mapping[str, Any],
    facts: ArchFacts,
    parallel: ParallelSection,
    cache: CacheSection,
    max_model_len: int,
    *,
    pools: bool,
) -> None:
    """Raise if `enable_return_routed_experts` is set, and the model or a setting does not support it."""
    if not values.get("enable_return_routed_experts"):
        return
    specs = cache_specs(facts)
    is_paged = any(spec is not None and spec.is_paged for spec in specs)
    reasons = {
        "a pooling model returns no tokens": pools,
        "a model that runs through transformers does not report its experts": facts.borrowed is not None,
        f"{facts.architecture} has no mixture of experts": not any(layer.moe for layer in facts.layers),
        f"it needs pipeline_parallel_size=1, got {parallel.pipeline_parallel_size}": (
            parallel.pipeline_parallel_size > 1
        ),
        "lower tiers of the KV cache and kv_transfer_config move cached prompts without their experts: leave"
        " them out": cache.has_tiers,
        "it needs a layer with full attention: the experts of tokens are kept with its KV blocks": (
            not is_paged or None not in layout(specs, max_model_len).windows
        ),
    }
    for reason in (reason for reason, applies in reasons.items() if applies):
        raise ConfigError(f"enable_return_routed_experts is not supported here: {reason}")
