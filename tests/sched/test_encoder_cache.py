"""Tests of the encoder cache: every embedding exists when its token is computed, within the limits."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from symbolic import LAYOUTS, BreakableWorker, Engine, continuation, expand_media, widened

from quire.data.multimodal import Array, Media, MediaItem
from quire.data.request import Request
from quire.data.step_plan import StepPlan
from quire.sched.encoder_cache import EncoderCache

PIXELS = {"pixels": Array.of(np.zeros(1, np.float32))}
LONGEST = 3 * (6 + 9) + 10


@dataclass(frozen=True)
class Arrival:
    parts: tuple[tuple[int, int, int], ...]
    """Number of text tokens, the item that follows, and the item's number of tokens."""
    count: int
    pause: int
    family: int


PARTS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=3)
TRAFFIC = st.lists(
    st.builds(
        Arrival,
        parts=PARTS.map(tuple),
        count=st.integers(1, 9),
        pause=st.integers(0, 4),
        family=st.integers(0, 1),
    ),
    min_size=1,
    max_size=8,
)
LIMITS = st.fixed_dictionaries(
    {
        "layout": st.sampled_from(["full", *LAYOUTS]),
        "num_blocks": st.integers(17, 40),
        "max_num_seqs": st.integers(1, 5),
        "max_num_batched_tokens": st.integers(6, 40),
        "long_prefill_token_threshold": st.sampled_from([0, 3, 11]),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "chunked_prefill": st.sampled_from([True, True, False]),
        "share": st.booleans(),
        "reserve_full_prompt": st.booleans(),
        "fair": st.booleans(),
        "drafts": st.sampled_from([None, "host", "worker"]),
        "depth": st.sampled_from([1, 2, 3]),
        "lazy": st.booleans(),
        "num_stages": st.sampled_from([1, 1, 2]),
        "size": st.integers(1, 30),
        "whole": st.booleans(),
    }
).map(lambda limits: widened(limits, LONGEST))


class MediaEngine(Engine):
    """An engine that checks the encoder cache invariants in every plan."""

    def __init__(self, *, size: int, whole: bool, **limits: Any) -> None:
        super().__init__(media=EncoderCache(size=size, undivided_items=whole), **limits)
        self.kept: dict[bytes, int] = {}

    def check(self, plan: StepPlan) -> None:
        super().check(plan)
        media, running = self.scheduler.media, self.scheduler.running
        for key in plan.evicted_media:
            self.kept.pop(key, None)
        made = {item.key: item.num_vectors for item in plan.encodes}
        assert len(made) == len(plan.encodes) and not made.keys() & self.kept.keys(), "encoded twice"
        assert sum(made.values()) <= media.size or len(made) == 1, "more than the encoder budget of a step"
        self.kept |= made
        assert sum(self.kept.values()) <= media.size or len(self.kept) == 1, (
            "more than the encoder cache holds"
        )
        most = self.scheduler.limits.max_chunk
        for row in plan.rows.tolist():
            reach, items = int(running.num_computed[row]), items_of(running.request(row))
            if media.undivided_items:
                whole = running.request(row).media.num_bidirectional if items else 0
                assert not 0 < reach < whole or whole > most, "a chunk ends inside a bidirectional prompt"
                for item in items if not whole else ():
                    assert not item.offset < reach < item.end or item.length > most, (
                        "a chunk ends inside an item"
                    )


def items_of(request: Request) -> list[MediaItem]:
    return request.media.items if request.media else []


def prompt_of(arrival: Arrival) -> tuple[list[int], Media]:
    """Return a prompt whose long items consist of two runs with a text token between them."""
    tokens, items = list[int](), list[MediaItem]()
    for text, name, length in arrival.parts:
        tokens += [(arrival.family * 31 + 5 * i) % 97 for i in range(text)]
        runs = [(0, 2), (3, length - 3)] if length > 5 else []
        key = bytes([name, length])
        items.append(
            MediaItem(modality="image", key=key, offset=len(tokens), length=length, runs=runs, arrays=PIXELS)
        )
        tokens += [96] * length
    tokens.append(arrival.family)
    return tokens, Media(items)


def add(engine: Engine, number: int, arrival: Arrival) -> None:
    tokens, media = prompt_of(arrival)
    engine.add(str(number), tokens, arrival.count, media=media, tenant=arrival.family)


def check_answers(engine: Engine, traffic: list[Arrival], but: frozenset[str] = frozenset()) -> None:
    for number, arrival in enumerate(traffic):
        expected = continuation(expand_media(*prompt_of(arrival)), arrival.count)
        output = engine.outputs[str(number)]
        assert output == (expected[: len(output)] if str(number) in but else expected)
    engine.check_empty()


@settings(max_examples=25)
@given(TRAFFIC, LIMITS)
def test_every_request_gets_its_own_media_items(traffic: list[Arrival], limits: dict[str, Any]) -> None:
    engine = MediaEngine(**limits)
    for number, arrival in enumerate(traffic):
        add(engine, number, arrival)
        for _ in range(arrival.pause):
            engine.step() if engine.core.has_work else None
    while engine.core.has_work:
        num_plans, num_in_flight = len(engine.plans), len(engine.core.step_queue)
        engine.step()
        assert num_in_flight or len(engine.plans) > num_plans, "requests wait, and nothing can run"
    check_answers(engine, traffic)
    assert engine.scheduler.media.reset() and not engine.scheduler.media.num_kept


@settings(max_examples=20)
@given(TRAFFIC, LIMITS, st.data())
def test_aborts_resets_and_preemptions_keep_encoder_outputs(
    traffic: list[Arrival], limits: dict[str, Any], data: st.DataObject
) -> None:
    engine = MediaEngine(**limits)
    for number, arrival in enumerate(traffic):
        add(engine, number, arrival)
    aborted = set[str]()
    while engine.core.has_work:
        match data.draw(st.integers(0, 7)):
            case 0:
                victim = str(data.draw(st.integers(0, len(traffic) - 1)))
                aborted |= {victim} if engine.abort(victim) else set()
            case 1:
                engine.core.reset_prefix_cache()
                engine.scheduler.media.reset()
            case 2 if not engine.scheduler.in_flight:
                engine.scheduler.requeue_running()
        engine.step()
    check_answers(engine, traffic, frozenset(aborted))


@settings(max_examples=20)
@given(TRAFFIC, LIMITS, st.data())
def test_bidirectional_prompts_are_not_chunked_or_shared(
    traffic: list[Arrival], limits: dict[str, Any], data: st.DataObject
) -> None:
    """Check bidirectional prompts that share a prefix, and chunks that end after the last item."""
    limits |= {"whole": True, "long_prefill_token_threshold": 0, "max_num_batched_tokens": LONGEST}
    limits["size"] = LONGEST
    limits["num_blocks"] = max(limits["num_blocks"], 40)  # for a prompt that is computed in one step
    engine = MediaEngine(**limits)
    prompts = [prompt_of(arrival) for arrival in traffic]
    for number, ((tokens, media), arrival) in enumerate(zip(prompts, traffic, strict=True)):
        engine.add(str(number), tokens, arrival.count, media=media.joined(tokens), tenant=arrival.family)
    while engine.core.has_work:
        if not data.draw(st.integers(0, 5)) and not engine.scheduler.in_flight:
            engine.scheduler.requeue_running()
        engine.step()
        assert len(engine.steps) < 5000, "requests that never finish"
    for number, ((tokens, media), arrival) in enumerate(zip(prompts, traffic, strict=True)):
        expected = continuation(expand_media(tokens, media.joined(tokens)), arrival.count)
        assert engine.outputs[str(number)] == expected
    engine.check_empty()


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(TRAFFIC, LIMITS, st.data())
def test_encoder_cache_with_many_examples(
    traffic: list[Arrival], limits: dict[str, Any], data: st.DataObject
) -> None:
    """Run the tests above with many more examples."""
    test_every_request_gets_its_own_media_items.hypothesis.inner_test(traffic, limits)
    test_aborts_resets_and_preemptions_keep_encoder_outputs.hypothesis.inner_test(traffic, limits, data)
    test_bidirectional_prompts_are_not_chunked_or_shared.hypothesis.inner_test(traffic, limits, data)


class FailingEncoderWorker(BreakableWorker):
    """A worker that fails to encode any step with items of name 0."""

    def breaks(self, plan: StepPlan) -> bool:
        return any(item.key[0] == 0 for item in plan.encodes)


@settings(max_examples=20)
@given(TRAFFIC, LIMITS)
def test_only_requests_with_unreadable_items_fail(traffic: list[Arrival], limits: dict[str, Any]) -> None:
    """Check that steps after the failed one, which rely on its embeddings, are discarded."""
    limits |= {"share": False}
    engine = MediaEngine(**limits)
    engine.use(FailingEncoderWorker)
    for number, arrival in enumerate(traffic):
        add(engine, number, arrival)
    engine.run()
    bad = {str(n) for n, arrival_ in enumerate(traffic) if any(name == 0 for _, name, _ in arrival_.parts)}
    assert {id for id, reason in engine.reasons.items() if reason == "error"} == bad
    check_answers(engine, traffic, frozenset(bad))


class CrossAttentionEngine(MediaEngine):
    """An engine for cross-attention items without placeholder tokens: every computed row needs its item."""

    def check(self, plan: StepPlan) -> None:
        super().check(plan)
        for row in plan.rows.tolist():
            (item,) = items_of(self.scheduler.running.request(row))
            assert item.key in self.kept, "its item is not cached"
        assert len(plan.encodes) <= max(self.scheduler.media.max_encoded, 1)


def cross_attention_prompt(arrival: Arrival) -> tuple[list[int], Media]:
    """Return a prompt whose first token depends on the item in the symbolic model."""
    (text, name, _), *_ = arrival.parts
    item = MediaItem(
        modality="audio", key=bytes([name, 1, 2, 3]), offset=0, length=0, runs=[(0, 1)], arrays=PIXELS
    )
    return [(5 * i) % 97 for i in range(text + 1)], Media([item])


@settings(max_examples=25)
@given(TRAFFIC, LIMITS, st.integers(1, 3), st.data())
def test_cross_attention_items_stay_while_their_rows_run(
    traffic: list[Arrival], limits: dict[str, Any], max_encoded: int, data: st.DataObject
) -> None:
    """Check preemption after some tokens, prefixes shared under different items, and more items than rows."""
    engine = CrossAttentionEngine(**limits | {"whole": False, "size": limits["max_num_seqs"]})
    engine.scheduler.media.max_encoded = max_encoded
    aborted = set[str]()
    for number, arrival in enumerate(traffic):
        tokens, media = cross_attention_prompt(arrival)
        engine.add(str(number), tokens, arrival.count, media=media, tenant=arrival.family)
        assert media.routing_ids(tokens)[1:] == tokens
    while engine.core.has_work:
        match data.draw(st.integers(0, 7)):
            case 0:
                victim = str(data.draw(st.integers(0, len(traffic) - 1)))
                aborted |= {victim} if engine.abort(victim) else set()
            case 1 if not engine.scheduler.in_flight:
                engine.scheduler.requeue_running()
        engine.step()
    for number, arrival in enumerate(traffic):
        expected, output = (
            continuation(expand_media(*cross_attention_prompt(arrival)), arrival.count),
            engine.outputs[str(number)],
        )
        assert output == (expected[: len(output)] if str(number) in aborted else expected)
    engine.check_empty()
    assert engine.scheduler.media.reset()
