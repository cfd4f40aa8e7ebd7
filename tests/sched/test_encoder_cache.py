"""Items in plans: every vector is there when its token is computed, no step makes too many, none is left."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from symbolic import LAYOUTS, BreakableWorker, Engine, continuation, meant, widened

from quire.data.multimodal import Array, Media, MediaItem
from quire.data.plan import StepPlan
from quire.data.request import Request
from quire.sched.encoder_cache import EncoderCache

PIXELS = {"pixels": Array.of(np.zeros(1, np.float32))}
LONGEST = 3 * (6 + 9) + 10


@dataclass(frozen=True)
class Arrival:
    parts: tuple[tuple[int, int, int], ...]
    """Tokens of a text, which item follows it, and of how many tokens."""
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


class Watched(Engine):
    """With what must hold of media in every plan."""

    def __init__(self, *, size: int, whole: bool, **limits: Any) -> None:
        super().__init__(media=EncoderCache(size=size, whole=whole), **limits)
        self.kept: dict[bytes, int] = {}

    def check(self, plan: StepPlan) -> None:
        super().check(plan)
        media, running = self.scheduler.media, self.scheduler.running
        for key in plan.forgotten:
            self.kept.pop(key, None)
        made = {item.key: item.num_vectors for item in plan.encodes}
        assert len(made) == len(plan.encodes) and not made.keys() & self.kept.keys(), "encoded twice"
        assert sum(made.values()) <= media.size or len(made) == 1, "more than a step may make"
        self.kept |= made
        assert sum(self.kept.values()) <= media.size or len(self.kept) == 1, "more than there is room for"
        most = self.scheduler.limits.max_chunk
        for row in plan.rows.tolist():
            reach, items = int(running.num_computed[row]), items_of(running.request(row))
            if media.whole:
                whole = running.request(row).media.whole if items else 0
                assert not 0 < reach < whole or whole > most, "ends inside a prompt that sees itself"
                for item in items if not whole else ():
                    assert not item.offset < reach < item.end or item.length > most, "ends inside an item"


def items_of(request: Request) -> list[MediaItem]:
    return request.media.items if request.media else []


def prompt_of(arrival: Arrival) -> tuple[list[int], Media]:
    """Items of two runs, if they are long: a token in the middle is a token."""
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
        expected = continuation(meant(*prompt_of(arrival)), arrival.count)
        said = engine.outputs[str(number)]
        assert said == (expected[: len(said)] if str(number) in but else expected)
    engine.check_empty()


@settings(max_examples=25)
@given(TRAFFIC, LIMITS)
def test_every_request_sees_its_own_items(traffic: list[Arrival], limits: dict[str, Any]) -> None:
    engine = Watched(**limits)
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
def test_aborts_resets_and_preemptions_lose_no_vector(
    traffic: list[Arrival], limits: dict[str, Any], data: st.DataObject
) -> None:
    engine = Watched(**limits)
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
                engine.scheduler.send_back()
        engine.step()
    check_answers(engine, traffic, frozenset(aborted))


@settings(max_examples=20)
@given(TRAFFIC, LIMITS, st.data())
def test_prompts_that_see_themselves_are_not_divided_and_share_nothing_with_others(
    traffic: list[Arrival], limits: dict[str, Any], data: st.DataObject
) -> None:
    """Blocks of a prompt that goes on otherwise; a chunk that ends behind the last item."""
    limits |= {"whole": True, "long_prefill_token_threshold": 0, "max_num_batched_tokens": LONGEST}
    limits["size"] = LONGEST
    engine = Watched(**limits)
    prompts = [prompt_of(arrival) for arrival in traffic]
    for number, ((tokens, media), arrival) in enumerate(zip(prompts, traffic, strict=True)):
        engine.add(str(number), tokens, arrival.count, media=media.joined(tokens), tenant=arrival.family)
    while engine.core.has_work:
        if not data.draw(st.integers(0, 5)) and not engine.scheduler.in_flight:
            engine.scheduler.send_back()
        engine.step()
    for number, ((tokens, media), arrival) in enumerate(zip(prompts, traffic, strict=True)):
        expected = continuation(meant(tokens, media.joined(tokens)), arrival.count)
        assert engine.outputs[str(number)] == expected
    engine.check_empty()


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(TRAFFIC, LIMITS, st.data())
def test_many_more_runs(traffic: list[Arrival], limits: dict[str, Any], data: st.DataObject) -> None:
    """The tests above with many times the examples."""
    test_every_request_sees_its_own_items.hypothesis.inner_test(traffic, limits)
    test_aborts_resets_and_preemptions_lose_no_vector.hypothesis.inner_test(traffic, limits, data)
    test_prompts_that_see_themselves_are_not_divided_and_share_nothing_with_others.hypothesis.inner_test(
        traffic, limits, data
    )


class Blind(BreakableWorker):
    """Cannot read items with this name; whatever else was to be encoded with one is not."""

    def breaks(self, plan: StepPlan) -> bool:
        return any(item.key[0] == 0 for item in plan.encodes)


@settings(max_examples=20)
@given(TRAFFIC, LIMITS)
def test_only_those_end_whose_items_cannot_be_encoded(traffic: list[Arrival], limits: dict[str, Any]) -> None:
    """Steps behind the one that failed have counted on its vectors, and are forgotten with it."""
    limits |= {"share": False}
    engine = Watched(**limits)
    engine.use(Blind)
    for number, arrival in enumerate(traffic):
        add(engine, number, arrival)
    engine.run()
    bad = {str(n) for n, each in enumerate(traffic) if any(name == 0 for _, name, _ in each.parts)}
    assert {id for id, reason in engine.reasons.items() if reason == "error"} == bad
    check_answers(engine, traffic, frozenset(bad))


class Crossed(Watched):
    """With items that no tokens stand for: whoever computes a token needs its own."""

    def check(self, plan: StepPlan) -> None:
        super().check(plan)
        for row in plan.rows.tolist():
            (item,) = items_of(self.scheduler.running.request(row))
            assert item.key in self.kept, "its item is not there"
        assert len(plan.encodes) <= max(self.scheduler.media.most_made, 1)


def crossed_of(arrival: Arrival) -> tuple[list[int], Media]:
    """To the symbolic model the first token is the item: all that follows depends on it."""
    (text, name, _), *_ = arrival.parts
    item = MediaItem(
        modality="audio", key=bytes([name, 1, 2, 3]), offset=0, length=0, runs=[(0, 1)], arrays=PIXELS
    )
    return [(5 * i) % 97 for i in range(text + 1)], Media([item])


@settings(max_examples=25)
@given(TRAFFIC, LIMITS, st.integers(1, 3), st.data())
def test_items_that_no_tokens_stand_for_stay_as_long_as_their_rows(
    traffic: list[Arrival], limits: dict[str, Any], most_made: int, data: st.DataObject
) -> None:
    """An item that goes when its row has computed some tokens, or has come back; a prefix under another
    item; more items than there are rows."""
    engine = Crossed(**limits | {"whole": False, "size": limits["max_num_seqs"]})
    engine.scheduler.media.most_made = most_made
    aborted = set[str]()
    for number, arrival in enumerate(traffic):
        tokens, media = crossed_of(arrival)
        engine.add(str(number), tokens, arrival.count, media=media, tenant=arrival.family)
        assert media.marks(tokens)[1:] == tokens
    while engine.core.has_work:
        match data.draw(st.integers(0, 7)):
            case 0:
                victim = str(data.draw(st.integers(0, len(traffic) - 1)))
                aborted |= {victim} if engine.abort(victim) else set()
            case 1 if not engine.scheduler.in_flight:
                engine.scheduler.send_back()
        engine.step()
    for number, arrival in enumerate(traffic):
        expected, said = continuation(meant(*crossed_of(arrival)), arrival.count), engine.outputs[str(number)]
        assert said == (expected[: len(said)] if str(number) in aborted else expected)
    engine.check_empty()
    assert engine.scheduler.media.reset()
