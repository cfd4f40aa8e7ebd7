"""Sounds of Qwen2-Audio, Audio Flamingo 3 and Voxtral: how loud each pitch is, hundred times a second."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.qwen_audio import QwenAudioFacts
from quire.data.multimodal import Array
from quire.errors import RequestError
from quire.multimodal.images import processor_settings
from quire.multimodal.mel import Samples
from quire.multimodal.processors import Content, ProcessedItem, Sound
from quire.multimodal.processors.audio_base import AudioProcessor
from quire.multimodal.processors.image_base import ImageProcessor
from quire.text.tokenizer import Tokenizer

_MARKED = "Audio {}: <|audio_bos|>{}<|audio_eos|>"
_MOST_SECONDS = 2400
"""Of a sound of Voxtral's."""
_LEAST = 3
"""Moments of a sound of one vector."""


class QwenAudioProcessor(ImageProcessor):
    """At most as long as the tower hears, in the rate that it was trained with; the rest is cut off."""

    modalities = ("audio",)

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        self.facts: QwenAudioFacts = facts.tower
        super().__init__(self.facts.audio_id, self.facts.audio_id, self.facts.size_out, tokenizer)
        self.ear = AudioProcessor(path, self.facts.encoder)
        self.pieces = self.num_pieces(path)

    def num_pieces(self, path: Path) -> int:
        """Of the longest sound, each as long as the tower hears at once."""
        return 1

    def text(self, modality: str, number: int) -> str:
        return _MARKED.format(number, super().text(modality, number))

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        assert isinstance(content, Sound)
        (longest,) = self.largest(modality)
        samples = self.ear.samples(content, arguments, longest)
        if len(samples) <= (_LEAST - 1) * self.ear.hop:
            raise RequestError(
                f"the sound is too short: it has {len(samples)} samples at {self.ear.rate} Hz, and "
                f"{(_LEAST - 1) * self.ear.hop + 1} are the fewest"
            )
        return self._made(samples)

    def _made(self, samples: Samples) -> ProcessedItem:
        at_once = self.ear.at_once
        pieces = [self._heard(samples[at : at + at_once]) for at in range(0, len(samples), at_once)]
        pieces = [each for each in pieces if len(each) > _LEAST]
        count = sum(len(each) // 4 for each in pieces)
        return ProcessedItem([self.image_id] * count, arrays={"mel": Array.of(np.concatenate(pieces))})

    def _heard(self, samples: Samples) -> Samples:
        """[moments, mels] of a piece, two for each state."""
        states = (-(-len(samples) // self.ear.hop) + 1) // 2
        return self.ear.heard(samples)[: 2 * states + 1]

    def most_vectors(self, modality: str) -> int:
        return self.pieces * self.facts.tokens

    def largest(self, modality: str) -> tuple[int, ...]:
        return (self.pieces * self.ear.at_once,)


class AudioFlamingoProcessor(QwenAudioProcessor):
    """Some minutes, in pieces, each as loud as its own loudest."""

    def num_pieces(self, path: Path) -> int:
        seconds = processor_settings(path).size("max_audio_len", 600)
        return max(1, seconds * self.ear.rate // self.ear.at_once)

    def text(self, modality: str, number: int) -> str:
        return ImageProcessor.text(self, modality, number)


class VoxtralProcessor(QwenAudioProcessor):
    """In pieces of one length, the last with silence behind it; all are as loud as the loudest of them."""

    def num_pieces(self, path: Path) -> int:
        return max(1, _MOST_SECONDS * self.ear.rate // self.ear.at_once)

    def text(self, modality: str, number: int) -> str:
        return f"[BEGIN_AUDIO]{ImageProcessor.text(self, modality, number)}"

    def _made(self, samples: Samples) -> ProcessedItem:
        count = -(-len(samples) // self.ear.at_once)
        token_ids = [self.image_id] * (count * self.facts.tokens)
        return ProcessedItem(token_ids, arrays={"mel": Array.of(self.ear.heard(samples, count))})
