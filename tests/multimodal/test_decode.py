"""Tests of decoding: a file becomes an image, a video or audio, or is refused with one clear error."""

import contextlib
import io
import random
import struct
import sys
from typing import Any

import numpy as np
import pytest
from fake_inputs import file_of, huge_png, picture, wav
from PIL import Image

from quire.errors import RequestError
from quire.multimodal.decode import DecodeLimits, decode
from quire.multimodal.fetch import Blob
from quire.multimodal.processors import Audio, Video

MAX_PIXELS = 178956970


def image(data: bytes, max_pixels: int = MAX_PIXELS, **options: Any) -> Image.Image:
    decoded = decode("image", Blob((data,)), options, DecodeLimits(max_pixels))
    assert isinstance(decoded, Image.Image) and decoded.mode == "RGB"
    return decoded


def video(*parts: bytes, max_pixels: int = MAX_PIXELS, media_type: str = "", **options: Any) -> Video:
    decoded = decode("video", Blob(parts, media_type), options, DecodeLimits(max_pixels))
    assert isinstance(decoded, Video)
    return decoded


def sound(data: bytes) -> Audio:
    decoded = decode("audio", Blob((data,)), {}, DecodeLimits(1))
    assert isinstance(decoded, Audio) and decoded.samples.dtype == np.float32
    return decoded


def moving(count: int, form: str, size: tuple[int, int] = (12, 8)) -> bytes:
    """Return an animated image: each frame has one grey value, and is lighter than the frame before."""
    frames = [Image.new("L", size, 10 * index) for index in range(count)]
    options = {"lossless": True} if form == "WEBP" else {}
    return file_of(frames[0], form, save_all=True, append_images=frames[1:], duration=40, **options)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM"])
def test_formats_and_modes_become_rgb(form: str) -> None:
    assert image(file_of(Image.new("RGB", (5, 3), (250, 5, 5)), form)).size == (5, 3)
    for mode in ("1", "L", "P", "LA", "RGBA", "CMYK", "I;16"):
        plain = Image.new("RGB", (4, 4), (255, 255, 255)).convert("L" if mode == "I;16" else mode)
        data = Image.fromarray(np.full((4, 4), 65535, np.uint16)) if mode == "I;16" else plain
        try:
            stored = file_of(data, form)
        except (OSError, ValueError):
            continue  # a mode that the format does not support
        assert np.asarray(image(stored)).min() == 255, mode


def test_transparency_is_blended_with_the_background() -> None:
    clear = Image.new("RGBA", (2, 2), (9, 9, 9, 0))
    assert image(file_of(clear)).getpixel((0, 0)) == (255, 255, 255)
    assert image(file_of(clear), rgba_background_color=[1, 2, 3]).getpixel((1, 1)) == (1, 2, 3)
    palette = Image.new("P", (2, 2))
    palette.putpalette([9, 9, 9])
    assert image(file_of(palette, transparency=0)).getpixel((0, 0)) == (255, 255, 255)
    with pytest.raises(RequestError, match="3 integers"):
        image(file_of(clear), rgba_background_color=[1, 2, 300])


def test_16_bit_images_and_exif_orientation() -> None:
    deep = Image.fromarray(np.array([[0, 256, 65535, 32768]], np.uint16))
    assert np.asarray(image(file_of(deep)))[0, :, 0].tolist() == [0, 1, 255, 128]
    photo, exif = picture(6, 2), Image.Exif()
    exif[0x0112] = 6
    turned = image(file_of(photo, "PNG", exif=exif))
    assert np.array_equal(np.asarray(turned), np.asarray(photo.rotate(-90, expand=True)))


def test_first_frame_of_an_animated_image_is_used() -> None:
    for form in ("GIF", "WEBP", "PNG"):
        assert image(moving(3, form)).getpixel((0, 0)) == (0, 0, 0)


def gif(width: int, height: int, frames: int = 1, comment: int = 0) -> bytes:
    """Return a tiny GIF file with a header that states this size."""
    head = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6)
    note = b"\x21\xfe" + b"\x01x" * comment + b"\0"
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x44\x01\0"
    return head + note + frame * frames + b";"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (huge_png(), "20000 x 20000 are 400000000 pixels|more than 178956970 pixels"),
        (gif(60000, 60000), "pixels"),
        (gif(4, 4, frames=10_001), "more than 10000 frames"),
        (gif(4, 4, comment=300), "too many blocks"),
        (b"<svg></svg>", "an SVG"),
        (b'\xef\xbb\xbf<?xml version="1.0"?><svg/>', "an SVG"),
        (b"  <!doctype html>", "markup"),
        (b"%PDF-1.7", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        (b"", "not an image"),
        (file_of(picture(64, 64))[:900], "broken or truncated"),
        (file_of(picture(64, 64), "JPEG")[:500], "broken or truncated"),
    ],
)
def test_bombs_and_broken_images_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(RequestError) as refused:
        image(data)
    assert any(word in str(refused.value) for word in words.split("|")), refused.value


def test_corrupt_files_are_client_errors() -> None:
    """A file that a decoder cannot read is the client's error, not the server's."""
    rng = random.Random(0)
    for data in (file_of(picture(), "PNG"), file_of(picture(), "JPEG"), moving(3, "GIF"), moving(3, "WEBP")):
        for _ in range(40):
            broken = bytearray(data)
            for _ in range(3):
                broken[rng.randrange(len(broken))] = rng.randrange(256)
            for modality in ("image", "video", "audio"):
                with contextlib.suppress(RequestError):
                    decode(modality, Blob((bytes(broken),)), {}, DecodeLimits(100_000))


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_frames_are_sampled_evenly_from_an_animation(form: str) -> None:
    data = moving(10, form)
    assert video(data).frames[:, 0, 0, 0].tolist() == [10 * index for index in range(10)]
    some = video(data, num_frames=4)
    assert some.indices == (0, 3, 6, 9) and some.frames[:, 0, 0, 0].tolist() == [0, 30, 60, 90]
    assert (some.total_frames, some.source_fps, some.fps) == (10, 25.0, 10.0)
    assert video(data, fps=5).indices == (0, 9)
    assert len(video(data, num_frames=-1).frames) == 10


def test_video_may_be_a_list_of_frames() -> None:
    shots = [file_of(Image.new("RGB", (8, 8), (index, 0, 0)), "PNG") for index in range(40)]
    result = video(*shots, media_type="video/jpeg")
    assert result.frames.shape == (40, 8, 8, 3) and result.fps is None
    assert video(*shots, media_type="video/jpeg", num_frames=2).indices == (0, 39)
    with pytest.raises(RequestError, match="different sizes"):
        video(shots[0], file_of(picture()), media_type="video/jpeg")


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (moving(10, "GIF", (100, 100)), {"max_pixels": 10_001}, "10 frames of 100 x 100"),
        (moving(3, "PNG", (100, 100)), {"max_pixels": 10_001}, "3 frames of 100 x 100"),
        (moving(2, "GIF"), {"num_frames": 0}, "num_frames must be"),
        (moving(2, "GIF"), {"fps": "fast"}, "fps must be a number"),
        (b"#EXTM3U\n/etc/passwd\n", {}, "not a video"),
        (b"", {}, "not a video"),
    ],
)
def test_invalid_videos_are_refused(data: bytes, options: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        video(data, **options)


def test_missing_codec_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    for decoded in (video, sound):
        with pytest.raises(RequestError, match=r"needs PyAV: install the server with `quire\[media\]`"):
            decoded(b"\0\0\0\x18ftypmp42" + bytes(32))


@pytest.mark.parametrize("dtype", ["u1", "<i2", "<i4", "<f4", "<f8", "24"])
def test_wav_files_of_every_sample_width(dtype: str) -> None:
    wanted = np.sin(np.arange(300) / 9).astype(np.float32) * 0.9
    if dtype == "24":
        numbers = np.round(wanted * 2**23).astype("<i4").view(np.uint8).reshape(-1, 4)[:, :3]
        data = bytearray(wav(np.ascontiguousarray(numbers), rate=16000))
        data[22:24], data[34:36] = struct.pack("<H", 1), struct.pack("<H", 24)
    else:
        scale = {"u1": 128, "<i2": 2**15, "<i4": 2**31}.get(dtype, 1)
        stored = wanted * scale + (128 if dtype == "u1" else 0)
        if dtype[1] != "f":
            stored = np.round(stored)
        data = bytearray(wav(stored.astype(dtype)[:, None], 16000, kind=3 if "f" in dtype else 1))
    result = sound(bytes(data))
    assert result.rate == 16000
    assert np.allclose(result.samples, wanted, atol=1e-2 if dtype == "u1" else 1e-4)


def test_channels_are_mixed_and_false_lengths_truncated() -> None:
    both = np.array([[100, 300], [0, 2000]], np.int16)
    data = wav(both)
    assert np.allclose(sound(data).samples * 2**15, [200, 1000])
    place = data.index(b"data") + 4
    assert len(sound(data[:place] + b"\xff\xff\xff\xff" + data[place + 4 :] + b"\x01").samples) == 2


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (wav(np.zeros((4, 1), np.int16), rate=0), "0 Hz"),
        (wav(np.zeros((4, 1), np.int16), rate=2**30), "sample rate of 1073741824 Hz is not supported"),
        (wav(np.zeros((0, 1), np.int16)), "has no samples"),
        (wav(np.zeros((4, 1), np.int16), kind=7), "format 7 with 16 bits"),
        (wav(np.full((4, 1), np.nan, np.float32), kind=3), "samples that are NaN"),
        (wav(np.zeros((4, 1), np.int16))[:30], "broken or truncated"),
        (b"RIFX\0\0\0\0WAVE", "RIFX"),
        (b"hello", "not audio"),
    ],
)
def test_invalid_audio_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        sound(data)


def film(container: str, codec: str, count: int = 20) -> bytes:
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for index in range(count):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 10 * index, np.uint8), format="rgb24")
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()


@pytest.mark.parametrize(("container", "codec"), [("mp4", "mpeg4"), ("matroska", "mpeg4"), ("avi", "mpeg4")])
def test_videos_are_decoded_by_pyav(container: str, codec: str) -> None:
    pytest.importorskip("av")
    data = film(container, codec)
    result = video(data, num_frames=5)
    assert result.indices == (0, 4, 9, 14, 19) and result.total_frames == 20
    assert result.frames.shape == (5, 48, 64, 3)
    assert (result.source_fps, result.fps) == (10.0, 2.5)
    assert np.allclose(result.frames.mean(axis=(1, 2, 3)), [0, 40, 90, 140, 190], atol=4)
    for wrong, options in ((data[:300], {}), (data, {"max_pixels": 64 * 48})):
        with pytest.raises(RequestError):
            video(wrong, **options)


@pytest.mark.parametrize(("container", "codec"), [("mp3", "mp3"), ("flac", "flac"), ("mp4", "aac")])
def test_audio_is_decoded_by_pyav(container: str, codec: str) -> None:
    av = pytest.importorskip("av")
    wanted = np.sin(np.arange(16000) / 20).astype(np.float32)
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=16000, layout="stereo")
        form = stream.codec_context.format.name
        resampler = av.AudioResampler(format=form, layout="stereo", rate=16000)
        frame = av.AudioFrame.from_ndarray(wanted[None], format="fltp", layout="mono")
        frame.sample_rate = 16000
        for item in resampler.resample(frame):
            item.pts = None
            output.mux(stream.encode(item))
        output.mux(stream.encode())
    result = sound(file.getvalue())
    assert result.rate == 16000 and abs(len(result.samples) - 16000) < 3000
    assert 0.6 < float(np.abs(result.samples).max()) < 1.1


def test_playlists_are_not_videos() -> None:
    pytest.importorskip("av")
    for data in (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", b"ffconcat version 1.0\nfile /etc/passwd\n"):
        with pytest.raises(RequestError, match="not a video"):
            video(data)
        with pytest.raises(RequestError):
            video(b"G" + data)
