"""Processors: what each family makes of an image, a video or a sound before its tower sees it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeGuard, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.data.multimodal import Array, Arrays, MediaItem, StoredArrays
from quire.registry import LazyTable
from quire.text.tokenizer import Tokenizer


class Video(NamedTuple):
    """Frames of one size, and when they are."""

    frames: NDArray[np.uint8]
    """[frames, height, width, 3]"""
    fps: float | None = None
    """Of these frames; None: nobody said."""
    total_frames: int = 0
    """Of the video that they were taken from; 0: these are all."""
    indices: tuple[int, ...] = ()
    """Which of those they are; empty: all."""
    source_fps: float | None = None
    """Of that video."""

    @classmethod
    def black(cls, frames: int, width: int, height: int, *facts: Any) -> "Video":
        """One of this size, which takes no memory."""
        return cls(np.broadcast_to(np.uint8(0), (frames, height, width, 3)), *facts)


class Sound(NamedTuple):
    """Samples of one channel."""

    samples: NDArray[np.float32]
    rate: int
    """Samples a second."""


Content = Image.Image | Video | Sound
"""What was decoded: images are RGB."""


@dataclass(slots=True)
class ProcessedItem:
    """What a processor has made of one item."""

    token_ids: list[int]
    """Its span: the tokens that take the place of the family's mark in the prompt."""
    runs: list[tuple[int, int]] = field(default_factory=list)
    """As in `MediaItem.runs`."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Small things that `positions` needs, such as the grid; kept beside the key where arrays are not."""
    arrays: Arrays | None = None
    stored: StoredArrays | None = None
    """Where the arrays are, if not here."""


class Processor(Protocol):
    """A family's, for one checkpoint: pure functions of numpy and Pillow, called in threads."""

    modalities: tuple[str, ...]

    def marks(self, modality: str) -> list[int]:
        """The tokens that stand for one item in a prompt as templates write it, mostly a single one; none
        where all tokens see it."""

    def text(self, modality: str, number: int) -> str:
        """The text of that, for templates that know no media: put in front of a message's text. `number` is
        the item's among those of its modality in the conversation, from 1 on."""

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        """`arguments` are mm_processor_kwargs; a RequestError for those that are wrong."""

    def process_embeds(self, modality: str, embeds: Mapping[str, NDArray[Any]]) -> ProcessedItem:
        """The same for vectors that a user brings along (`embeds`, and what belongs to them, such as
        `image_grid_thw`), checked; the arrays are `embeds`, which go past the tower."""

    def most_vectors(self, modality: str) -> int:
        """Of the largest item that there can be."""

    def largest(self, modality: str) -> tuple[int, ...]:
        """Its size: width and height of an image, frames, width and height of a video, samples of a sound."""

    def positions(
        self, token_ids: Sequence[int], items: Sequence[MediaItem], facts: Sequence[Mapping[str, Any]]
    ) -> Array | None:
        """See `Media.positions`; None of a family that counts tokens."""


@runtime_checkable
class Foresees(Protocol):
    """A processor that knows what a video becomes before it is decoded."""

    def num_vectors(self, video: Video, arguments: Mapping[str, Any]) -> int:
        """Of a video of this size, whose frames are not looked at."""


class Spells(Protocol):
    """A processor that reads marks in texts which are no tokens."""

    def spelled(self, text: str) -> str:
        """A prompt with media before its tokens are made."""


def spells(processor: "Processor") -> TypeGuard[Spells]:
    """For every prompt, for which `isinstance` of a protocol takes too long."""
    return hasattr(processor, "spelled")


class Joins(Protocol):
    """A processor whose spans begin or end with what tokenizers make one token of together with others."""

    def joined(self, before: int, after: int) -> int | None:
        """The token that two neighbours become where a span meets what is around it; None: they stay two."""


def joins(processor: "Processor") -> TypeGuard[Joins]:
    """See `spells`."""
    return hasattr(processor, "joined")


class MakesProcessor(Protocol):
    """A processor for the checkpoint in a directory, whose preprocessor_config.json and the like it reads."""

    def __call__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> Processor: ...


PROCESSORS: LazyTable = LazyTable(
    "processor",
    {
        "glm4v": "quire.multimodal.processors.qwen:GridProcessor",
        "qwen2_5_omni": "quire.multimodal.processors.omni:OmniProcessor",
        "qwen2_5_vl": "quire.multimodal.processors.qwen:GridProcessor",
        "qwen2_vl": "quire.multimodal.processors.qwen:GridProcessor",
        "audio_flamingo3": "quire.multimodal.processors.qwen_audio:AudioFlamingoProcessor",
        "qwen2_audio": "quire.multimodal.processors.qwen_audio:QwenAudioProcessor",
        "qwen3_omni": "quire.multimodal.processors.omni:Qwen3OmniProcessor",
        "qwen3_vl": "quire.multimodal.processors.qwen:GridProcessor",
        "aya_vision": "quire.multimodal.processors.aya:AyaProcessor",
        "cohere2_vision": "quire.multimodal.processors.aya:Cohere2VisionProcessor",
        "dots_ocr": "quire.multimodal.processors.dots:DotsProcessor",
        "gemma3": "quire.multimodal.processors.gemma:Gemma3Processor",
        "gemma3n": "quire.multimodal.processors.gemma3n:Gemma3nProcessor",
        "idefics3": "quire.multimodal.processors.idefics:Idefics3Processor",
        "internvl": "quire.multimodal.processors.intern:InternVLProcessor",
        "kimi_vl": "quire.multimodal.processors.kimi:KimiVLProcessor",
        "llama4": "quire.multimodal.processors.llama4:Llama4Processor",
        "lighton_ocr": "quire.multimodal.processors.pixtral:PixtralProcessor",
        "llava": "quire.multimodal.processors.llava:LlavaProcessor",
        "llava_next": "quire.multimodal.processors.anyres:AnyresProcessor",
        "llava_onevision": "quire.multimodal.processors.anyres:AnyresProcessor",
        "minicpm_v": "quire.multimodal.processors.minicpm:MiniCPMVProcessor",
        "paddleocr_vl": "quire.multimodal.processors.qwen:GridProcessor",
        "ovis2": "quire.multimodal.processors.ovis:Ovis2Processor",
        "paligemma": "quire.multimodal.processors.paligemma:PaliGemmaProcessor",
        "pixtral": "quire.multimodal.processors.pixtral:PixtralProcessor",
        "step_vl": "quire.multimodal.processors.step3:StepVLProcessor",
        "voxtral": "quire.multimodal.processors.qwen_audio:VoxtralProcessor",
        "whisper": "quire.multimodal.processors.whisper:WhisperProcessor",
    },
)
