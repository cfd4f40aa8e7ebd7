"""Videos that are small as files and large in memory (CVE-2026-34755, CVE-2026-5497): a video/jpeg url could
list any number of frames, all of which were decoded. Quire limits frames, pixels and time before it decodes;
and it tells FFmpeg which kind of file it reads, so that a playlist opens no other file."""

import base64
import math
from typing import Any

import pytest
from ask import chat, refused
from fake_engine import FakeEngine
from fake_inputs import FakeProcessor, data_url, file_of, picture, seeing

from quire.config.env import MediaEnv
from quire.config.sections import MultimodalSection
from quire.frontend.multimodal import MediaInputReader
from quire.multimodal.processing import MediaProcessor
from quire.multimodal.processors import Video


class PerPixel(FakeProcessor):
    """A model that makes a token of each pixel of a video, and keeps the videos that it has seen."""

    def num_vectors(self, video: Video, arguments: Any) -> int:
        return math.prod(video.frames.shape[:3])


def watching(**env: Any) -> tuple[FakeEngine, PerPixel]:
    processor = PerPixel()
    media_processor = MediaProcessor(processor, MultimodalSection(), MediaEnv(**env), max_tokens=4096)
    return seeing(MediaInputReader("fake", media_processor, {"video": 1})), processor


def watch(engine: FakeEngine, url: str, **body: Any) -> dict[str, Any]:
    part = {"type": "video_url", "video_url": {"url": url}}
    return refused(chat(engine, messages=[{"role": "user", "content": [part]}], **body))


def moving(size: int, count: int) -> bytes:
    frames = [picture(size, size, seed=seed).quantize(4) for seed in range(count)]
    return file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])


def test_frames_that_no_prompt_can_hold_are_not_decoded() -> None:
    engine, processor = watching()
    frame = base64.b64encode(file_of(picture(8, 8), "JPEG")).decode()
    listed = "data:video/jpeg;base64," + ",".join([frame] * 400)
    for url in (listed, data_url(moving(90, 3), "video/gif")):
        for reading in ({}, {"video": {"num_frames": -1}}):
            error = watch(engine, url, media_io_kwargs=reading)
            assert "this model's maximum context length is 4096 tokens" in error["message"]
    assert not processor.seen and not engine.seen


def test_the_pixels_of_all_frames_are_limited() -> None:
    engine, processor = watching(max_image_pixels=1000)
    error = watch(engine, data_url(moving(30, 5), "video/gif"), media_io_kwargs={"video": {"num_frames": -1}})
    assert "VLLM_MAX_IMAGE_PIXELS" in error["message"]
    assert not processor.seen and not engine.seen


@pytest.mark.parametrize("count", [10**9, 0, -2, 1.5, "all", True])
def test_the_number_of_frames_is_no_way_around_it(count: Any) -> None:
    """The frames that are passed are within the limit, and those that would be kept are not."""
    engine, processor = watching(max_image_pixels=1000)
    url = data_url(moving(25, 5), "video/gif")
    error = watch(engine, url, media_io_kwargs={"video": {"num_frames": count}})
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
def test_a_list_of_other_files_is_no_video(playlist: bytes) -> None:
    engine, _ = watching()
    assert "it is not a video" in watch(engine, data_url(playlist, "video/mp4"))["message"]
    watch(engine, data_url(b"G" + playlist, "video/mp4"))
    assert not engine.seen
