"""Tests of cached prefixes from KV events: the keys of an engine's cache, and requests that go to them."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mirror import follow
from symbolic import Engine
from test_fleet import Client, Replicas, fleet_routes, place, prompt, run, until
from test_kv_events import traffic
from tiered import TieredEngine

from quire.config.kv_events import KVEventSettings
from quire.core.kv_events import EventPublisher
from quire.data.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventEncoder, KVEvent
from quire.frontend import cached_prefixes
from quire.frontend.cached_prefixes import CachedPrefixes, follow_events
from quire.frontend.prefix_map import PrefixKeys


class Sink:
    """Applies events without sockets between."""

    def __init__(self, block_size: int) -> None:
        self.prefixes = CachedPrefixes(block_size)

    def publish(self, events: Sequence[KVEvent]) -> None:
        self.prefixes.apply(EventEncoder().encode(1.0, events))

    def take_dropped(self) -> int:
        return 0

    def close(self) -> None: ...


class Reader:
    """The keys that a reader of changes knows."""

    def __init__(self, prefixes: CachedPrefixes) -> None:
        self.prefixes, self.number, self.keys = prefixes, 0, set[int]()

    def read(self) -> set[int]:
        changes = self.prefixes.since(self.number)
        self.number = changes.number
        self.keys |= {*changes.stored_keys.tolist()}
        self.keys -= {*changes.removed_keys.tolist()}
        return self.keys


def stored(tokens: list[int], *hashes: bytes, parent: bytes | None = None, **fields: Any) -> BlockStored:
    values = {"block_size": 4, "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0} | fields
    return BlockStored([*hashes], parent, np.array(tokens, np.int32), **values)


@pytest.mark.parametrize("has_tiers", [False, True])
def test_keys_are_those_of_the_cache(has_tiers: bool) -> None:
    """Run requests with common prefixes in a cache that is too small, and compare after every step."""
    engine: Engine
    if has_tiers:
        engine = TieredEngine(num_blocks=30, max_num_seqs=2, num_host=9, num_files=25)
    else:
        engine = Engine(num_blocks=40, max_num_seqs=4)
    follow(engine.kv)
    assert engine.kv.events is not None
    sink = Sink(4)
    engine.kv.events._sink = sink
    kinds = engine.tiers.stores.kinds if isinstance(engine, TieredEngine) else ()
    for kind in kinds:
        for tier, medium in ((kind.host, "CPU"), (kind.disk, "STORAGE")):
            if tier is not None:
                engine.kv.events.watch(tier, medium)
    traffic(engine)
    requests = [*engine.core.scheduler.requests.values()]
    reader, router, most = Reader(sink.prefixes), PrefixKeys(4), 0
    while engine.core.has_work:
        engine.step()
        expected = set[int]()
        for request in requests:
            depths, keys = router.of([*request.tokens, 0], request.cache_salt)
            for depth, key in zip(depths, keys.tolist(), strict=True):
                name = request.block_keys[depth // 4 - 1] if depth // 4 <= len(request.block_keys) else b""
                if name in engine.kv.pool.index or any(kind.holds(name) for kind in kinds):
                    expected.add(key)
        assert expected <= reader.read()
        num_cached = len(
            {*engine.kv.pool.index}.union(*(tier for k in kinds for tier in (k.host, k.disk) if tier))
        )
        assert len(reader.keys) <= num_cached
        most = max(most, len(expected))
    assert most > 10
    engine.kv.reset()
    names = {name for kind in kinds for tier in (kind.host, kind.disk) for name in tier or ()}
    assert bool(reader.read()) == has_tiers == bool(names) and len(reader.keys) <= len(names)
    engine.kv.reset(external=True)
    assert reader.read() == set() == Reader(sink.prefixes).read()


def test_long_prefixes_have_the_keys_that_routers_look_up() -> None:
    tokens, sink = [at % 50 for at in range(4 * 200)], Sink(4)
    hashes = [number.to_bytes(32, "big") for number in range(200)]
    sink.publish([stored(tokens[:240], *hashes[:60])])
    sink.publish([stored(tokens[240:], *hashes[60:], parent=hashes[59])])
    assert Reader(sink.prefixes).read() == {*PrefixKeys(4).of([*tokens, 0], None)[1].tolist()}


def test_what_is_not_known_by_its_tokens_is_left_out() -> None:
    sink = Sink(4)
    sink.publish(
        [
            stored([1, 2, 3, 4], b"a" * 32, lora_name="x"),
            stored([1, 2, 3, 4], b"b" * 32, extra_keys=[[("cat", 0)]]),
            stored([1, 2, 3, 4], b"c" * 32, parent=b"unknown" + bytes(25)),
            stored([1, 2, 3, 4], b"d" * 32, group_idx=1),
            BlockRemoved([b"e" * 32], "GPU", 0),
        ]
    )
    assert Reader(sink.prefixes).read() == set()
    sink.publish([stored([1, 2, 3, 4], b"f" * 32, extra_keys=[["salt"]])])
    assert Reader(sink.prefixes).read() == {*PrefixKeys(4).of([1, 2, 3, 4, 5], "salt")[1].tolist()}


def test_a_reader_that_is_far_behind_gets_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_prefixes, "LOG_LENGTH", 3)
    sink = Sink(4)
    late = Reader(sink.prefixes)
    for number in range(6):
        sink.publish([stored([number] * 4, bytes([number]) * 32)])
        late.read() if number == 0 else None
    assert late.read() == Reader(sink.prefixes).read() and len(late.keys) == 6


def test_requests_go_to_the_replica_that_has_their_prefix_cached() -> None:
    routes, sink = fleet_routes("a", "b"), Sink(16)
    tokens = prompt(1, 64)
    sink.publish([stored(tokens, *(bytes([n]) * 32 for n in range(4)), block_size=16)])
    routes.note_cached("b", sink.prefixes.since(0))
    routes.note_cached("unknown", sink.prefixes.since(0))
    assert [place(routes, str(n), [*tokens, 1], "ab") for n in range(2)] == ["b", "b"], "not by load"
    before = sink.prefixes.since(0).number
    sink.publish([AllBlocksCleared()])
    routes.note_cached("b", sink.prefixes.since(before))
    assert place(routes, "3", [*tokens, 1], "ab") == "a", "the load decides"


def test_a_replica_counts_while_it_has_half_of_a_prefix() -> None:
    routes, sink, tokens = fleet_routes("a", "b"), Sink(16), prompt(1, 128)
    hashes = [bytes([number]) * 32 for number in range(8)]
    routes.update_load("b", num_running=3, num_waiting=0, kv_usage=0.0)
    sink.publish([stored(tokens, *hashes, block_size=16)])
    number, places = 0, []
    for evicted in (hashes[4:], hashes[2:4]):
        for event in (None, BlockRemoved(evicted, "GPU", 0)):
            if event is not None:
                sink.publish([event])
            changes = sink.prefixes.since(number)
            number = changes.number
            routes.note_cached("b", changes)
            places.append(routes.rank(routes.route("r", [*tokens, 1]), "ab")[0])
    assert places == ["b", "b", "b", "a"], "with a quarter of the prefix, the load decides"
    place(routes, "again", [*tokens, 1], "b")
    routes.end("again")
    assert place(routes, "r", [*tokens, 1], "ab") == "b", "it has been computed there again"


def test_a_fleet_learns_prefixes_and_load_from_its_replicas() -> None:
    async def check() -> None:
        client = Client(fleet := Replicas("a", "b"))
        await client.engine.ready()
        link: Any = client.engine._links[0]
        report = {"num_running": 2.0, "num_waiting": 1.0, "kv_usage": 0.5}
        link.routes.update({"a": ((), report), "b": ((), report | {"num_waiting": 0.0})})
        sink, tokens = Sink(16), prompt(1, 64)
        fleet.caches["b"] = sink.prefixes
        sink.publish([stored(tokens, *(bytes([n]) * 32 for n in range(4)), block_size=16)])
        await until(lambda: link._num_changes.get("b") == 4)
        for number in range(2):
            await client.ask(str(number), [*tokens, 1])
        assert fleet.placed == ["b", "b"]
        await until(lambda: client.engine.metrics.pages.value("num_requests_running") == 4)
        pages = client.engine.metrics.pages
        assert (pages.value("num_requests_waiting"), pages.value("kv_cache_usage_perc")) == (1, 0.5)
        client.engine.close()

    run(check())


def test_events_of_a_core_are_followed(tmp_path: Path) -> None:
    async def check() -> None:
        endpoint = f"ipc://{tmp_path}/events"
        publisher, prefixes = EventPublisher(KVEventSettings(endpoint=endpoint)), CachedPrefixes(4)
        task = asyncio.create_task(follow_events(endpoint, prefixes))
        try:
            await asyncio.sleep(0.3)  # until it has subscribed
            publisher.publish([stored([1, 2, 3, 4], b"a" * 32)])
            await until(lambda: len(Reader(prefixes).read()) == 1)
            publisher._next += 1  # a batch is lost
            publisher.publish([stored([1, 2, 3, 5], b"b" * 32)])
            await until(lambda: prefixes.since(0).number == 3)
            assert len(Reader(prefixes).read()) == 1
        finally:
            task.cancel()
            publisher.close()

    run(check())
