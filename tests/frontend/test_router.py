"""Tests of the routing to cores: prefix affinity and balance, also after a million requests."""

import heapq
import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quire.frontend.prefix_map import PrefixKeys, PrefixMap
from quire.frontend.router import Router

BLOCK, ROWS = 16, 64


def make(num_cores: int = 3, **options: object) -> Router:
    settings: dict[str, Any] = {"block_size": BLOCK, "max_num_seqs": ROWS} | options
    return Router(num_cores, **settings)


def prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(32000) for _ in range(length)]


ALL = (0, 1, 2)


# ---- keys


def test_prefix_keys_follow_tokens_and_extra_keys() -> None:
    """Check tokens, positions and the salt, and that the last token does not count as cached."""
    keys = PrefixKeys(BLOCK)
    first, second = prompt(0, 80), prompt(0, 80)
    second[40] += 1
    depths, of_first = keys.of(first, None)
    _, of_second = keys.of(second, None)
    assert depths == [16, 32, 48, 64]
    assert [a == b for a, b in zip(of_first, of_second, strict=True)] == [True, True, False, False]
    assert keys.of([*first[:80], 7], None)[0] == [16, 32, 48, 64, 80]
    assert not {*of_first} & {*keys.of(first, "salt")[1]}
    swapped = [first[1], first[0], *first[2:]]
    assert not set(of_first) & set(keys.of(swapped, None)[1])
    assert keys.of(first[:16], None)[0] == []


def test_long_prompt_has_few_keys_and_one_near_its_end() -> None:
    keys = PrefixKeys(BLOCK)
    depths, actual = keys.of(prompt(1, 100_000), None)
    assert len(depths) == len(actual) == len({*actual.tolist()}) < 400
    assert depths == sorted(depths) and depths[-1] > 0.95 * 100_000
    full = set(keys.of(prompt(1, 3000), None)[1])
    assert set(keys.of(prompt(1, 100_000)[:1000], None)[1]) <= full, "depths do not depend on the length"


# ---- choices


def test_equal_prefixes_go_to_one_core_until_it_is_busy() -> None:
    router, shared = make(), prompt(2, 64)
    placed = [router.place(str(i), [*shared, *prompt(i, 16)], among=ALL) for i in range(40)]
    assert len(set(placed[:3])) == 1
    busy = [core.num_local for core in router.cores]
    assert max(busy) - min(busy) <= 6, "a common prefix must not fill one core"
    for i in range(40):
        router.end(str(i))
        router.end(str(i))
    assert [core.num_local for core in router.cores] == [0, 0, 0]


def test_other_prompts_go_to_the_least_busy_core_in_turn() -> None:
    router = make(first=1)
    assert [router.place(str(i), prompt(i, 40), among=ALL) for i in range(4)] == [1, 2, 0, 1]
    router.update_load(2, num_running=9, num_waiting=0, kv_usage=0.1)
    assert [router.place(f"b{i}", prompt(50 + i, 40), among=ALL) for i in range(3)] == [0, 1, 0]
    router.update_load(0, num_running=4, num_waiting=4, kv_usage=0.99)
    router.update_load(1, num_running=12, num_waiting=0, kv_usage=0.5)
    router.update_load(2, num_running=20, num_waiting=0, kv_usage=0.5)
    assert router.place("c", prompt(99, 40), among=ALL) == 1, "a core with a full cache has a long queue"


def test_reported_requests_are_not_counted_twice() -> None:
    """Check that own requests are counted once when the core reports them, and others' requests are kept."""
    router = make()
    for i in range(6):
        router.place(str(i), prompt(i, 40), among=[0])
    router.update_load(0, num_running=6, num_waiting=0, kv_usage=0.0)
    assert router.cores[0].load == 6
    router.update_load(0, num_running=8, num_waiting=1, kv_usage=0.0)
    assert router.cores[0].load == 9
    router.end("0")
    assert router.cores[0].load == 8


def test_prefixes_of_a_dead_core_are_forgotten() -> None:
    router, shared = make(), prompt(3, 64)
    home = router.place("a", [*shared, 1], among=ALL)
    router.lose(home)
    assert router.cores[home].num_local == 0
    router.end("a")
    assert router.cores[home].num_local == 0
    others = [core for core in ALL if core != home]
    elsewhere = router.place("b", [*shared, 2], among=others)
    assert router.place("c", [*shared, 3], among=ALL) == elsewhere, "the prefix is cached there now"
    router.forget_prefixes()
    assert router.place("d", [*shared, 4], among=ALL) != elsewhere


def test_memory_is_bounded_and_recent_prefixes_stay() -> None:
    router, kept = make(prefixes=PrefixMap(num_buckets=8)), prompt(4, 64)
    home = router.place("kept", [*kept, 0], among=ALL)
    for i in range(200):
        router.place(str(i), prompt(i + 10, 64), among=ALL)
        router.end(str(i))
        assert router.place("again", [*kept, i], among=ALL) == home
        router.end("again")


def test_processes_choose_the_same_core_for_a_prefix(tmp_path: Path) -> None:
    """Check that a prefix has one home over all processes, and keeps it when another core helps out."""
    PrefixMap.create(tmp_path / "prefixes")
    one, two = (make(prefixes=PrefixMap(tmp_path / "prefixes"), first=first) for first in (0, 1))
    shared = prompt(6, 64)
    home = one.place("a", [*shared, 1], among=ALL)
    other = two.place("b", [*shared, 2], among=[core for core in ALL if core != home])
    assert [item.place("c", [*shared, 3], among=ALL) for item in (one, two)] == [home, home]
    two.lose(home)
    assert one.place("d", [*shared, 4], among=ALL) == other


def test_routing_policies() -> None:
    shared = prompt(5, 64)
    in_turn = make(policy="round_robin")
    assert [in_turn.place(str(i), shared, among=ALL) for i in range(4)] == [0, 1, 2, 0]
    assert [in_turn.place(f"b{i}", shared, among=(0, 2)) for i in range(3)] == [2, 0, 2]
    by_load = make(policy="load")
    assert [by_load.place(str(i), shared, among=ALL) for i in range(4)] == [0, 1, 2, 0]


# ---- long simulation


class Fleet:
    """Cores in simulated time, and API processes that see their own requests and the heartbeats."""

    NUM_CORES, NUM_API, BEAT_S = 4, 3, 0.1

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        cores = range(self.NUM_CORES)
        self.routers = [make(self.NUM_CORES, first=i) for i in range(self.NUM_API)]
        self.now = 0.0
        self.events: list[tuple[float, int, str, int]] = []
        """Time, tie breaker, kind, and request or core."""
        self.up = [True] * self.NUM_CORES
        self.running: list[set[int]] = [set() for _ in cores]
        self.waiting: list[deque[int]] = [deque() for _ in cores]
        self.requests: dict[int, tuple[int, int, float, list[int]]] = {}
        """API process, core, service time in seconds, and prompt."""
        self.busy, self.fair_busy = [0.0] * self.NUM_CORES, [0.0] * self.NUM_CORES
        """Load of each core over time, and its load with equal shares among live cores."""
        self.work_s, self.fair_work_s = [0.0] * self.NUM_CORES, [0.0] * self.NUM_CORES
        """Seconds of work assigned to each core, and with equal shares among live cores."""
        self.num_events = self.num_again = 0
        self.prefixes = [prompt(i, 96) for i in range(300)]
        self.suffixes = prompt(1000, 5000)

    def at(self, delay_s: float, kind: str, which: int) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (self.now + delay_s, self.num_events, kind, which))

    def arrive(self, number: int) -> None:
        draw = self.draw
        start = draw.randrange(4900)
        suffix = self.suffixes[start : start + draw.randrange(8, 90)]
        # Half of the prompts share prefixes, with a skewed distribution.
        shared = self.prefixes[int(300 * draw.random() ** 3)] if draw.random() < 0.5 else []
        self.send(number, draw.randrange(self.NUM_API), draw.lognormvariate(0.0, 1.0), [*shared, *suffix])

    def send(self, number: int, api: int, service_s: float, tokens: list[int]) -> None:
        among = [core for core in range(self.NUM_CORES) if self.up[core]]
        core = self.routers[api].place(str(number), tokens, among=among)
        self.requests[number] = api, core, service_s, tokens
        self.work_s[core] += service_s
        for item in among:
            self.fair_work_s[item] += service_s / len(among)
        self.waiting[core].append(number)
        self.admit(core)

    def admit(self, core: int) -> None:
        while self.waiting[core] and len(self.running[core]) < ROWS:
            number = self.waiting[core].popleft()
            self.running[core].add(number)
            self.at(self.requests[number][2], "end", number)

    def end(self, number: int) -> None:
        if number not in self.requests or number not in self.running[self.requests[number][1]]:
            return  # it was resent when its core died
        api, core, service_s, _ = self.requests.pop(number)
        self.running[core].discard(number)
        self.routers[api].end(str(number))
        self.admit(core)

    def beat(self) -> None:
        loads = [len(self.running[core]) + len(self.waiting[core]) for core in range(self.NUM_CORES)]
        for core in range(self.NUM_CORES):
            if self.up[core]:
                self.busy[core] += loads[core]
                self.fair_busy[core] += sum(loads) / sum(self.up)
                for router in self.routers:
                    router.update_load(
                        core,
                        num_running=len(self.running[core]),
                        num_waiting=len(self.waiting[core]),
                        kv_usage=len(self.running[core]) / ROWS,
                    )

    def die(self, core: int) -> None:
        if sum(self.up) == 1 or not self.up[core]:
            return
        self.up[core] = False
        for router in self.routers:
            router.lose(core)
        lost: Sequence[int] = [*self.running[core], *self.waiting[core]]
        self.running[core], self.waiting[core] = set(), deque()
        self.at(self.draw.uniform(1, 10), "up", core)
        for number in lost:
            api, _, service_s, tokens = self.requests.pop(number)
            self.num_again += 1
            self.send(number, api, service_s, tokens)

    def run(self, num_requests: int, rate: float) -> None:
        sent = 0
        self.at(0.0, "arrive", 0)
        self.at(self.BEAT_S, "beat", 0)
        self.at(self.draw.expovariate(1 / 40), "die", self.draw.randrange(self.NUM_CORES))
        while sent < num_requests or self.requests:
            self.now, _, kind, which = heapq.heappop(self.events)
            if kind == "arrive":
                self.arrive(sent)
                sent += 1
                if sent < num_requests:
                    self.at(self.draw.expovariate(rate), "arrive", 0)
            elif kind == "end":
                self.end(which)
            elif kind == "beat":
                self.beat()
                self.at(self.BEAT_S, "beat", 0)
            elif kind == "up":
                self.up[which] = True
            else:
                self.die(which)
                self.at(self.draw.expovariate(1 / 40), "die", self.draw.randrange(self.NUM_CORES))


@pytest.mark.parametrize(
    "num_requests",
    [8_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
    ids=["some", "a million"],
)
def test_load_stays_balanced_through_deaths_and_restarts(num_requests: int) -> None:
    """Check for counter drift, prefixes that overload one core, and a burst after a restart."""
    fleet = Fleet(seed=7)
    fleet.run(num_requests, rate=80)
    assert fleet.num_again > num_requests / 1000
    for had, fair in ((fleet.busy, fleet.fair_busy), (fleet.work_s, fleet.fair_work_s)):
        shares = [item / its_due for item, its_due in zip(had, fair, strict=True)]
        assert max(shares) <= 1.1 * min(shares), shares
    assert all(core.num_local == 0 for router in fleet.routers for core in router.cores)
    assert all(not router._placed for router in fleet.routers)


class Cache:
    """A core's blocks by their prefix tokens, with LRU eviction."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.blocks: dict[tuple[int, ...], None] = {}

    def read(self, tokens: list[int]) -> int:
        """Return the number of cached tokens of a prompt, and cache all its blocks."""
        ends = range(BLOCK, len(tokens), BLOCK)
        prefixes = [tuple(tokens[:end]) for end in ends]
        num_hit = next((i for i, prefix in enumerate(prefixes) if prefix not in self.blocks), len(prefixes))
        for prefix in reversed(prefixes):
            self.blocks.pop(prefix, None)
            self.blocks[prefix] = None
        while len(self.blocks) > self.num_blocks:
            del self.blocks[next(iter(self.blocks))]
        return num_hit * BLOCK


def hit_rate(policy: str) -> float:
    """Return the hit rate of two cores that each hold two fifths of 40 prefixes, with 8 concurrent
    requests.
    """
    draw = random.Random(1)
    prefixes = [prompt(i, 12 * BLOCK) for i in range(40)]
    router = make(2, policy=policy, max_num_seqs=128)
    caches = [Cache(16 * 13) for _ in range(2)]
    num_hit = num_asked = 0
    running: deque[str] = deque()
    for i in range(2000):
        tokens = [*draw.choice(prefixes), *prompt(1000 + i, 20)]
        num_hit += caches[router.place(str(i), tokens, among=(0, 1))].read(tokens)
        num_asked += len(tokens)
        running.append(str(i))
        if len(running) > 8:
            running.rotate(draw.randrange(9))
            router.end(running.popleft())
    return num_hit / num_asked


def test_affinity_combines_two_caches() -> None:
    rates = {policy: hit_rate(policy) for policy in ("round_robin", "affinity")}
    assert rates["affinity"] >= 1.8 * rates["round_robin"], rates


# ---- sessions


def test_session_stays_with_its_core() -> None:
    router = make()
    home = router.place("first", prompt(1, 40), among=ALL, session="a")
    router.end("first")
    for number in range(2, 30):
        others = [router.place(f"o{number}-{at}", prompt(1000 * number + at, 40), among=ALL) for at in (0, 1)]
        assert len(others) == 2
        assert router.place(str(number), prompt(number, 40), among=ALL, session="a") == home
        router.end(str(number))


def test_session_moves_if_its_core_is_gone_or_overloaded() -> None:
    router = make()
    home = router.place("0", prompt(1, 40), among=ALL, session="a")
    others = [core for core in ALL if core != home]
    assert router.place("1", prompt(2, 40), among=others, session="a") in others
    for number in range(ROWS):
        router.place(f"load {number}", prompt(100 + number, 40), among=[home])
    assert router.place("2", prompt(3, 40), among=ALL, session="a") in others
    router.lose(home)
    assert router.place("3", prompt(4, 40), among=ALL, session="a") in others


def test_short_prompts_of_a_session_stay_together_in_all_processes(tmp_path: Path) -> None:
    file = tmp_path / "prefixes"
    PrefixMap.create(file)
    first, second = make(prefixes=PrefixMap(file)), make(prefixes=PrefixMap(file), first=1)
    home = first.place("0", [1, 2], among=ALL, session="a")
    assert {second.place(str(number), [number], among=ALL, session="a") for number in range(5)} == {home}
