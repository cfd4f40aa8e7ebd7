"""Counters of the prefix cache, read before and after."""

from quire.bench.prefix_hits import prefix_summary


def page(*engines: tuple[int, int]) -> str:
    return "\n".join(
        f'vllm:prefix_cache_{name}_total{{model_name="m",engine="{engine}"}} {value}.0'
        for engine, counts in enumerate(engines)
        for name, value in zip(("queries", "hits"), counts, strict=True)
    )


def test_engines_are_added_up_and_only_the_run_counts() -> None:
    found = prefix_summary(page((100, 50), (10, 0)), page((200, 75), (110, 25)))
    assert found == {"prefix_cache_hit_rate": 25.0, "prefix_cache_hit_tokens": 50}


def test_nothing_looked_up_nothing_said() -> None:
    assert prefix_summary("", "") == prefix_summary(page((5, 1)), page((5, 1))) == {}
