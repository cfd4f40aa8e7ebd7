"""Videos that are small as files and large in memory (CVE-2026-34755, CVE-2026-5497): a video/jpeg URL could
list any number of frames, and all were decoded. Quire limits frames, pixels and time before it decodes, and
sets the container format for FFmpeg, so that a playlist opens no other file."""

import base64
import math
from typing import Any

import pytest
from ask import chat, refused
from fake_engine import FakeEngine
from fake_inputs import FakeProcessor, data_url, engine_with_media, file_of, picture

from quire.config.env import MediaEnv
from quire.config.sections import MultimodalSection
from quire.frontend.multimodal import MediaInputReader
from quire.multimodal.processing import MediaProcessor
from quire.multimodal.processors import Video


class PerPixel(FakeProcessor):
    """Processor with one token per pixel of a video; it records the videos."""

    def num_vectors(self, video: Video, arguments: Any) -> int:
        return math.prod(video.frames.shape[:3])


def video_engine(**env: Any) -> tuple[FakeEngine, PerPixel]:
    processor = PerPixel()
    media_processor = MediaProcessor(processor, MultimodalSection(), MediaEnv(**env), max_tokens=4096)
    return engine_with_media(MediaInputReader("fake", media_processor, {"video": 1})), processor


def send_video(engine: FakeEngine, url: str, **body: Any) -> dict[str, Any]:
    part = {"type": "video_url", "video_url": {"url": url}}
    return refused(chat(engine, messages=[{"role": "user", "content": [part]}], **body))


def gif(size: int, count: int) -> bytes:
    frames = [picture(size, size, seed=seed).quantize(4) for seed in range(count)]
    return file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])


def test_frames_beyond_the_context_are_not_decoded() -> None:
    engine, processor = video_engine()
    frame = base64.b64encode(file_of(picture(8, 8), "JPEG")).decode()
    listed = "data:video/jpeg;base64," + ",".join([frame] * 400)
    for url in (listed, data_url(gif(90, 3), "video/gif")):
        for reading in ({}, {"video": {"num_frames": -1}}):
            error = send_video(engine, url, media_io_kwargs=reading)
            assert "this model's maximum context length is 4096 tokens" in error["message"]
    assert not processor.seen and not engine.seen


def test_total_pixels_of_all_frames_are_limited() -> None:
    engine, processor = video_engine(max_image_pixels=1000)
    error = send_video(
        engine, data_url(gif(30, 5), "video/gif"), media_io_kwargs={"video": {"num_frames": -1}}
    )
    assert "VLLM_MAX_IMAGE_PIXELS" in error["message"]
    assert not processor.seen and not engine.seen


@pytest.mark.parametrize("count", [10**9, 0, -2, 1.5, "all", True])
def test_num_frames_cannot_bypass_the_limit(count: Any) -> None:
    """All frames are within the limit for decoding, but the sampled frames would exceed their own, lower
    limit."""
    engine, processor = video_engine(max_image_pixels=1000)
    url = data_url(gif(25, 5), "video/gif")
    error = send_video(engine, url, media_io_kwargs={"video": {"num_frames": count}})
    words = "VLLM_MAX_IMAGE_PIXELS" if count == 10**9 else "video.num_frames must be a positive integer"
    assert words in error["message"] and not processor.seen and not engine.seen


@pytest.mark.parametrize(
    "playlist",
    [
        b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"<?xml version='1.0'?><MPD><BaseURL>file:///etc/passwd</BaseURL></MPD>",
        b"v=0\r\nm=video 9 RTP/AVP 96\r\n",
    ],
)
def test_playlist_is_not_a_video(playlist: bytes) -> None:
    engine, _ = video_engine()
    assert "it is not a video" in send_video(engine, data_url(playlist, "video/mp4"))["message"]
    send_video(engine, data_url(b"G" + playlist, "video/mp4"))
    assert not engine.seen
