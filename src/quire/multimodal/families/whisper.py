"""Sounds of Whisper: half a minute, with silence behind what is shorter."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from quire.config.facts import MediaFacts
from quire.config.media.whisper import WhisperFacts
from quire.data.media import Array, Item
from quire.errors import RequestError
from quire.multimodal.families import Content, Processed, Sound
from quire.multimodal.families.sounds import Ear
from quire.text.tokenizer import Tokenizer


class WhisperProcessor:
    """No token stands for a sound, which has as many vectors as any other. What is longer is cut off."""

    modalities: tuple[str, ...] = ("audio",)

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        self.facts: WhisperFacts = facts.tower
        self.ear = Ear(path, self.facts)

    def marks(self, modality: str) -> list[int]:
        return []

    def text(self, modality: str, number: int) -> str:
        return ""

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> Processed:
        assert isinstance(content, Sound)
        mel = self.ear.heard(self.ear.samples(content, arguments, self.ear.at_once))
        return Processed([], [(0, self.facts.positions)], arrays={"mel": Array.of(mel)})

    def process_embeds(self, modality: str, embeds: Mapping[str, NDArray[Any]]) -> Processed:
        raise RequestError("this model takes sounds, not their vectors", f"{modality}_embeds")

    def most_vectors(self, modality: str) -> int:
        return self.facts.positions

    def largest(self, modality: str) -> tuple[int, ...]:
        return (self.ear.at_once,)

    def positions(
        self, token_ids: Sequence[int], items: Sequence[Item], facts: Sequence[Mapping[str, Any]]
    ) -> Array | None:
        return None
