"""Tests of the counters of speculative decoding and of the prefix cache, read before and after."""

from quire.bench.counters import counter_summary, read_counters


def page(drafts: int, tokens: int, accepted: tuple[int, int]) -> str:
    labels = 'engine="0",model_name="m"'
    return "\n".join(
        [
            "# HELP vllm:spec_decode_num_drafts_total Drafts.",
            f"vllm:spec_decode_num_drafts_total{{{labels}}} {drafts}.0",
            f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {tokens}.0",
            f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {sum(accepted)}.0",
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="0"}} {accepted[0]}.0',
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="1"}} {accepted[1]}.0',
            f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.7e9",
            "vllm:num_requests_running 3.0",
        ]
    )


def test_only_the_runs_increments_count() -> None:
    assert counter_summary(page(10, 20, (5, 5)), page(20, 40, (13, 7))) == {
        "spec_decode_acceptance_rate": 50.0,
        "spec_decode_acceptance_length": 2.0,
        "spec_decode_num_drafts": 10,
        "spec_decode_draft_tokens": 20,
        "spec_decode_accepted_tokens": 10,
        "spec_decode_per_position_acceptance_rates": [0.8, 0.2],
    }


def test_engines_are_summed() -> None:
    both = page(1, 2, (1, 0)) + "\n" + page(2, 4, (1, 1)).replace('engine="0"', 'engine="1"')
    counters = read_counters(both)
    assert counters["spec_decode_num_drafts"] == 3
    assert counters["spec_decode_num_accepted_tokens_per_pos.0"] == 2


def test_no_entries_without_drafts() -> None:
    same = page(3, 6, (1, 1))
    assert counter_summary(same, same) == counter_summary("", "up 1") == {}


def prefix_page(*engines: tuple[int, int]) -> str:
    return "\n".join(
        f'vllm:prefix_cache_{name}_total{{model_name="m",engine="{engine}"}} {value}.0'
        for engine, counts in enumerate(engines)
        for name, value in zip(("queries", "hits"), counts, strict=True)
    )


def test_prefix_lookups_of_all_engines_are_summed() -> None:
    summary = counter_summary(prefix_page((100, 50), (10, 0)), prefix_page((200, 75), (110, 25)))
    assert summary == {"prefix_cache_hit_rate": 25.0, "prefix_cache_hit_tokens": 50}


def test_no_entries_without_lookups() -> None:
    assert counter_summary(prefix_page((5, 1)), prefix_page((5, 1))) == {}
