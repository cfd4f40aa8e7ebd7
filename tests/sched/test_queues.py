"""Tests of the waiting queues against a sorted list, and of their cost when thousands of requests leave."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from symbolic import Engine

from quire.data.params import SamplingParams
from quire.data.request import Request
from quire.sched.queues import QUEUE_CLASSES

Ranked = tuple[tuple[float, ...], Request]


def make_request(number: int, priority: int = 0, arrived_at: float = 0.0) -> Request:
    return Request(
        id=str(number),
        tokens=[1],
        params=SamplingParams(),
        prompt_len=1,
        limit=2,
        seed=0,
        priority=priority,
        arrived_at=arrived_at,
    )


class NaiveQueue:
    """A list that is sorted after every insertion."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.entries: list[Ranked] = []

    def enter(self, request: Request, place: int) -> None:
        urgency = (request.priority, request.arrived_at) if self.policy == "priority" else ()
        self.entries.append(((*urgency, place), request))
        self.entries.sort(key=lambda ranked: ranked[0])

    def remove(self, request: Request) -> None:
        self.entries = [ranked for ranked in self.entries if ranked[1] is not request]

    @property
    def requests(self) -> list[Request]:
        return [request for _, request in self.entries]


@given(
    st.sampled_from(sorted(QUEUE_CLASSES)),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 11)), max_size=60),
)
def test_queue_matches_sorted_list(policy: str, moves: list[tuple[int, int]]) -> None:
    """Check operations at both ends, and removal and reinsertion of requests in the middle."""
    queue, naive = QUEUE_CLASSES[policy](), NaiveQueue(policy)
    requests = [make_request(number, number % 3, number % 2) for number in range(12)]
    for place, (move, number) in enumerate(moves, 1):
        request = requests[number]
        if request in naive.requests:
            queue.remove(request)
            naive.remove(request)
        elif move == 0 and len(queue):
            assert queue.pop() is naive.requests[0]
            naive.remove(naive.requests[0])
        elif move == 1:
            queue.push_front(request)
            naive.enter(request, -place)
        else:
            queue.push(request)
            naive.enter(request, place)
        assert len(queue) == len(naive.entries)
        if len(queue):
            assert queue.peek() is naive.requests[0]
    assert [queue.pop() for _ in range(len(queue))] == naive.requests


@pytest.mark.parametrize("policy", QUEUE_CLASSES)
def test_removed_entries_do_not_accumulate(policy: str) -> None:
    """Check the memory of a queue whose head stays while thousands of requests behind it come and go."""
    queue = QUEUE_CLASSES[policy]()
    queue.push(make_request(0, priority=-1))
    for number in range(1, 5_000):
        request = make_request(number)
        queue.push(request)
        queue.remove(request)
        assert len(queue) == 1 and len(queue._heap) <= 2


@pytest.mark.parametrize("policy", QUEUE_CLASSES)
def test_thousands_of_aborts_take_linear_time(policy: str) -> None:
    """Check both orders of aborts, also for suspects; a linear search per abort would take minutes."""
    engine = Engine(policy=policy)
    requests = [make_request(number) for number in range(20_000)]
    for request in requests:
        engine.core.add(request)
    engine.scheduler.fault_isolation.isolate(requests, len(requests), len(requests))
    backwards = [request.id for request in reversed(requests[:10_000])]
    assert len(engine.core.abort(backwards)) == 10_000
    assert len(engine.core.abort([request.id for request in requests])) == 10_000
    engine.check_empty()


@pytest.mark.parametrize("fair", [False, True])
def test_requests_of_a_dead_core_are_admitted_first(fair: bool) -> None:
    """Check that the last one sent is admitted first; with fair shares, it may be its tenant's first
    request.
    """
    engine = Engine(max_num_seqs=1, fair=fair)
    engine.add("new", [1, 2, 3], count=2)
    engine.add("second", [1, 2, 3], count=4, output=[4, 5], has_run=True, tenant=2 * fair)
    engine.add("first", [1, 2, 3], count=4, output=[6], has_run=True, tenant=2 * fair)
    engine.run()
    order = list(dict.fromkeys(id for step in engine.steps for id in step.request_ids))
    assert [id for id in order if id != "new"] == ["first", "second"]
    assert fair or order[-1] == "new"
