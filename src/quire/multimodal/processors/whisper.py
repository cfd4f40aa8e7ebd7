"""Audio of Whisper: 30 seconds, padded with silence."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.whisper import WhisperFacts
from quire.data.multimodal import Array, MediaItem
from quire.errors import RequestError
from quire.multimodal.processors import Audio, Content, ProcessedItem
from quire.multimodal.processors.audio_base import AudioProcessor
from quire.text.tokenizer import Tokenizer


class WhisperProcessor:
    """Processor of Whisper audio. The decoder cross-attends to a fixed number of encoder hidden states, so
    that there are no placeholder tokens. Longer audio is cut off."""

    modalities: tuple[str, ...] = ("audio",)

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        self.facts: WhisperFacts = facts.tower
        self.audio = AudioProcessor(path, self.facts)

    def marks(self, modality: str) -> list[int]:
        return []

    def text(self, modality: str, number: int) -> str:
        return ""

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        assert isinstance(content, Audio)
        mel = self.audio.padded_mel(self.audio.samples(content, arguments, self.audio.max_samples))
        return ProcessedItem([], [(0, self.facts.positions)], arrays={"mel": Array.of(mel)})

    def process_embeds(self, modality: str, embeds: Mapping[str, NDArray[Any]]) -> ProcessedItem:
        raise RequestError("this model accepts audio, not its embeddings", f"{modality}_embeds")

    def max_vectors(self, modality: str) -> int:
        return self.facts.positions

    def largest(self, modality: str) -> tuple[int, ...]:
        return (self.audio.max_samples,)

    def positions(
        self, token_ids: Sequence[int], items: Sequence[MediaItem], facts: Sequence[Mapping[str, Any]]
    ) -> Array | None:
        return None
