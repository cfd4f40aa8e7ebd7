"""Prefix caching during a run, out of the server's counters before and after it."""

import re
from typing import Any

_SAMPLE = re.compile(r"^vllm:prefix_cache_(hits|queries)_total(?:\{[^}]*\})? ([-+.\deE]+)", re.MULTILINE)


def prefix_summary(before: str, after: str) -> dict[str, Any]:
    """What part of the prompts' tokens the server had cached, over all its engines, out of its metrics pages;
    nothing where none was looked up."""
    rise = {"hits": 0.0, "queries": 0.0}
    for sign, page in ((-1, before), (1, after)):
        for name, value in _SAMPLE.findall(page):
            rise[name] += sign * float(value)
    if rise["queries"] <= 0:
        return {}
    return {
        "prefix_cache_hit_rate": rise["hits"] / rise["queries"] * 100,
        "prefix_cache_hit_tokens": int(rise["hits"]),
    }
