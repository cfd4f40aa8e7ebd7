"""Gemma 3n: images as squares, and log-mel spectrograms, 100 frames per second, of at most 30 seconds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.gemma3n import Gemma3nFacts
from quire.checkpoint.reader import ConfigReader
from quire.data.multimodal import Array
from quire.errors import RequestError
from quire.multimodal.images import PixelScaling, fitted, size_of, stored_settings
from quire.multimodal.processors import Audio, Content, ProcessedItem
from quire.multimodal.processors.audio_base import read_samples
from quire.multimodal.processors.gemma import NewlineTokens
from quire.multimodal.processors.image_base import ImageProcessor, read_vectors
from quire.multimodal.usm_mel import USMSpectrogram
from quire.text.tokenizer import Tokenizer

_LONGEST = 480000
"""Maximum number of audio samples."""
_UNIT = 128
"""Number of samples to a multiple of which audio is padded with silence."""
_SETTINGS: dict[str, Any] = {
    "frame_length_ms": 32.0,
    "min_frequency": 125.0,
    "max_frequency": 7600.0,
    "preemphasis": 0.97,
    "fft_overdrive": True,
    "mel_floor": 1e-5,
}
"""Settings of the feature extractor that a checkpoint may leave out."""
_AUDIO_ARGUMENTS = ("truncation",)


class Gemma3nProcessor(ImageProcessor):
    """Processor of Gemma 3n images and audio. The placeholder in prompts is the image or audio token;
    newlines around the span merge with the text's."""

    resample = Image.Resampling.BILINEAR
    facts: Gemma3nFacts

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        towers: Gemma3nFacts = facts.tower
        first = towers.vision.image_id if towers.vision is not None else towers.sound.audio_id  # type: ignore[union-attr]
        side = 0 if towers.vision is None else towers.vision.image
        size = {"height": side, "width": side}
        super().__init__(path, facts, tokenizer, image_id=first, size=size, do_normalize=False)
        self.joined = NewlineTokens(tokenizer).joined
        if towers.vision is not None and fitted(size_of(self.settings), (side, side)) != (side, side):
            raise self.settings.wrong("size", f"{side} x {side} pixels")
        if towers.sound is not None:
            mels = towers.sound.mels
            self.audio_settings = stored_settings(path, "feature_extractor", feature_size=mels, **_SETTINGS)
            self.log_mel = USMSpectrogram(self.audio_settings, mels, adds_floor=False)

    def marks(self, modality: str) -> list[int]:
        return [self._tokens(modality)[1]]

    def text(self, modality: str, number: int) -> str:
        return self.tokenizer.backend.id_to_token(self.marks(modality)[0]) or ""

    def _tokens(self, modality: str) -> tuple[int, int, int, int]:
        """Return the tokens at the start, within and at the end of a span, and their number within it."""
        vision, sound = self.facts.vision, self.facts.sound
        if modality == "audio" and sound is not None:
            return sound.start_id, sound.audio_id, sound.end_id, sound.tokens
        assert vision is not None
        return vision.start_id, vision.image_id, vision.end_id, vision.tokens

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        visual = {name: value for name, value in arguments.items() if name not in _AUDIO_ARGUMENTS}
        if not isinstance(content, Audio):
            return super().process(modality, content, visual)
        self.read_arguments("image", visual)
        samples = read_samples(
            content,
            self.audio_settings,
            {name: value for name, value in arguments.items() if name in _AUDIO_ARGUMENTS},
            rate=self.log_mel.rate,
            longest=_LONGEST,
            fewest=self.log_mel.frame + 1,
        )
        padded = np.pad(samples, (0, -len(samples) % _UNIT))
        return self._item("audio", mel=Array.of(self.log_mel(padded)))

    def process_image(self, image: Image.Image, keys: ConfigReader, scaling: PixelScaling) -> ProcessedItem:
        assert self.facts.vision is not None
        side = self.facts.vision.image
        return self._item("image", **scaling(self.resize(image, (side, side), keys)))

    def _item(self, modality: str, **arrays: Array) -> ProcessedItem:
        """Build the processed item of a span. Embeddings replace its soft tokens and its end token."""
        start, inner, end, count = self._tokens(modality)
        newlines = self.tokenizer.encode("\n\n", add_special_tokens=False)
        span = [*newlines, start, *[inner] * count, end, *newlines]
        return ProcessedItem(span, [(len(newlines) + 1, count + 1)], arrays=arrays)

    def process_embeds(self, modality: str, embeds: Mapping[str, NDArray[Any]]) -> ProcessedItem:
        vectors, expected = read_vectors(modality, embeds, self.hidden), self.max_vectors(modality)
        if len(vectors) != expected:
            raise RequestError(
                f"{modality}_embeds: {len(vectors)} vectors, expected {expected}, one for the end",
                "multi_modal_data",
            )
        return self._item(modality, embeds=Array.of(vectors))

    def max_vectors(self, modality: str) -> int:
        return self._tokens(modality)[3] + 1

    def largest(self, modality: str) -> tuple[int, ...]:
        if modality == "audio":
            return (_LONGEST,)
        assert self.facts.vision is not None
        return self.facts.vision.image, self.facts.vision.image
