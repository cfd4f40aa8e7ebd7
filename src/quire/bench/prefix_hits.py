"""Prefix caching during a run, from the server's counters before and after it."""

import re
from typing import Any

_SAMPLE = re.compile(r"^vllm:prefix_cache_(hits|queries)_total(?:\{[^}]*\})? ([-+.\deE]+)", re.MULTILINE)


def prefix_summary(before: str, after: str) -> dict[str, Any]:
    """Return the share of prompt tokens found in the prefix cache, over all engines, from two metrics pages;
    empty if none was looked up."""
    increase = {"hits": 0.0, "queries": 0.0}
    for sign, page in ((-1, before), (1, after)):
        for name, value in _SAMPLE.findall(page):
            increase[name] += sign * float(value)
    if increase["queries"] <= 0:
        return {}
    return {
        "prefix_cache_hit_rate": increase["hits"] / increase["queries"] * 100,
        "prefix_cache_hit_tokens": int(increase["hits"]),
    }
