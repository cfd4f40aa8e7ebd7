"""Tests of the processor caches: items are found by key, bytes are bounded, API process and core evict in the
same order."""

import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from fake_inputs import FakeProcessor, data_url, file_of, image_part, inputs, media, picture

from quire.config.data_parallel import lay_out
from quire.config.mm_caches import cache_kind
from quire.config.sections import MultimodalSection, ParallelSection
from quire.configure import configure
from quire.data.cache_scope import CACHE_SCOPE
from quire.data.lru import Lru
from quire.data.multimodal import Array, Media, MediaItem
from quire.errors import RequestError
from quire.frontend.chat import chat_prompt
from quire.frontend.inputs import Prompt
from quire.frontend.multimodal import MediaInputReader
from quire.multimodal import processing
from quire.multimodal.processor_cache import ProcessorCache, SharedProcessorCache
from quire.multimodal.processors import ProcessedItem
from quire.sched.mm_receiver_cache import ReceiverCache
from quire.system.shared_cache import SharedCache, create_shared_memory

encode_media = msgspec.msgpack.Encoder().encode
decode_media = msgspec.msgpack.Decoder(Media).decode
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def prompt_with(reader: MediaInputReader, *parts: dict[str, Any], **options: Any) -> Prompt:
    return chat_prompt(
        inputs(reader), [{"role": "user", "content": list(parts)}], chat_template=TEMPLATE, **options
    )


def image_of(number: int) -> dict[str, Any]:
    return image_part(data_url(file_of(picture(16, 16, seed=number))))


def seen_by(reader: MediaInputReader) -> int:
    """Return the number of items that the processor has processed."""
    processor = reader._media_processor.processor  # type: ignore[union-attr]
    assert isinstance(processor, FakeProcessor)
    return len(processor.seen)


@pytest.mark.parametrize(
    ("api", "parallel", "kind", "gb", "expected"),
    [
        (None, {}, "lru", 4.0, "replicated"),
        (1, {}, "shm", 4.0, "shm"),
        (2, {}, "lru", 4.0, "shared"),
        (2, {}, "shm", 4.0, "shared"),
        (1, {"data_parallel_size": 2}, "lru", 4.0, "processor"),
        (None, {"data_parallel_size": 2}, "shm", 4.0, "shared"),
        (4, {"data_parallel_size": 2}, "lru", 4.0, "shared"),
        (1, {"data_parallel_size": 2, "data_parallel_rank": 1}, "lru", 4.0, "replicated"),
        (1, {"data_parallel_size": 2, "data_parallel_rank": 0}, "shm", 0.5, "shm"),
        (2, {"data_parallel_size": 2, "data_parallel_rank": 1}, "lru", 4.0, "shared"),
        (1, {"tensor_parallel_size": 2}, "lru", 4.0, "replicated"),
        (1, {"tensor_parallel_size": 2}, "shm", 8.0, "shm"),
        (1, {"tensor_parallel_size": 2, "nnodes": 2}, "shm", 8.0, "replicated"),
        (1, {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, "shm", 8.0, "replicated"),
        (None, {}, "lru", 0.0, "off"),
        (2, {"data_parallel_size": 2}, "shm", 0.0, "off"),
    ],
)
def test_cache_kind_follows_the_layout(
    api: int | None, parallel: dict[str, Any], kind: Any, gb: float, expected: str
) -> None:
    ranks = ParallelSection(device="cpu", cpu_threads=1, **parallel)
    laid_out = lay_out(ranks, headless=False, api_server_count=api)
    section = MultimodalSection(mm_processor_cache_type=kind, mm_processor_cache_gb=gb)
    result = cache_kind(section, ranks, num_api=laid_out.num_api, num_engines=len(laid_out.served))
    assert result == expected


@pytest.fixture
def shared_memory() -> Iterator[str]:
    fd = create_shared_memory(1 << 20)
    yield f"/proc/{os.getpid()}/fd/{fd}"
    os.close(fd)


@pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is Linux's")
def test_item_of_one_api_process_is_found_by_another(shared_memory: str) -> None:
    """Two caches with their own memory mappings stand for two API processes."""
    counted: list[tuple[int, int]] = []
    readers = [media(processor_cache=SharedProcessorCache(SharedCache(shared_memory))) for _ in range(2)]
    for reader in readers:
        reader.processor_cache.count = lambda queries, hits: counted.append((queries, hits))
    first, again = (prompt_with(reader, image_of(0)) for reader in readers)
    assert [seen_by(reader) for reader in readers] == [1, 0] and counted == [(1, 0), (1, 1)]
    assert first.media is not None and again.media is not None
    assert encode_media(first.media) == encode_media(again.media)
    with_uuid = image_of(1) | {"uuid": "a"}
    prompt_with(readers[0], with_uuid)
    prompt_with(readers[1], {"type": "image_url", "image_url": None, "uuid": "a"})
    assert len(readers[0].processor_cache) == len(readers[1].processor_cache) == 2
    token = CACHE_SCOPE.set("another tenant")
    prompt_with(readers[1], image_of(0))
    CACHE_SCOPE.reset(token)
    assert seen_by(readers[1]) == 1, "tenants do not share items"
    readers[0].processor_cache.clear()
    prompt_with(readers[1], image_of(0))
    assert seen_by(readers[1]) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is Linux's")
def test_item_larger_than_the_shared_cache_is_served(
    shared_memory: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = SharedProcessorCache(SharedCache(shared_memory))
    logging.getLogger("quire").addHandler(caplog.handler)
    large = ProcessedItem([1], arrays={"pixels": Array.of(np.zeros(1 << 20, np.uint8))})
    assert cache.put(b"a", b"b", large) is large and cache.find(b"a") is None
    logging.getLogger("quire").removeHandler(caplog.handler)
    assert "is larger than mm_processor_cache_gb (1.0 MiB) and is not cached" in caplog.text


def test_shm_object_size_needs_the_shm_cache() -> None:
    with pytest.raises(ValueError, match="mm_shm_cache_max_object_size_mb=64 is for mm_processor_cache_type"):
        configure({"mm_shm_cache_max_object_size_mb": 64})


def test_cache_hit_is_neither_decoded_nor_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[str] = []
    decode = processing.decode

    def counting(modality: str, *args: Any, **options: Any) -> Any:
        decoded.append(modality)
        return decode(modality, *args, **options)

    monkeypatch.setattr(processing, "decode", counting)
    counted: list[tuple[int, int]] = []
    processor_cache = ProcessorCache(1 << 20)
    processor_cache.count = lambda queries, hits: counted.append((queries, hits))
    reader = media(processor_cache=processor_cache)
    first = prompt_with(reader, image_of(0), image_of(1))
    again = prompt_with(reader, image_of(1), image_of(0))
    assert len(decoded) == seen_by(reader) == 2
    assert sorted(counted) == [(1, 0), (1, 0), (1, 1), (1, 1)]
    assert first.media is not None and again.media is not None
    for item in again.media.items:
        (same,) = [entry for entry in first.media.items if entry.key == item.key]
        assert item.arrays is same.arrays is not None and item.runs == same.runs
    prompt_with(reader, image_of(0), mm_processor_kwargs={"side": 8})  # a different item
    assert seen_by(reader) == 3
    processor_cache.clear()
    prompt_with(reader, image_of(0))
    assert seen_by(reader) == 4


@pytest.mark.parametrize(("max_bytes", "hits"), [(1 << 20, 2), (0, 0)])
def test_repeated_image_in_a_prompt_is_processed_once(max_bytes: int, hits: int) -> None:
    """With and without a cache, a repeated image is processed once; each occurrence is looked up by
    itself."""
    counted: list[tuple[int, int]] = []
    processor_cache = ProcessorCache(max_bytes)
    processor_cache.count = lambda queries, entry: counted.append((queries, entry))
    reader = media(processor_cache=processor_cache)
    prompt = prompt_with(reader, image_of(0), image_of(1), image_of(0), image_of(0))
    assert seen_by(reader) == 2 and prompt.media is not None
    first, other, *same = [item.key for item in prompt.media.items]
    assert same == [first, first] and other != first
    assert (len(counted), sum(result for _, result in counted)) == ((4, hits) if max_bytes else (0, 0))


def test_cached_uuid_needs_no_content() -> None:
    reader = media(processor_cache=ProcessorCache(1 << 20))
    empty = {"type": "image_url", "image_url": None, "uuid": "cat"}
    with pytest.raises(RequestError, match="nothing is cached for the uuid 'cat'"):
        prompt_with(reader, empty)
    first = prompt_with(reader, image_of(0) | {"uuid": "cat"})
    again = prompt_with(reader, empty)
    gone = prompt_with(reader, image_part("http://nobody.invalid/cat.png", uuid="cat"))
    assert first.token_ids == again.token_ids == gone.token_ids
    assert seen_by(reader) == 1


def test_nothing_is_cached_without_room(caplog: pytest.LogCaptureFixture) -> None:
    reader = media(processor_cache=ProcessorCache(0))
    for _ in range(2):
        prompt_with(reader, image_of(0))
    assert seen_by(reader) == 2 and not caplog.records
    reader = media(processor_cache=ProcessorCache(2000))
    small, large = image_of(0), image_part(data_url(file_of(picture(64, 64))))
    with caplog.at_level(logging.WARNING, "quire"):
        for _ in range(2):
            prompt_with(reader, small, large)
    assert seen_by(reader) == 3
    assert "larger than mm_processor_cache_gb" in caplog.text


def test_lru_is_bounded() -> None:
    """The oldest entries of a cache are evicted first, and their bytes are counted correctly."""
    random, kept = np.random.default_rng(0), Lru[int](10_000)
    expected: dict[bytes, int] = {}
    for number in range(10_000):
        key, size = bytes([int(random.integers(0, 200))]), int(random.integers(1, 12_000) // 4)
        if random.random() < 0.4:
            assert (kept.get(key) is not None) == (key in expected)
            if key in expected:
                expected[key] = expected.pop(key)
            continue
        assert kept.put(key, number, size)
        expected.pop(key, None)
        expected[key] = size
        while sum(expected.values()) > kept.max_bytes:
            del expected[next(iter(expected))]
        assert kept.num_bytes == sum(expected.values()) <= kept.max_bytes and len(kept) == len(expected)
    assert not kept.put(b"large", 0, 10_001) and b"large" not in kept
    processor_cache = ProcessorCache(60_000)
    reader = media(processor_cache=processor_cache)
    for number in range(60):
        prompt_with(reader, image_of(number % 50))
        assert processor_cache.num_bytes <= 60_000
    assert 10 < len(processor_cache) < 50


def test_both_sides_keep_the_same_items() -> None:
    """Random items come in random requests, some of them twice, and the receiver's cache is cleared at times.
    No item that the receiver has is sent again; an item that was not sent is cached there or requested
    again."""
    random = np.random.default_rng(0)
    processor_cache, receiver_cache = ProcessorCache(20_000, replicated=True), ReceiverCache(20_000)
    arrays = {
        bytes([n]): {"numbers": Array.of(np.full(int(random.integers(0, 3000)), n, np.uint8))}
        for n in range(60)
    }
    num_sent = num_missing = 0
    for turn in range(1000):
        keys = [bytes([n]) for n in (random.normal(30, 8, random.integers(1, 5)).astype(int) % 60)]
        whole = Media([MediaItem(modality="image", key=k, offset=n, length=1) for n, k in enumerate(keys)])
        for item in whole.items:
            item.arrays = None if item.key in processor_cache._core_keys else arrays[item.key]
        assert not processor_cache.lacks(whole)
        got = decode_media(encode_media(processor_cache.outgoing(whole)))
        num_sent += sum(item.arrays is not None for item in got.items)
        if turn % 200 == 150:
            receiver_cache.clear()
        if not receiver_cache.fill(got):
            num_missing += 1
            processor_cache.clear_core_keys()
            for item in whole.items:
                item.arrays = arrays[item.key]
            got = decode_media(encode_media(processor_cache.outgoing(whole, all_arrays=True)))
            assert receiver_cache.fill(got)
        for item in got.items:
            assert item.arrays is not None
            assert (item.arrays["numbers"].numbers() == item.key[0]).all()
        assert receiver_cache.num_bytes <= 20_000
    assert 0 < num_missing <= 5 and 100 < num_sent < 2000
