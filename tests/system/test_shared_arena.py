"""Objects in shared memory: bounded, read where they lie, overwritten when nobody has them any more."""

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


def test_what_was_put_is_read_by_others() -> None:
    arena, window, borrower = SharedArena(1 << 16, 1 << 12), ArenaView(), ArenaReader()
    datas = [os.urandom(n) for n in (0, 1, 63, 64, 1000)]
    kept = [shared(arena, arena.put(data)) for data in datas]
    for stored, data in zip(kept, datas, strict=True):
        sent = travelled(stored)
        assert borrower.take(sent) and sent.memory != stored.memory
        for way in (stored, sent):
            assert bytes(window.read(way)) == data == bytes(arena.read(stored))
    assert arena.put(bytes(4096)) is None, "with its head it is larger than one may be"
    with pytest.raises(EngineError, match="was overwritten"):
        window.read(StoredArrays(arena.path, kept[1].start, 1, 77))
    assert not borrower.take(StoredArrays("/proc/1/fd/999999", 0, 1, 0))


def test_nothing_is_overwritten_that_somebody_has() -> None:
    """Here, or on the far side, which lets go of it between two turns."""
    arena, borrower = SharedArena(256, 256), ArenaReader()
    parcel = arena.put(bytes(200))
    assert parcel is not None
    stored = shared(arena, parcel)
    for _ in range(2):
        arena.send(stored)
    sent = [travelled(stored), travelled(stored)]
    assert all(borrower.take(each) for each in sent)
    arena.drop(parcel)
    del stored
    for num_left in (2, 1):
        assert arena.put(bytes(200)) is None and arena.num_busy == 1
        del sent[0]
        borrower.settle()
        assert len(sent) == num_left - 1
    assert arena.share(parcel) is not None, "nobody has come since"
    assert arena.put(bytes(200)) is not None
    assert arena.share(parcel) is None


def test_the_dead_have_nothing() -> None:
    arena = SharedArena(256, 256)
    parcel = arena.put(bytes(200))
    assert parcel is not None
    arena.send(shared(arena, parcel))
    arena.drop(parcel)
    assert arena.put(bytes(200)) is None
    arena.lose_far()
    assert arena.put(bytes(200)) is not None


def test_an_owner_that_comes_again_has_other_memory() -> None:
    """The old one is let go of when nobody has anything of it, and not before."""
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


def test_a_larder_in_shared_memory_is_bounded() -> None:
    """Thousands of items of mixed sizes, requests that come and go in any order, an engine that dies now and
    then. Whatever is read is what was put; what is found moves no bytes; all is let go of in the end."""
    chance, size = random.Random(0), 60_000
    arena = SharedArena(size, 9_000)
    processor_cache, borrower, window = ProcessorCache(size, arena=arena), ArenaReader(), ArenaView()
    sizes = [chance.choice((10, 300, 2000, 8000, 12_000)) + number % 7 for number in range(120)]
    here: list[tuple[int, MediaItem, Media]] = []
    num_found = num_large = 0
    for turn in range(2500):
        number = min(int(chance.expovariate(1 / 25)), 119)
        key = b"%d" % number
        if (found := processor_cache.find(key)) is None:
            processed = processor_cache.keep(
                key, key, ProcessedItem([1], arrays=arrays_of(number, sizes[number]))
            )
        else:
            num_found += 1
            processed = found[1]
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
            here, borrower = [], ArenaReader()  # a dead one says nothing
            processor_cache.lose_far()
        for wanted, _asked, media in here:
            (each,) = media.items
            arrays = each.arrays if each.stored is None else unpack(window.read(each.stored))
            assert arrays is not None and (arrays["numbers"].numbers() == wanted % 256).all()
        assert arena.num_bytes <= size and processor_cache.num_bytes <= size
    assert num_found > 500 and num_large
    here.clear()
    del item, processed, found, got, _asked, media, each, arrays
    borrower.settle()
    assert not arena.num_busy
    processor_cache.clear()
    assert not arena.num_bytes and arena._free == [(0, size // 64 * 64)]


def test_a_core_that_cannot_read_it_is_sent_the_arrays() -> None:
    processor_cache = ProcessorCache(10_000, arena=SharedArena(10_000, 10_000))
    processed = processor_cache.keep(b"a", b"a", ProcessedItem([1], arrays=arrays_of(3, 5000)))
    assert processed.arrays is None and processed.stored is not None
    media = Media([MediaItem(modality="image", key=b"a", offset=0, length=1, stored=processed.stored)])
    assert not processor_cache.lacks(media)
    for whole in (True, False):
        (item,) = decode_media(msgspec.msgpack.encode(processor_cache.outgoing(media, whole=whole))).items
        assert item.stored is None and (item.arrays["numbers"].numbers() == 3).all()


OWNER = """
    import sys
    from quire.system.shared_arena import SharedArena
    arena = SharedArena(1 << 20, 1 << 20)
    stored = arena.share(arena.put(b"seen" * 1000))
    print(stored.memory, stored.start, stored.length, stored.generation, flush=True)
    sys.stdin.read()
"""


def test_an_owner_that_is_killed_leaves_nothing_but_what_others_have() -> None:
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
