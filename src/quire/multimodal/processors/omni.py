"""Qwen-Omni's: images and videos in patches of a grid, and sounds of some minutes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.omni import HearingFacts, OmniFacts
from quire.data.multimodal import Array, MediaItem
from quire.errors import RequestError
from quire.multimodal.mel import Samples
from quire.multimodal.processors import Content, ProcessedItem, Sound
from quire.multimodal.processors.audio_base import AudioProcessor
from quire.multimodal.processors.grid import positions_of
from quire.multimodal.processors.qwen import GridProcessor
from quire.text.tokenizer import Tokenizer

_FILM = (128, 768)
"""Vectors of a frame, at least and at most, whatever the files say of pixels."""
_HEARS = ("truncation",)
_BEHIND = 4
"""Moments behind the last that see something of it."""
_MOST_SECONDS = 2400
"""Of a sound of Qwen3-Omni's."""
_LEAST = 3
"""Moments of a sound of one vector."""


class OmniProcessor(GridProcessor):
    """What is said of images goes past sounds, and the other way round."""

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        towers: OmniFacts = facts.tower
        super().__init__(path, replace(facts, tower=towers.grid), tokenizer)
        self.sound: HearingFacts = towers.sound
        self.ear = AudioProcessor(path, self.sound.encoder)
        film = self.settings["video"]
        least, most = (count * film.unit**2 for count in _FILM)
        self.settings["video"] = replace(film, least=least, most=most)

    def marks(self, modality: str) -> list[int]:
        return [self.sound.audio_id] if modality == "audio" else super().marks(modality)

    def text(self, modality: str, number: int) -> str:
        if modality != "audio":
            return super().text(modality, number)
        ids = [self.sound.start_id, self.sound.audio_id, self.sound.end_id]
        return "".join(token or "" for token in self.tokenizer.convert_ids_to_tokens(ids))

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        if not isinstance(content, Sound):
            own = {name: value for name, value in arguments.items() if name not in _HEARS}
            return super().process(modality, content, own)
        self.settings["image"].with_arguments(
            {name: each for name, each in arguments.items() if name not in _HEARS}
        )
        said = {name: value for name, value in arguments.items() if name in _HEARS}
        samples = self.ear.samples(content, said, *self.largest("audio"))
        if len(samples) < self.fewest:
            raise RequestError(
                f"the sound is too short: it has {len(samples)} samples at {self.ear.rate} Hz, and "
                f"{self.fewest} are the fewest"
            )
        mel = self.heard(samples)
        span = [self.sound.audio_id] * self.num_heard(len(mel))
        return ProcessedItem(span, arrays={"mel": Array.of(mel)})

    @property
    def fewest(self) -> int:
        """Samples of a sound of one vector."""
        return (_LEAST - 1) * self.ear.hop + 1

    def num_heard(self, moments: int) -> int:
        """Vectors of a sound."""
        return (moments + 1) // 2 // 2

    def heard(self, samples: Samples) -> Samples:
        """[moments, mels], with silence behind the last."""
        (longest,), hop = self.largest("audio"), self.ear.hop
        moments = -(-len(samples) // hop)
        return self.ear.mel(samples, min(moments + _BEHIND, longest // hop))[:moments]

    def process_embeds(self, modality: str, embeds: Mapping[str, NDArray[Any]]) -> ProcessedItem:
        if modality != "audio":
            return super().process_embeds(modality, embeds)
        vectors = embeds["embeds"]
        if vectors.ndim != 2 or vectors.shape[1] != self.width or not len(vectors):
            raise RequestError(
                f"audio_embeds: the shape is {vectors.shape}, expected (vectors, {self.width})",
                "multi_modal_data",
            )
        return ProcessedItem([self.sound.audio_id] * len(vectors), arrays={"embeds": Array.of(vectors)})

    def most_vectors(self, modality: str) -> int:
        if modality != "audio":
            return super().most_vectors(modality)
        (longest,) = self.largest("audio")
        return self.num_heard(longest // self.ear.hop)

    def largest(self, modality: str) -> tuple[int, ...]:
        if modality != "audio":
            return super().largest(modality)
        return (self.ear.settings.size("chunk_length", 300) * self.ear.rate,)

    def positions(
        self, token_ids: Sequence[int], items: Sequence[MediaItem], facts: Sequence[Mapping[str, Any]]
    ) -> Array | None:
        """Those of a sound go on as a text's do."""
        seen = [(item, known) for item, known in zip(items, facts, strict=True) if "grid" in known]
        if not seen:
            return None
        those, known = [item for item, _ in seen], [known for _, known in seen]
        return Array.of(positions_of(len(token_ids), those, known, self.tower.merge, has_time=True))


class Qwen3OmniProcessor(OmniProcessor):
    """Qwen3-Omni hears longer, and nothing behind the last sample."""

    @property
    def fewest(self) -> int:
        return self.ear.fft // 2 + 1

    def num_heard(self, moments: int) -> int:
        whole, rest = divmod(moments, self.sound.window)
        return whole * -(-self.sound.window // 8) - (-rest // 8)

    def heard(self, samples: Samples) -> Samples:
        return self.ear.mel(samples, len(samples) // self.ear.hop, is_cut=True)

    def largest(self, modality: str) -> tuple[int, ...]:
        if modality != "audio":
            return super().largest(modality)
        return (_MOST_SECONDS * self.ear.rate,)
