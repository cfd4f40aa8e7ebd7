"""Tests of KV events: a subscriber that applies them has the same blocks as the cache, after every step."""

import hashlib
import struct
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import pytest
from library import FakeLoader, digest, lora
from mirror import Mirror, follow
from symbolic import LAYOUTS, BreakableWorker, Engine
from tiered import TieredEngine

from quire.data.block_hash import block_hashes, root_hash, short_hash
from quire.data.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventEncoder
from quire.data.kv_tiers import STATE_MARK
from quire.data.multimodal import Array, Media, MediaItem
from quire.data.params import SamplingParams
from quire.data.step_plan import StepPlan
from quire.sched.encoder_cache import EncoderCache
from quire.sched.lora import LoRAScheduler

PIXELS = {"pixels": Array.of(np.zeros(1, np.float32))}


def prompt_of(family: int, length: int) -> list[int]:
    return [(family * 31 + 5 * at) % 90 for at in range(length)]


def entries(engine: Engine, medium: str, keys: Iterable[bytes]) -> set[tuple[str, int, int]]:
    """Return the blocks with these keys as a subscriber knows them."""
    kv, blocks = engine.kv, set()
    for key in keys:
        mark = key[32:].removeprefix(b"salt")
        if mark == STATE_MARK or kv.has_pages:
            group = len(kv.windows) if mark == STATE_MARK else mark[0] if mark else 0
            blocks.add((medium, group, short_hash(key)))
    return blocks


def expected(engine: Engine) -> set[tuple[str, int, int]]:
    """Return the blocks that requests find in the cache."""
    blocks = entries(engine, "GPU", engine.kv.pool.index)
    if isinstance(engine, TieredEngine):
        for kind in engine.tiers.stores.kinds:
            blocks |= entries(engine, "CPU", kind.host or ())
            blocks |= entries(engine, "STORAGE", kind.disk or ())
    return blocks


def run(engine: Engine, mirror: Mirror) -> None:
    """Run all requests; compare the mirror with the cache after every step."""
    while engine.core.has_work:
        engine.step()
        assert mirror.blocks == expected(engine)


def kinds_of(mirror: Mirror) -> list[str]:
    return [event["type"] for event in mirror.events]


def traffic(engine: Engine) -> None:
    """Add requests with common prefixes, which need more blocks than there are."""
    for number in range(12):
        prompt = prompt_of(number % 5, 10 + 7 * (number % 4)) + prompt_of(number, number % 6)
        engine.add(str(number), prompt, 1 + number % 7, cache_salt="pepper" if number % 3 == 0 else None)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("layout", [*LAYOUTS])
def test_a_subscriber_has_the_blocks_of_the_cache(layout: str, depth: int) -> None:
    engine = Engine(layout=layout, num_blocks=50, num_slots=3, depth=depth, max_num_seqs=3)
    mirror = follow(engine.kv)
    traffic(engine)
    run(engine, mirror)
    assert mirror.blocks and {"BlockStored", "BlockRemoved"} <= {*kinds_of(mirror)}
    assert engine.core.reset_prefix_cache()
    assert not mirror.blocks and kinds_of(mirror)[-1] == "AllBlocksCleared"
    engine.core.close()
    assert mirror.is_closed


def test_one_event_covers_the_blocks_of_a_step() -> None:
    engine, prompt = Engine(max_num_batched_tokens=32), prompt_of(0, 22)
    mirror = follow(engine.kv)
    engine.add("a", prompt, 6)
    run(engine, mirror)
    first, second = mirror.events
    assert (first["token_ids"], first["parent_block_hash"]) == (prompt[:20], None)
    assert first["block_hashes"] == [short_hash(each) for each in block_hashes(prompt, 4)]
    assert second["token_ids"] == [*prompt[20:], *engine.outputs["a"][:2]]
    assert second["parent_block_hash"] == first["block_hashes"][-1]
    assert mirror.num_batches == 2, "steps without events send nothing"
    engine.add("b", prompt, 1)
    run(engine, mirror)
    assert len(mirror.events) == 2, "reused blocks are not reported"


def test_reused_blocks_are_reported_on_request() -> None:
    engine, prompt = Engine(layout="state"), prompt_of(0, 22)
    mirror = follow(engine.kv)
    engine.add("a", prompt, 1)
    run(engine, mirror)
    before = list(mirror.events)
    assert [event["kv_cache_spec_kind"] for event in before] == ["full_attention", "mamba"]
    params = SamplingParams(max_tokens=1, extra_args={"kv_cache_report_mode": "full"})
    engine.add("b", prompt, 1, params=params)
    run(engine, mirror)
    assert mirror.events[2:] == before


@pytest.mark.parametrize(
    ("layout", "tiers"),
    [
        ("full", {"num_host": 40}),
        ("full", {"num_files": 25}),
        ("full", {"num_host": 9, "num_files": 60}),
        ("full and window", {"num_host": 50, "num_files": 70}),
        ("state", {"num_host": 50, "num_files": 70}),
    ],
)
def test_lower_tiers_report_copies(layout: str, tiers: dict[str, int]) -> None:
    engine = TieredEngine(num_blocks=30, layout=layout, max_num_seqs=2, salted=True, **tiers)
    mirror = follow(engine.kv)
    assert engine.kv.events is not None
    for kind in engine.tiers.stores.kinds:
        for tier, medium in ((kind.host, "CPU"), (kind.disk, "STORAGE")):
            if tier is not None:
                engine.kv.events.watch(tier, medium)
    traffic(engine)
    run(engine, mirror)
    traffic(engine := renamed(engine))
    run(engine, mirror)
    stored = [event for event in mirror.events if event["type"] == "BlockStored"]
    assert {event["medium"] for event in stored} == {medium for medium, _, _ in mirror.blocks}
    assert engine.copier.num_loaded, "nothing came back from a lower tier"
    assert engine.core.reset_prefix_cache()
    assert mirror.blocks == expected(engine) and mirror.blocks, "lower tiers survive a reset"
    assert engine.core.reset_prefix_cache(external=True)
    assert not mirror.blocks


def renamed(engine: TieredEngine) -> TieredEngine:
    """Return the engine, ready for requests with the same ids as before."""
    engine.seen.clear()
    engine.reasons.clear()
    return engine


def test_blocks_of_a_failed_step_are_removed() -> None:
    class FailsOnce(BreakableWorker):
        has_failed = False

        def breaks(self, plan: StepPlan) -> bool:
            breaks, self.has_failed = not self.has_failed and len(plan.rows) > 1, True
            return breaks

    engine = Engine()
    engine.use(FailsOnce)
    mirror = follow(engine.kv)
    engine.add("a", prompt_of(0, 9), 2)
    engine.add("b", prompt_of(1, 9), 2)
    engine.step()
    assert not mirror.blocks and kinds_of(mirror) == ["BlockStored", "BlockStored", "BlockRemoved"]
    run(engine, mirror)
    assert len(mirror.blocks) == 4


def test_adapters_salts_and_media_are_a_part_of_the_hash() -> None:
    library = FakeLoader()
    gate = LoRAScheduler(library, max_slots=2, max_read=2)
    engine = Engine(adapters=gate, max_num_batched_tokens=100, media=EncoderCache(size=64, max_encoded=64))
    engine.worker.host = library.host
    mirror, prompt = follow(engine.kv), prompt_of(0, 12)
    items = [
        MediaItem(modality="image", key=bytes([at]) * 32, offset=at, length=3, arrays=PIXELS) for at in (2, 6)
    ]
    engine.add("plain", prompt, 1)
    engine.add("salted", prompt, 1, cache_salt="pepper")
    engine.add("adapted", prompt, 1, lora=lora("sql"), cache_salt="sql")
    engine.add("image", prompt, 1, media=Media(items))
    engine.add("whole", prompt, 1, media=Media(items[:1]).joined(prompt))
    run(engine, mirror)
    extra_keys = [event.get("extra_keys") for event in mirror.events]
    image, other = ("02" * 32, "06" * 32)
    assert extra_keys[:4] == [
        None,
        [["pepper"], None, None],
        [["sql", "sql"], ["sql"], ["sql"]],
        [[[image, 2]], [[image, -2], [other, 2]], [[other, -2]]],
    ]
    assert extra_keys[4][0][1:] == [[image, 2]] and len(extra_keys[4][0][0]) == 32
    adapted = mirror.events[2]
    assert (adapted["lora_name"], adapted["lora_id"]) == ("sql", 1)
    assert adapted["lora_digest"] == digest("/adapters/sql").hex()
    assert len(mirror.blocks) == 15, "no two of them share a block"


def test_the_hash_is_what_the_documentation_says() -> None:
    tokens = [1, 70000, 3, 4]
    root = hashlib.sha256(b"adapter:" + b"\7" * 32 + b"salt:pepper").digest()
    assert root_hash(b"\7" * 32, "pepper") == root and root_hash() == hashlib.sha256(b"").digest()
    first = hashlib.sha256(root + struct.pack("<2i", 1, 70000)).digest()
    extra = struct.pack("<iI", -1, 2) + b"\xab\xcd" + b"raw"
    second = hashlib.sha256(first + struct.pack("<2i", 3, 4) + extra).digest()
    extra_keys = [["sql", "pepper"], [("abcd", 1), b"raw"]]
    assert block_hashes([*tokens, 5], 2, parent=root, extra_keys=extra_keys) == [first, second]
    assert short_hash(second) == int.from_bytes(second, "big") % 2**64


def plain(**settings: Any) -> list[Any]:
    """Return the events of a batch, decoded."""
    stored = BlockStored(
        [b"\1" * 32 + b"salt"], b"\2" * 32, np.array([5, 6], np.int32), 2, None, "GPU", None, group_idx=0
    )
    events = [stored, BlockRemoved([b"\1" * 32], "CPU"), AllBlocksCleared()]
    at, decoded, rank = msgspec.msgpack.decode(EventEncoder(rank=3, **settings).encode(1.5, events))
    assert (at, rank) == (1.5, 3)
    return decoded  # type: ignore[no-any-return]


def test_events_are_maps_or_arrays() -> None:
    one, two = (int.from_bytes(bytes([byte]) * 8, "big") for byte in (1, 2))
    stored = {"block_hashes": [one], "parent_block_hash": two, "token_ids": [5, 6], "block_size": 2}
    stored |= {"lora_id": None, "medium": "GPU", "lora_name": None}
    assert plain() == [
        {"type": "BlockStored", **stored, "group_idx": 0},
        {"type": "BlockRemoved", "block_hashes": [one], "medium": "CPU"},
        {"type": "AllBlocksCleared"},
    ]
    assert plain(as_arrays=True) == [
        ["BlockStored", *stored.values(), None, 0],
        ["BlockRemoved", [one], "CPU"],
        ["AllBlocksCleared"],
    ]
    assert plain(short_hashes=False)[0]["block_hashes"] == [b"\1" * 32]
