"""Collisions of media in caches (CVE-2025-46722): an image was identified by its pixels without its size, so
that one of 30 x 100 equalled another of 100 x 30. Quire's keys are digests of the content with its mode,
size, type and rate, each piece prefixed with its length."""

from typing import Any

import numpy as np
import pytest
from ask import chat
from fake_inputs import data_url, engine_with_media, file_of, image_part, inputs, picture
from PIL import Image

PIXELS = np.random.default_rng(0).integers(0, 256, 30 * 100 * 3, dtype=np.uint8)
SAMPLES = np.arange(600, dtype=np.float32) / 600


def image(width: int, height: int, mode: str = "RGB") -> Image.Image:
    return Image.frombytes(mode, (width, height), PIXELS.tobytes()[: width * height * len(mode)])


def key_of(modality: str, content: Any) -> bytes:
    mark = {"image": "<i>", "video": "<v>", "audio": "<a>"}[modality]
    prompt = inputs().parse({"prompt": mark, "multi_modal_data": {modality: content}})
    assert prompt.media is not None
    return prompt.media.items[0].key


@pytest.mark.parametrize(
    ("modality", "contents"),
    [
        ("image", [image(30, 100), image(100, 30), image(60, 50)]),
        (
            "image",
            [image(30, 10, "L"), image(10, 10), Image.frombytes("P", (30, 10), PIXELS.tobytes()[:300])],
        ),
        ("audio", [(SAMPLES, 8000), (SAMPLES, 16000), (SAMPLES[:-1], 8000)]),
        ("video", [PIXELS.reshape(2, 30, 50, 3), PIXELS.reshape(2, 50, 30, 3), PIXELS.reshape(4, 25, 30, 3)]),
    ],
    ids=["size", "mode", "rate", "frames"],
)
def test_same_bytes_in_another_form_have_another_key(modality: str, contents: list[Any]) -> None:
    assert len({key_of(modality, content) for content in contents}) == len(contents)
    assert key_of(modality, contents[0]) == key_of(modality, contents[0])


def test_frame_boundaries_are_hashed() -> None:
    """Two lists of files have the same bytes when joined, since data after a JPEG file is ignored."""
    engine = engine_with_media()
    file = file_of(picture(), "JPEG")
    keys = []
    for frames in ([file, file + file], [file + file, file], [file] * 3):
        engine.seen.clear()
        texts = [data_url(frame).partition(",")[2] for frame in frames]
        part = {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64," + ",".join(texts)}}
        assert chat(engine, messages=[{"role": "user", "content": [part]}]).status_code == 200
        ((_, prompt, _, _),) = engine.seen
        assert prompt.media is not None
        keys.append(prompt.media.items[0].key)
    assert len({*keys}) == 3


def test_image_keys_depend_on_content_and_processor_arguments() -> None:
    engine = engine_with_media()
    for seed in range(2):
        for kwargs in ({}, {"side": 8}):
            part = image_part(data_url(file_of(picture(seed=seed))))
            body = {"messages": [{"role": "user", "content": [part]}], "mm_processor_kwargs": kwargs}
            assert chat(engine, **body).status_code == 200
    keys = {prompt.media.items[0].key for _, prompt, _, _ in engine.seen if prompt.media is not None}
    assert len(keys) == 4 and all(len(key) >= 32 for key in keys)
