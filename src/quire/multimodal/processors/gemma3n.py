"""Audio of Gemma 3n: log-mel spectrograms, 100 frames per second, of at most 30 seconds."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.gemma3n import Gemma3nFacts
from quire.data.multimodal import Array
from quire.errors import RequestError
from quire.multimodal.images import stored_settings
from quire.multimodal.processors import Audio, Content, ProcessedItem
from quire.multimodal.processors.audio_base import read_samples
from quire.multimodal.processors.gemma import NewlineTokens
from quire.multimodal.processors.image_base import SpanProcessor
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


class Gemma3nProcessor(SpanProcessor):
    """Processor of Gemma 3n audio. The placeholder in prompts is the audio token; newlines around the span
    merge with the text's."""

    modalities = ("audio",)

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        self.facts: Gemma3nFacts = facts.tower
        super().__init__(self.facts.audio_id, self.facts.audio_id, self.facts.size_out, tokenizer)
        self.joined = NewlineTokens(tokenizer).joined
        mels = self.facts.mels
        self.settings = stored_settings(path, "feature_extractor", feature_size=mels, **_SETTINGS)
        self.log_mel = USMSpectrogram(self.settings, mels, adds_floor=False)

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        assert isinstance(content, Audio)
        samples = read_samples(
            content,
            self.settings,
            arguments,
            rate=self.log_mel.rate,
            longest=_LONGEST,
            fewest=self.log_mel.frame + 1,
        )
        padded = np.pad(samples, (0, -len(samples) % _UNIT))
        return self.build_item(self._span, arrays={"mel": Array.of(self.log_mel(padded))})

    @cached_property
    def _span(self) -> list[int]:
        facts, newlines = self.facts, self.tokenizer.encode("\n\n", add_special_tokens=False)
        return [*newlines, facts.start_id, *[facts.audio_id] * facts.tokens, facts.end_id, *newlines]

    def build_item(self, token_ids: list[int], place: int | None = None, **more: Any) -> ProcessedItem:
        """Build the processed item of a span. Embeddings replace its audio tokens and its end token; `more`
        are further fields."""
        first = token_ids.index(self.facts.audio_id)
        return ProcessedItem(token_ids, [(first, self.facts.tokens + 1)], **more)

    def embeds_span(self, num_vectors: int) -> list[int]:
        if num_vectors != self.facts.tokens + 1:
            raise RequestError(
                f"audio_embeds: {num_vectors} vectors, expected {self.facts.tokens + 1}, one for the end",
                "multi_modal_data",
            )
        return self._span

    def max_vectors(self, modality: str) -> int:
        return self.facts.tokens + 1

    def largest(self, modality: str) -> tuple[int, ...]:
        return (_LONGEST,)
