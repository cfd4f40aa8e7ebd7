"""Speculative decoding during a run, from the server's counters before and after it."""

import re
from collections.abc import Mapping
from typing import Any

_SAMPLE = re.compile(r"^vllm:spec_decode_(num_\w+?)(?:_total)?(?:\{([^}]*)\})? ([-+.\deE]+)", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')


def draft_counters(metrics: str) -> dict[str, float]:
    """Read the counters of speculative decoding from a metrics page, summed over engines. Counters by
    position are named `num_accepted_tokens_per_pos.0` and so on."""
    counters: dict[str, float] = {}
    for name, labels, value in _SAMPLE.findall(metrics):
        position = _POSITION.search(labels)
        key = f"{name}.{position[1]}" if position else name
        counters[key] = counters.get(key, 0.0) + float(value)
    return counters


def draft_summary(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    """Return the `spec_decode_*` entries of a result; none if nothing was drafted."""
    increase = {name: value - before.get(name, 0.0) for name, value in after.items()}
    drafts, tokens = increase.get("num_drafts", 0.0), increase.get("num_draft_tokens", 0.0)
    if drafts <= 0 or tokens <= 0:
        return {}
    accepted = increase.get("num_accepted_tokens", 0.0)
    prefix = "num_accepted_tokens_per_pos."
    positions = sorted(int(name.removeprefix(prefix)) for name in increase if name.startswith(prefix))
    return {
        "spec_decode_acceptance_rate": accepted / tokens * 100,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": int(drafts),
        "spec_decode_draft_tokens": int(tokens),
        "spec_decode_accepted_tokens": int(accepted),
        "spec_decode_per_position_acceptance_rates": [increase[f"{prefix}{i}"] / drafts for i in positions],
    }
