"""Tests of objects in shared memory: bounded, read in place, overwritten when unused."""

import os
import random
import subprocess
import sys
import textwrap

import msgspec
import numpy as np
import pytest

from quire.data.multimodal import Array, Arrays, Media, MediaItem, StoredArrays, unpack
from quire.errors import EngineError
from quire.multimodal.processor_cache import ProcessorCache
from quire.multimodal.processors import ProcessedItem
from quire.sched.mm_receiver_cache import ReceiverCache
from quire.system.shared_arena import ArenaReader, ArenaView, SharedArena, SharedObject

decode_media = msgspec.msgpack.Decoder(Media).decode


def shared(arena: SharedArena, parcel: SharedObject | None) -> StoredArrays:
    assert parcel is not None
    stored = arena.share(parcel)
    assert stored is not None
    return stored


def travelled(stored: StoredArrays) -> StoredArrays:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(stored), type=StoredArrays)


def test_object_is_read_by_other_processes() -> None:
    arena, window, borrower = SharedArena(1 << 16, 1 << 12), ArenaView(), ArenaReader()
    datas = [os.urandom(n) for n in (0, 1, 63, 64, 1000)]
    kept = [shared(arena, arena.put(data)) for data in datas]
    for stored, data in zip(kept, datas, strict=True):
        sent = travelled(stored)
        assert borrower.take(sent) and sent.memory != stored.memory
        for way in (stored, sent):
            assert bytes(window.read(way)) == data == bytes(arena.read(stored))
    assert arena.put(bytes(4096)) is None, "with its header it exceeds the limit of an object"
    with pytest.raises(EngineError, match="was overwritten"):
        window.read(StoredArrays(arena.path, kept[1].start, 1, 77))
    assert not borrower.take(StoredArrays("/proc/1/fd/999999", 0, 1, 0))


def test_objects_in_use_are_not_overwritten() -> None:
    """Check users in this process, and in the other one, which releases between two steps."""
    arena, borrower = SharedArena(256, 256), ArenaReader()
    parcel = arena.put(bytes(200))
    assert parcel is not None
    stored = shared(arena, parcel)
    for _ in range(2):
        arena.send(stored)
    sent = [travelled(stored), travelled(stored)]
    assert all(borrower.take(item) for item in sent)
    arena.drop(parcel)
    del stored
    for num_left in (2, 1):
        assert arena.put(bytes(200)) is None and arena.num_busy == 1
        del sent[0]
        borrower.settle()
        assert len(sent) == num_left - 1
    assert arena.share(parcel) is not None, "no object was stored since"
    assert arena.put(bytes(200)) is not None
    assert arena.share(parcel) is None


def test_dead_processes_release_everything() -> None:
    arena = SharedArena(256, 256)
    parcel = arena.put(bytes(200))
    assert parcel is not None
    arena.send(shared(arena, parcel))
    arena.drop(parcel)
    assert arena.put(bytes(200)) is None
    arena.reset_receiver()
    assert arena.put(bytes(200)) is not None


def test_restarted_owner_has_new_memory() -> None:
    """Check that the old memory is released when no object of it is in use, and not before."""
    borrower, window = ArenaReader(), ArenaView()
    arenas = [SharedArena(256, 256), SharedArena(256, 256)]
    first, second = (travelled(shared(arena, arena.put(bytes([n] * 9)))) for n, arena in enumerate(arenas))
    assert borrower.take(first) and borrower.take(second)
    del arenas[0]
    borrower.settle()
    for _ in range(2):
        assert bytes(window.read(first)) == bytes(9) and bytes(window.read(second)) == bytes([1] * 9)
    path = first.memory
    assert "quire-media" in os.readlink(path)
    del first
    borrower.settle()
    assert not os.path.exists(path) and bytes(window.read(second)) == bytes([1] * 9)


def arrays_of(number: int, size: int) -> Arrays:
    return {"numbers": Array.of(np.full(size, number % 256, np.uint8))}


def test_media_cache_in_shared_memory_is_bounded() -> None:
    """Check thousands of items of mixed sizes, requests in any order, and engines that die.

    Every read returns what was stored, hits copy no bytes, and everything is released in the end.
    """
    chance, size = random.Random(0), 60_000
    arena = SharedArena(size, 9_000)
    processor_cache, borrower, window = ProcessorCache(size, arena=arena), ArenaReader(), ArenaView()
    sizes = [chance.choice((10, 300, 2000, 8000, 12_000)) + number % 7 for number in range(120)]
    here: list[tuple[int, MediaItem, Media]] = []
    num_found = num_large = 0
    for turn in range(2500):
        number = min(int(chance.expovariate(1 / 25)), 119)
        key = b"%d" % number
        if (actual := processor_cache.find(key)) is None:
            processed = processor_cache.put(
                key, key, ProcessedItem([1], arrays=arrays_of(number, sizes[number]))
            )
        else:
            num_found += 1
            processed = actual[1]
        item = MediaItem(
            modality="image", key=key, offset=0, length=1, arrays=processed.arrays, stored=processed.stored
        )
        message = msgspec.msgpack.encode(processor_cache.outgoing(Media([item])))
        if item.stored is not None:
            assert len(message) < 200
        num_large += len(message) > 9_000
        got = decode_media(message)
        assert ReceiverCache(take=borrower.take).fill(got)
        here.append((number, item, got))
        if chance.random() < 0.6 or len(here) > 8:
            del here[chance.randrange(len(here))]
        borrower.settle()
        if turn % 500 == 499:
            here, borrower = [], ArenaReader()  # a dead engine releases nothing
            processor_cache.reset_core()
        for wanted, _asked, media in here:
            (entry,) = media.items
            arrays = entry.arrays if entry.stored is None else unpack(window.read(entry.stored))
            assert arrays is not None and (arrays["numbers"].numbers() == wanted % 256).all()
        assert arena.num_bytes <= size and processor_cache.num_bytes <= size
    assert num_found > 500 and num_large
    here.clear()
    del item, processed, actual, got, _asked, media, entry, arrays
    borrower.settle()
    assert not arena.num_busy
    processor_cache.clear()
    assert not arena.num_bytes and arena._free == [(0, size // 64 * 64)]


def test_core_without_shared_memory_gets_the_arrays() -> None:
    arena = SharedArena(10_000, 10_000)
    processor_cache = ProcessorCache(10_000, arena=arena)
    processed = processor_cache.put(b"a", b"a", ProcessedItem([1], arrays=arrays_of(3, 5000)))
    assert processed.arrays is None and processed.stored is not None
    media = Media([MediaItem(modality="image", key=b"a", offset=0, length=1, stored=processed.stored)])
    assert not processor_cache.lacks(media)
    assert not ReceiverCache().fill(decode_media(msgspec.msgpack.encode(processor_cache.outgoing(media))))
    for full in (True, False):
        (item,) = decode_media(msgspec.msgpack.encode(processor_cache.outgoing(media, all_arrays=full))).items
        assert item.stored is None and (item.arrays["numbers"].numbers() == 3).all()
    assert arena.num_busy == 1
    del processed, media
    assert not arena.num_busy


OWNER = """
    import sys
    from quire.system.shared_arena import SharedArena
    arena = SharedArena(1 << 20, 1 << 20)
    stored = arena.share(arena.put(b"seen" * 1000))
    print(stored.memory, stored.start, stored.length, stored.generation, flush=True)
    sys.stdin.read()
"""


def test_killed_owner_leaves_only_memory_in_use() -> None:
    before = set(os.listdir("/dev/shm"))
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OWNER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None and owner.stdin is not None
    memory, *numbers = owner.stdout.readline().split()
    borrower, window = ArenaReader(), ArenaView()
    stored, late = (StoredArrays(memory, *map(int, numbers)) for _ in range(2))
    assert borrower.take(stored)
    owner.kill()
    owner.wait()
    owner.stdin.close()
    owner.stdout.close()
    assert bytes(window.read(stored)) == b"seen" * 1000
    assert not borrower.take(late)
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "quire" in name}
