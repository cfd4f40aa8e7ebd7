"""Speculative decoding in numbers, under vLLM's names."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.core import Metric as PromMetric

from quire.data.stats import StepStats

COUNTERS = {
    "spec_decode_num_drafts": "Drafts made, of one token or several.",
    "spec_decode_num_draft_tokens": "Tokens in them.",
    "spec_decode_num_accepted_tokens": "Tokens in them that held.",
}
_BY_PLACE = "spec_decode_num_accepted_tokens_per_pos"


def names_of(most: int) -> list[str]:
    """The series, where a draft has up to `most` tokens; none where there are no drafts."""
    return [*COUNTERS, *(f"{_BY_PLACE}:{place}" for place in range(most))] if most else []


def additions(step: StepStats) -> dict[str, int]:
    """What a step adds to them."""
    held = step.held_by_place
    sums = (step.num_drafts, step.num_draft_tokens, sum(held))
    by_place = {f"{_BY_PLACE}:{place}": count for place, count in enumerate(held)}
    return dict(zip(COUNTERS, sums, strict=True)) | by_place


def families(
    most: int, labels: list[str], engines: list[tuple[int, list[str]]], value: Callable[[str, int], float]
) -> Iterator[PromMetric]:
    """Of these engines, each with its labels."""
    if not most:
        return
    for name, text in COUNTERS.items():
        counter = CounterMetricFamily(f"vllm:{name}", text, labels=labels)
        for engine, its in engines:
            counter.add_metric(its, value(name, engine))
        yield counter
    by_place = CounterMetricFamily(
        f"vllm:{_BY_PLACE}", "Tokens that held, by their place in the draft.", labels=[*labels, "position"]
    )
    for engine, its in engines:
        for place in range(most):
            by_place.add_metric([*its, str(place)], value(f"{_BY_PLACE}:{place}", engine))
    yield by_place
