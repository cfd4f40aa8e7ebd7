"""A model family for tests of inputs: a short processor, bytes as tokens, and files to send."""

import base64
import io
import struct
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from fake_engine import EOS, VOCAB, FakeEngine, byte_tokenizer
from numpy.typing import NDArray
from PIL import Image

from quire.config.env import MediaEnv
from quire.config.sections import MultimodalSection
from quire.data.multimodal import Array, MediaItem
from quire.errors import RequestError
from quire.frontend.inputs import InputProcessor
from quire.frontend.multimodal import MediaInputReader
from quire.multimodal.processing import MediaProcessor
from quire.multimodal.processor_cache import ProcessorCache
from quire.multimodal.processors import Audio, Content, ProcessedItem, Video

START, PAD, END = 1, 2, 3
"""Tokens of an expanded placeholder."""
HIDDEN = 4
MARKS = {"image": "<i>", "video": "<v>", "audio": "<a>"}


class FakeProcessor:
    """Processor with one embedding per square of 16 pixels of an image, per video frame, or per 100 audio
    samples."""

    modalities: tuple[str, ...] = ("image", "video", "audio")

    def __init__(self) -> None:
        self._tokenizer = byte_tokenizer()
        self.seen: list[Content] = []

    def marks(self, modality: str) -> list[int]:
        return self._tokenizer.encode(MARKS[modality], add_special_tokens=False)

    def text(self, modality: str, number: int) -> str:
        return MARKS[modality]

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        side = arguments.get("side", 16)
        if not isinstance(side, int):
            raise RequestError("`side` must be an integer", param="mm_processor_kwargs")
        self.seen.append(content)
        match content:
            case Video(frames):
                count, numbers = len(frames), frames
            case Audio(samples):
                count, numbers = len(samples) // 100 + 1, samples
            case _:
                assert content.mode == "RGB"
                count = -(-content.width // side) * -(-content.height // side)
                numbers = np.asarray(content)
        return ProcessedItem(
            [START, *[PAD] * count, END], [(1, count)], {"count": count}, {"numbers": Array.of(numbers)}
        )

    def process_embeds(self, modality: str, embeds: Mapping[str, NDArray[Any]]) -> ProcessedItem:
        result = embeds["embeds"]
        if result.ndim != 2 or result.shape[1] != HIDDEN:
            raise RequestError(f"vectors of shape {list(result.shape)} are not [n, {HIDDEN}]", "image_embeds")
        return ProcessedItem([PAD] * len(result), [], {"count": len(result)}, {"embeds": Array.of(result)})

    def max_vectors(self, modality: str) -> int:
        return 64

    def largest(self, modality: str) -> tuple[int, ...]:
        return (128, 128)

    def positions(
        self, token_ids: Sequence[int], items: Sequence[MediaItem], facts: Sequence[Mapping[str, Any]]
    ) -> Array | None:
        assert [fact["count"] for fact in facts] == [item.num_vectors for item in items]
        return Array.of(np.tile(np.arange(len(token_ids), dtype=np.int32), (3, 1)))


def media(
    limits: Mapping[str, int] | None = None,
    env: Mapping[str, Any] | None = None,
    processor_cache: ProcessorCache | None = None,
    max_tokens: int | None = None,
    **section: Any,
) -> MediaInputReader:
    sections = MultimodalSection(**section), MediaEnv(**(env or {}))
    media_processor = MediaProcessor(FakeProcessor(), *sections, processor_cache, max_tokens=max_tokens)
    return MediaInputReader(
        "fake",
        media_processor,
        {"image": 9, "video": 9, "audio": 9, **(limits or {})},
        takes_embeds=section.get("enable_mm_embeds", False),
        interleaves=section.get("interleave_mm_strings", False),
    )


def inputs(reader: MediaInputReader | None = None, **limits: Any) -> InputProcessor:
    return InputProcessor(
        tokenizer=byte_tokenizer(),
        **{"vocab": VOCAB, "max_model_len": 512, "eos_ids": [EOS], "max_logprobs": 20, "seed": 0, **limits},
        media=reader or media(),
    )


def engine_with_media(reader: MediaInputReader | None = None) -> FakeEngine:
    engine = FakeEngine()
    engine.inputs.media = reader or media()
    return engine


def picture(width: int = 20, height: int = 10, mode: str = "RGB", seed: int = 0) -> Image.Image:
    numbers = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(numbers, "RGBA").convert(mode)


def file_of(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def image_part(url: str | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url or data_url(file_of(picture()))}, **more}


@cache
def huge_png(width: int = 20_000, height: int = 20_000) -> bytes:
    """Return an image of one colour, compressed as well as possible."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(1 + width // 8)) for _ in range(height)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def wav(samples: NDArray[Any], rate: int = 8000, *, kind: int = 1) -> bytes:
    """Store samples of shape [n, channels] as a WAV file."""
    data, (_, channels), width = samples.tobytes(), samples.shape, samples.dtype.itemsize
    form = struct.pack("<HHIIHH", kind, channels, rate, rate * channels * width, channels * width, width * 8)
    body = b"WAVEfmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body
