"""Tests of speculative decoding counters, read before and after."""

from quire.bench.drafts import draft_counters, draft_summary


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
    before, after = draft_counters(page(10, 20, (5, 5))), draft_counters(page(20, 40, (13, 7)))
    assert draft_summary(before, after) == {
        "spec_decode_acceptance_rate": 50.0,
        "spec_decode_acceptance_length": 2.0,
        "spec_decode_num_drafts": 10,
        "spec_decode_draft_tokens": 20,
        "spec_decode_accepted_tokens": 10,
        "spec_decode_per_position_acceptance_rates": [0.8, 0.2],
    }


def test_engines_are_summed() -> None:
    both = page(1, 2, (1, 0)) + "\n" + page(2, 4, (1, 1)).replace('engine="0"', 'engine="1"')
    actual = draft_counters(both)
    assert actual["num_drafts"] == 3 and actual["num_accepted_tokens_per_pos.0"] == 2


def test_no_entries_without_drafts() -> None:
    same = draft_counters(page(3, 6, (1, 1)))
    assert draft_summary(same, same) == {} and draft_summary({}, draft_counters("up 1")) == {}
