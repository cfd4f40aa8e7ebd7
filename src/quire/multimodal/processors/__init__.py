"""Processors: one per model family, to convert decoded images, videos and audio to inputs of the encoder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeGuard, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.checkpoint.multimodal import MEDIA_CODE
from quire.data.multimodal import Array, Arrays, MediaItem, StoredArrays
from quire.registry import LazyTable


class Video(NamedTuple):
    """Frames of a video, which have the same size, with their times."""

    frames: NDArray[np.uint8]
    """RGB pixels, [frames, height, width, 3]."""
    fps: float | None = None
    """Frames per second of this video; None: unknown."""
    total_frames: int = 0
    """Number of frames of the source video; 0: this video has all of them."""
    indices: tuple[int, ...] = ()
    """Indices of the frames in the source video; empty: this video has all of them."""
    source_fps: float | None = None
    """Frames per second of the source video; None: unknown."""

    @classmethod
    def black(cls, frames: int, width: int, height: int, *facts: Any) -> "Video":
        """Build a black video of this size, which takes no memory. `facts` are the fields after `frames`."""
        return cls(np.broadcast_to(np.uint8(0), (frames, height, width, 3)), *facts)


class Audio(NamedTuple):
    """Mono audio."""

    samples: NDArray[np.float32]
    rate: int
    """Samples per second."""


Content = Image.Image | Video | Audio
"""A decoded image, video or audio; images are RGB."""


@dataclass(slots=True)
class ProcessedItem:
    """A processed image, video or audio: its placeholder tokens and the inputs of the encoder."""

    token_ids: list[int]
    """The item's span: tokens that replace its mark, the placeholder that chat templates write."""
    runs: list[tuple[int, int]] = field(default_factory=list)
    """Runs of tokens that are replaced by embeddings: start in the span, and length. Empty: all tokens."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Small values for M-RoPE positions, such as the grid of patches; cached even if the arrays are not."""
    arrays: Arrays | None = None
    stored: StoredArrays | None = None
    """Location of the arrays in shared memory, if `arrays` is None."""


class Processor(Protocol):
    """The processor of one checkpoint: pure functions of numpy and Pillow, which are called in threads."""

    modalities: tuple[str, ...]

    def marks(self, modality: str) -> list[int]:
        """Return the mark of an item: the placeholder tokens, mostly one, that chat templates write for the
        item. It is empty for models that cross-attend to the item."""

    def text(self, modality: str, number: int) -> str:
        """Return the placeholder text of an item, which is added to messages if the chat template takes only
        text. `number` counts the items of this modality in the conversation, from 1."""

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        """Convert an item to placeholder tokens and encoder inputs. `arguments` are mm_processor_kwargs;
        raise a RequestError if they are invalid."""

    def process_embeds(self, modality: str, embeds: Mapping[str, NDArray[Any]]) -> ProcessedItem:
        """Check embeddings that a user sends in place of an item: `embeds`, and values such as
        `image_grid_thw`. In the result, they are the array `embeds`, which bypasses the encoder."""

    def max_vectors(self, modality: str) -> int:
        """Return the number of embeddings of the largest possible item of a modality."""

    def largest(self, modality: str) -> tuple[int, ...]:
        """Return the size of the largest possible item: (width, height) of an image, (num_frames, width,
        height) of a video, or (num_samples,) of audio."""

    def positions(
        self, token_ids: Sequence[int], items: Sequence[MediaItem], facts: Sequence[Mapping[str, Any]]
    ) -> Array | None:
        """Return the M-RoPE positions of a prompt, [3, num_tokens] (time, height, width), or None for models
        with plain positions. `facts` are the `ProcessedItem.facts` of the items."""


@runtime_checkable
class CountsVideoVectors(Protocol):
    """A processor that can count the embeddings of a video before it is decoded."""

    def num_vectors(self, video: Video, arguments: Mapping[str, Any]) -> int:
        """Return the number of embeddings of a video of this shape; its pixels are not read."""


class RewritesText(Protocol):
    """A processor that rewrites prompts before tokenization, such as placeholders that are not tokens."""

    def rewrite_text(self, text: str) -> str:
        """Return the text to tokenize for the text of a prompt with images, videos or audio."""


def rewrites_text(processor: "Processor") -> TypeGuard[RewritesText]:
    """Return whether a processor has `rewrite_text`; `isinstance` with a protocol is too slow here."""
    return hasattr(processor, "rewrite_text")


class MergesTokens(Protocol):
    """A processor with spans whose first or last token, such as a newline, may merge with adjacent text."""

    def joined(self, before: int, after: int) -> int | None:
        """Return the token that two adjacent tokens at the edge of a span, `before` and `after`, merge into;
        None if they do not merge."""


def merges_tokens(processor: "Processor") -> TypeGuard[MergesTokens]:
    return hasattr(processor, "joined")


class StandsAlone(Protocol):
    """A processor of items that are a whole prompt, without any text, such as an image for CLIP."""

    def check_alone(self, token_ids: Sequence[int], num_items: int) -> None:
        """Raise a RequestError if a prompt has several items, or an item and text."""


def stands_alone(processor: "Processor") -> TypeGuard[StandsAlone]:
    return hasattr(processor, "check_alone")


PROCESSORS = LazyTable(
    "processor",
    {family: f"quire.multimodal.processors.{code.processor}" for family, code in MEDIA_CODE.items()},
)
"""Processor classes by model family."""
