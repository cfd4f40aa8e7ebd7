"""Speculative decoding and prefix caching during a run, from the server's counters before and after it."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

_SAMPLE = re.compile(
    r"^vllm:(spec_decode_num_\w+?|prefix_cache_(?:hits|queries)(?=_total))(?:_total)?"
    r"(?:\{([^}]*)\})? ([-+.\deE]+)",
    re.MULTILINE,
)
_POSITION = re.compile(r'position="(\d+)"')
_MISS = re.compile(r'^vllm:prefix_cache_misses_total\{[^}]*reason="(\w+)"[^}]*\} ([-+.\deE]+)', re.MULTILINE)


def read_counters(metrics: str) -> dict[str, float]:
    """Return the counters of a metrics page by name, summed over engines. Counters by draft position are
    named `spec_decode_num_accepted_tokens_per_pos.0` and so on."""
    counters: dict[str, float] = {}
    for name, labels, value in _SAMPLE.findall(metrics):
        position = _POSITION.search(labels)
        key = f"{name}.{position[1]}" if position else name
        counters[key] = counters.get(key, 0.0) + float(value)
    return counters


def counter_summary(before: str, after: str) -> dict[str, Any]:
    """Return the results on speculative decoding and prefix caching by name, from the difference of two
    metrics pages (texts of /metrics). Unused features have no results."""
    first = read_counters(before)
    increase = {name: value - first.get(name, 0.0) for name, value in read_counters(after).items()}
    return _draft_summary(increase) | _prefix_summary(increase) | _miss_summary(before, after)


def _draft_summary(increase: Mapping[str, float]) -> dict[str, Any]:
    drafts = increase.get("spec_decode_num_drafts", 0.0)
    tokens = increase.get("spec_decode_num_draft_tokens", 0.0)
    if drafts <= 0 or tokens <= 0:
        return {}
    accepted = increase.get("spec_decode_num_accepted_tokens", 0.0)
    prefix = "spec_decode_num_accepted_tokens_per_pos."
    positions = sorted(int(name.removeprefix(prefix)) for name in increase if name.startswith(prefix))
    return {
        "spec_decode_acceptance_rate": accepted / tokens * 100,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": int(drafts),
        "spec_decode_draft_tokens": int(tokens),
        "spec_decode_accepted_tokens": int(accepted),
        "spec_decode_per_position_acceptance_rates": [increase[f"{prefix}{i}"] / drafts for i in positions],
    }


def _miss_summary(before: str, after: str) -> dict[str, Any]:
    """Return the number of requests with a prefix cache miss, by reason, as a result entry; empty for
    none."""
    counts: Counter[str] = Counter()
    for page, sign in ((after, 1), (before, -1)):
        for reason, value in _MISS.findall(page):
            counts[reason] += sign * int(float(value))
    reasons = {reason: count for reason, count in counts.most_common() if count > 0}
    return {"prefix_cache_misses": reasons} if reasons else {}


def _prefix_summary(increase: Mapping[str, float]) -> dict[str, Any]:
    """Return the percentage and number of prompt tokens found in the prefix cache; empty if it was unused."""
    hits, queries = (increase.get(f"prefix_cache_{name}", 0.0) for name in ("hits", "queries"))
    if queries <= 0:
        return {}
    return {"prefix_cache_hit_rate": hits / queries * 100, "prefix_cache_hit_tokens": int(hits)}
