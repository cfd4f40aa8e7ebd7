"""Metrics of speculative decoding with vLLM's names."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.core import Metric as PromMetric

from quire.data.stats import StepStats

COUNTERS = {
    "spec_decode_num_drafts": "Drafts of one or more tokens.",
    "spec_decode_num_draft_tokens": "Draft tokens.",
    "spec_decode_num_accepted_tokens": "Accepted draft tokens.",
}
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"


def names_of(most: int) -> list[str]:
    """Return the names of the series for drafts of up to `most` tokens; none without speculation."""
    return [*COUNTERS, *(f"{_PER_POSITION}:{place}" for place in range(most))] if most else []


def additions(step: StepStats) -> dict[str, int]:
    """Return the increments of a step."""
    accepted = step.held_by_place
    sums = (step.num_drafts, step.num_draft_tokens, sum(accepted))
    by_place = {f"{_PER_POSITION}:{place}": count for place, count in enumerate(accepted)}
    return dict(zip(COUNTERS, sums, strict=True)) | by_place


def families(
    most: int, labels: list[str], engines: list[tuple[int, list[str]]], value: Callable[[str, int], float]
) -> Iterator[PromMetric]:
    """Yield the metrics of these engines, each with its labels."""
    if not most:
        return
    for name, text in COUNTERS.items():
        counter = CounterMetricFamily(f"vllm:{name}", text, labels=labels)
        for engine, engine_labels in engines:
            counter.add_metric(engine_labels, value(name, engine))
        yield counter
    by_place = CounterMetricFamily(
        f"vllm:{_PER_POSITION}",
        "Accepted tokens by their position in the draft.",
        labels=[*labels, "position"],
    )
    for engine, engine_labels in engines:
        for place in range(most):
            by_place.add_metric([*engine_labels, str(place)], value(f"{_PER_POSITION}:{place}", engine))
    yield by_place
