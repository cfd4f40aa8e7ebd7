"""Media that are small as files and large in memory (CVE-2026-22773, CVE-2026-22778, CVE-2026-34755): the
memory to decode an item is computed from its header, and only a limited amount is decoded at once."""

import asyncio
import io
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from ask import CHAT, ask, refused
from fake_inputs import data_url, engine_with_media, file_of, huge_png, image_part, media, picture, wav
from PIL import Image

from quire.errors import RequestError
from quire.frontend.multimodal import MediaInputReader
from quire.multimodal.byte_budget import ByteBudget
from quire.multimodal.decode import DecodeLimits, decode
from quire.multimodal.fetch import Blob
from quire.multimodal.image_files import to_rgb
from quire.multimodal.inputs import MediaInput, MediaLink
from quire.multimodal.video import _begin_size

SIDE = 200


def flat(mode: str) -> Image.Image:
    return Image.new(mode, (SIDE, SIDE))


def reserved_bytes(modality: str, data: bytes, **options: Any) -> int:
    counts: list[int] = []
    decode(modality, Blob((data,)), options, DecodeLimits(10**6, take=counts.append))
    return sum(counts)


@pytest.mark.parametrize(
    ("mode", "form", "num_bytes"),
    [("RGB", "PNG", 4), ("RGBA", "PNG", 8), ("LA", "PNG", 12), ("L", "PNG", 5), ("I;16", "PNG", 7),
     ("CMYK", "JPEG", 8), ("RGB", "WEBP", 17), ("RGB", "BMP", 4)],
)  # fmt: skip
def test_image_memory_is_reserved_before_decoding(mode: str, form: str, num_bytes: int) -> None:
    assert reserved_bytes("image", file_of(flat(mode), form)) == SIDE * SIDE * num_bytes


def test_image_without_room_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = huge_png(13_000, 13_000)
    assert len(data) < 1 << 20
    Image.init()  # the import of a plugin loads an image
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("it was decoded"))

    def refuse(num_bytes: int) -> None:
        assert num_bytes >= 13_000 * 13_000
        raise RequestError("no room")

    with pytest.raises(RequestError, match="no room"):
        decode("image", Blob((data,)), {}, DecodeLimits(10**9, take=refuse))


def test_rotated_image_reserves_both_copies() -> None:
    exif = Image.Exif()
    exif[0x112] = 6
    assert reserved_bytes("image", file_of(flat("RGB"), "JPEG", exif=exif.tobytes())) == SIDE * SIDE * 8


def test_animation_memory_is_reserved_before_decoding() -> None:
    frames = [picture(20, 10, seed=seed).quantize() for seed in range(6)]
    film = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert reserved_bytes("video", film, num_frames=6) == 20 * 10 * (6 * 3 + 20)
    assert reserved_bytes("video", film, num_frames=2) == 20 * 10 * (2 * 3 + 20)


def test_frames_larger_than_the_header_reserve_more() -> None:
    counts: list[int] = []
    limits = DecodeLimits(100 * 100, take=counts.append)
    largest = _begin_size(0, 10, 10, limits)
    for width, height in ((10, 10), (20, 10), (10, 10), (20, 10)):
        largest = _begin_size(largest, width, height, limits)
    assert counts == [100 * 24, 100 * 24] and largest == 200
    with pytest.raises(RequestError, match="101 x 100 are 10100 pixels"):
        _begin_size(largest, 101, 100, limits)


def test_audio_memory_is_reserved_before_decoding() -> None:
    assert reserved_bytes("audio", wav(np.zeros((500, 2), np.int16))) == 500 * 2 * 8


def test_16_bit_grey_images_are_never_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """If they were widened to 64 bits, they would take ten times the memory of the image."""
    numbers = np.arange(600 * 300, dtype=np.uint32).reshape(600, 300) * 0x9E37 % 65536
    grey = Image.fromarray(numbers.astype(np.uint16))
    sizes: list[int] = []
    fromarray = Image.fromarray

    def noting(array: Any) -> Image.Image:
        sizes.append(array.nbytes)
        return fromarray(array)

    monkeypatch.setattr(Image, "fromarray", noting)
    rgb = np.asarray(to_rgb(grey))
    assert (rgb == (numbers >> 8)[..., None]).all() and max(sizes) < 600 * 300
    wide = fromarray((numbers * 4096).astype(np.int32))
    expected = ((numbers * 4096).astype(np.int32) >> 8).clip(0, 255)
    assert (np.asarray(to_rgb(wide)) == expected[..., None]).all()
    small = fromarray((numbers % 256).astype(np.int32))
    assert (np.asarray(to_rgb(small)) == (numbers % 256)[..., None]).all()


def test_icon_with_a_false_size_is_refused() -> None:
    """Pillow relies on the sizes in the file's directory, and then decodes the image itself, however large it
    is."""
    file = io.BytesIO()
    Image.new("RGBA", (32, 32)).save(file, "ICO", sizes=[(32, 32)])
    good = file.getvalue()
    assert decode("image", Blob((good,)), {}, DecodeLimits(10**6))
    png = huge_png(9000, 9000)
    bad = struct.pack("<HHHBBBBHHII", 0, 1, 1, 32, 32, 0, 0, 1, 32, len(png), 22) + png
    with pytest.raises(RequestError, match="another size than its directory has"):
        decode("image", Blob((bad,)), {}, DecodeLimits(10**9))


# ---- all items together


def reader(num_bytes: int) -> MediaInputReader:
    """Return a reader that may use this many bytes to decode."""
    return media(env={"media_max_mb": num_bytes / 4 / 2**20}, mm_processor_cache_gb=0)


async def test_concurrent_decodes_are_limited_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    eyes = reader(10 * SIDE * SIDE)  # room for two of them
    assert eyes._media_processor is not None
    processor, lock = eyes._media_processor.processor, threading.Lock()
    running, most, process = 0, 0, processor.process
    both = threading.Barrier(2, timeout=60)

    def slowly(*args: Any) -> Any:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        both.wait()  # a third would break the barrier, and one alone would not pass it
        with lock:
            running -= 1
        return process(*args)

    monkeypatch.setattr(processor, "process", slowly)
    files = [file_of(Image.new("RGB", (SIDE, SIDE), (seed, 0, 0))) for seed in range(8)]
    items = [MediaInput("image", MediaLink(data_url(file)), "here") for file in files]
    async with asyncio.timeout(60):
        await asyncio.gather(*(eyes.prepare([item]) for item in items))
    assert most == 2 and eyes._media_processor._decoding._left == 10 * SIDE * SIDE


def test_item_larger_than_the_whole_budget_is_400() -> None:
    url = data_url(file_of(flat("RGB")))
    engine = engine_with_media(reader(3 * SIDE * SIDE))
    body = {"messages": [{"role": "user", "content": [image_part(url)]}]}
    message = refused(ask("POST", CHAT, engine=engine, json=body))["message"]
    assert f"at least {4 * SIDE * SIDE} bytes" in message and f"may use {3 * SIDE * SIDE}" in message
    assert "QUIRE_MEDIA_MAX_MB" in message and "smaller" in message
    assert ask("POST", CHAT, engine=engine_with_media(reader(4 * SIDE * SIDE)), json=body).status_code == 200


def test_threads_that_reserve_piecewise_do_not_deadlock() -> None:
    """Two threads that have reserved bytes and wait for more would deadlock if the oldest could not
    continue."""
    room, start = ByteBudget(10), threading.Barrier(4, timeout=30)

    def one() -> int:
        with room.hold() as hold:
            start.wait()
            for _ in range(3):
                hold.take_blocking(3)
            return hold.num_bytes

    with ThreadPoolExecutor(4) as pool:
        works = [pool.submit(one) for _ in range(4)]
        assert [work.result(timeout=60) for work in works] == [9] * 4
    assert room._left == 10 and not room._holds


def test_memory_is_released_when_decoding_fails() -> None:
    eyes = reader(10 * SIDE * SIDE)
    assert eyes._media_processor is not None
    broken = file_of(flat("RGB"))[:-60]
    for _ in range(5):
        with pytest.raises(RequestError, match="broken or truncated"):
            eyes.prepare_sync([MediaInput("image", MediaLink(data_url(broken)), "here")])
    assert eyes._media_processor._decoding._left == 10 * SIDE * SIDE
