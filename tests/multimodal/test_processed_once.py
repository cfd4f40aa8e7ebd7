"""Tests of repeated items: they are identified by their text, not decoded again, and never confused."""

import asyncio
import base64
import contextlib
import gc
from typing import Any

import numpy as np
import pytest
from fake_inputs import data_url, file_of, media, picture, wav

from quire.errors import RequestError
from quire.frontend.multimodal import MediaInputReader
from quire.multimodal.fetch import Fetcher
from quire.multimodal.inputs import Base64Media, MediaInput, MediaLink
from quire.multimodal.processor_cache import ProcessorCache

URL = data_url(file_of(picture(32, 32)))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the lengths of the texts that were decoded from base64."""
    results: list[int] = []
    decode = Fetcher.decode_base64

    def counting(self: Fetcher, text: str) -> bytes:
        results.append(len(text))
        return decode(self, text)

    monkeypatch.setattr(Fetcher, "decode_base64", counting)
    return results


def caching_reader(max_bytes: int = 1 << 20, **options: Any) -> MediaInputReader:
    return media(processor_cache=ProcessorCache(max_bytes), **options)


def image(url: str = URL, **more: Any) -> MediaInput:
    return MediaInput("image", MediaLink(url), "here", "image_url", **more)


def keys(reader: MediaInputReader, *items: MediaInput, **how: Any) -> list[bytes]:
    return [item.key for item in reader.prepare_sync(items, **how)]


def test_same_text_is_decoded_once(decoded: list[int]) -> None:
    reader = caching_reader()
    assert keys(reader, image()) == keys(reader, image()) == keys(reader, image(), image())[1:]
    assert len(decoded) == 1
    sound = base64.b64encode(wav(np.zeros((50, 1), np.int16))).decode()
    for _ in range(2):
        reader.prepare_sync([MediaInput("audio", Base64Media(sound), "here")])
    assert len(decoded) == 2


def test_other_reading_options_give_another_item(decoded: list[int]) -> None:
    """Equal texts with different options are all decoded; only some of them give the same item."""
    reader = caching_reader()
    (plain,) = keys(reader, image())
    (other,) = keys(reader, image(data_url(file_of(picture(32, 32, seed=1)))))
    (smaller,) = keys(reader, image(), arguments={"side": 8})
    (opaque,) = keys(reader, image(), reading={"image": {"rgba_background_color": [1, 2, 3]}})
    (named,) = keys(reader, image(uuid="cat"))
    assert len({plain, other, smaller, opaque, named}) == len(decoded) == 5
    same = [
        keys(reader, image()),
        keys(reader, image(), arguments={"side": 8}),
        keys(reader, image(), reading={"image": {"rgba_background_color": [1, 2, 3]}}),
    ]
    assert same == [[plain], [smaller], [opaque]] and len(decoded) == 5
    with pytest.raises(RequestError):
        keys(reader, MediaInput("audio", MediaLink(URL), "here"))
    assert keys(reader, image(URL.replace("image/png", "image/jpeg"))) == [plain] and len(decoded) == 7
    assert keys(caching_reader(), image()) == [plain] and len(decoded) == 8


def test_same_base64_differs_as_url_and_as_file(decoded: list[int]) -> None:
    reader = caching_reader()
    reader.prepare_sync([image()])
    with pytest.raises(RequestError, match="base64"):
        reader.prepare_sync([MediaInput("image", Base64Media(URL), "here")])


def test_evicted_items_are_processed_again(decoded: list[int]) -> None:
    reader = caching_reader()
    first = keys(reader, image())
    reader.processor_cache.clear()
    assert keys(reader, image()) == first and len(decoded) == 2
    nowhere = caching_reader(0)
    assert keys(nowhere, image()) == keys(nowhere, image()) == first and len(decoded) == 4


def test_cached_items_count_toward_the_limit() -> None:
    """Check that three items exceed the limit of a request, decoded or not, also after an eviction."""
    size = len(file_of(picture(32, 32)))
    reader = caching_reader(env={"media_max_mb": 2.5 * size / 2**20})
    with pytest.raises(RequestError, match=f"at least {3 * size} bytes") as new:
        keys(reader, image(), image(), image())
    assert len(keys(reader, image(), image())) == 2
    with pytest.raises(RequestError) as known:
        keys(reader, image(), image(), image())
    assert str(known.value) == str(new.value)
    reader.processor_cache.clear()
    assert len(keys(reader, image(), image())) == 2
    with pytest.raises(RequestError, match="about"):
        keys(reader, image(data_url(bytes(3 * size))))


def test_unreadable_text_is_refused_each_time(decoded: list[int]) -> None:
    reader = caching_reader()
    for wrong in ("data:image/png;base64,AAA", "data:image/png,AAAA", "data:image/png;base64,é", "data:"):
        for _ in range(2):
            with pytest.raises(RequestError):
                reader.prepare_sync([image(wrong)])


def test_refused_item_leaves_no_garbage() -> None:
    """Check that the file and the decoded data of a refused item are freed without the garbage collector."""
    reader, torn = caching_reader(), data_url(file_of(picture(64, 64))[:500])

    async def one(url: str) -> None:
        with contextlib.suppress(RequestError):
            await reader.prepare([image(url)])

    async def go() -> list[str]:
        for url in (URL, torn, "data:,"):
            await one(url)
        gc.collect()
        gc.disable()
        for url in (URL, torn, "data:,"):
            await one(url)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return [type(item).__name__ for item in gc.garbage]

    try:
        assert not {"MediaInput", "Blob", "PngImageFile", "Task"} & {*asyncio.run(go())}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_item_lost_by_the_core_is_decoded_again(decoded: list[int]) -> None:
    """The cached item has no arrays, so its text must be decoded again."""
    reader = media(processor_cache=ProcessorCache(1 << 20, replicated=True))

    async def go() -> None:
        (new,) = await reader.prepare([image()])
        _, sent = reader.place(_marks(reader), [new])
        reader.processor_cache.outgoing(sent)
        (known,) = await reader.prepare([image()])
        assert known.processed.arrays is None and len(decoded) == 1
        _, again = reader.place(_marks(reader), [known])
        reader.processor_cache.clear_core_keys()
        assert reader.processor_cache.lacks(again)
        await reader.restore_arrays(again, [known])
        made, first = again.items[0].arrays, new.processed.arrays
        assert made is not None and first is not None and len(decoded) == 2
        assert bytes(made["numbers"].data) == bytes(first["numbers"].data)

    asyncio.run(go())


def _marks(reader: MediaInputReader) -> list[int]:
    assert reader._media_processor is not None
    return list(reader._media_processor.processor.marks("image"))


def test_number_of_cached_texts_is_bounded(decoded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.multimodal.processing._TEXTS_BYTES", 1024)
    monkeypatch.setattr("quire.multimodal.processing._TEXT_BYTES", 512)
    reader = caching_reader()
    urls = [data_url(file_of(picture(8, 8, seed=seed))) for seed in range(3)]
    for url in (*urls, *urls[::-1]):
        keys(reader, image(url))
    assert len(decoded) == 4
