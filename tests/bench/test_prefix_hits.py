"""Tests of prefix cache counters, read before and after."""

from quire.bench.prefix_hits import prefix_summary


def page(*engines: tuple[int, int]) -> str:
    return "\n".join(
        f'vllm:prefix_cache_{name}_total{{model_name="m",engine="{engine}"}} {value}.0'
        for engine, counts in enumerate(engines)
        for name, value in zip(("queries", "hits"), counts, strict=True)
    )


def test_engines_are_summed_and_only_the_run_counts() -> None:
    actual = prefix_summary(page((100, 50), (10, 0)), page((200, 75), (110, 25)))
    assert actual == {"prefix_cache_hit_rate": 25.0, "prefix_cache_hit_tokens": 50}


def test_no_entry_without_queries() -> None:
    assert prefix_summary("", "") == prefix_summary(page((5, 1)), page((5, 1))) == {}
