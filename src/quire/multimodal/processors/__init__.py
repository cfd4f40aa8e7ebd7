"""Processors: one per model family, from a decoded item to the inputs of its encoder."""

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
    """Frames of one size with their times."""

    frames: NDArray[np.uint8]
    """[frames, height, width, 3]"""
    fps: float | None = None
    """Frames per second of `frames`; None: unknown."""
    total_frames: int = 0
    """Number of frames of the source video; 0: `frames` has all of them."""
    indices: tuple[int, ...] = ()
    """Indices of `frames` in the source video; empty: `frames` has all."""
    source_fps: float | None = None
    """Frames per second of the source video; None: unknown."""

    @classmethod
    def black(cls, frames: int, width: int, height: int, *facts: Any) -> "Video":
        """Build a black video of this size, which takes no memory."""
        return cls(np.broadcast_to(np.uint8(0), (frames, height, width, 3)), *facts)


class Audio(NamedTuple):
    """Audio: samples of one channel."""

    samples: NDArray[np.float32]
    rate: int
    """Samples per second."""


Content = Image.Image | Video | Audio
"""A decoded item; images are RGB."""


@dataclass(slots=True)
class ProcessedItem:
    """A processed item: its placeholder tokens and the inputs of the encoder."""

    token_ids: list[int]
    """The span: the placeholder tokens that replace the family's mark in the prompt."""
    runs: list[tuple[int, int]] = field(default_factory=list)
    """Runs of tokens that have vectors, as in `MediaItem.runs`."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Small values that `positions` needs, such as the grid; cached even where the arrays are not."""
    arrays: Arrays | None = None
    stored: StoredArrays | None = None
    """Location of the arrays in shared memory, if `arrays` is None."""


class Processor(Protocol):
    """The processor of a family for one checkpoint: pure functions of numpy and Pillow, called in threads."""

    modalities: tuple[str, ...]

    def marks(self, modality: str) -> list[int]:
        """Return the mark: the placeholder tokens, mostly one, that chat templates write for an item. Empty
        for models that cross-attend to the item."""

    def text(self, modality: str, number: int) -> str:
        """Return the text of the mark, which is put before a message's text for chat templates without media.
        `number` counts the items of this modality in the conversation, from 1."""

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        """Process an item. `arguments` are mm_processor_kwargs; raise a RequestError if they are invalid."""

    def process_embeds(self, modality: str, embeds: Mapping[str, NDArray[Any]]) -> ProcessedItem:
        """Check embeddings that a user sends (`embeds`, and values such as `image_grid_thw`). They become
        the array `embeds`, which bypasses the encoder."""

    def max_vectors(self, modality: str) -> int:
        """Return the number of vectors of the largest possible item."""

    def largest(self, modality: str) -> tuple[int, ...]:
        """Return the size of the largest item: width and height; frames, width and height; or samples."""

    def positions(
        self, token_ids: Sequence[int], items: Sequence[MediaItem], facts: Sequence[Mapping[str, Any]]
    ) -> Array | None:
        """Return the M-RoPE positions (`Media.positions`); None for families with plain positions."""


@runtime_checkable
class CountsVideoVectors(Protocol):
    """A processor that can count the vectors of a video before it is decoded."""

    def num_vectors(self, video: Video, arguments: Mapping[str, Any]) -> int:
        """Return the number of vectors of a video of this size; the pixels are not read."""


class RewritesText(Protocol):
    """A processor that rewrites the text of a prompt, such as marks that are not tokens."""

    def rewrite_text(self, text: str) -> str:
        """Return the text to tokenize for a prompt with media."""


def rewrites_text(processor: "Processor") -> TypeGuard[RewritesText]:
    """Return whether a processor is a `RewritesText`; `isinstance` with a protocol is too slow here."""
    return hasattr(processor, "rewrite_text")


class MergesTokens(Protocol):
    """A processor with spans that begin or end with tokens which merge with the text, such as newlines."""

    def joined(self, before: int, after: int) -> int | None:
        """Return the token that two adjacent tokens merge into at the edge of a span; None if they do not."""


def merges_tokens(processor: "Processor") -> TypeGuard[MergesTokens]:
    return hasattr(processor, "joined")


class StandsAlone(Protocol):
    """A processor of items that are a whole prompt, without a placeholder in a text."""

    def check_alone(self, token_ids: Sequence[int], num_items: int) -> None:
        """Raise a RequestError if there are several items, or text beside the item."""


def stands_alone(processor: "Processor") -> TypeGuard[StandsAlone]:
    return hasattr(processor, "check_alone")


PROCESSORS = LazyTable(
    "processor",
    {family: f"quire.multimodal.processors.{code.processor}" for family, code in MEDIA_CODE.items()},
)
"""Processors by family."""
