"""Qwen2.5-Omni and Qwen3-Omni: images and videos as grids of patches, and audio of some minutes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.omni import OmniAudioFacts, OmniFacts
from quire.data.multimodal import Array, MediaItem
from quire.multimodal.mel import Samples
from quire.multimodal.processors import Audio, Content, ProcessedItem
from quire.multimodal.processors.audio_base import AudioProcessor, num_chunk_vectors
from quire.multimodal.processors.image_base import read_vectors
from quire.multimodal.processors.mrope import mrope_positions
from quire.multimodal.processors.qwen import GridProcessor
from quire.text.tokenizer import Tokenizer

_FRAME_VECTORS = (128, 768)
"""Minimum and maximum number of embeddings of a video frame, regardless of the checkpoint's settings."""
_AUDIO_ARGUMENTS = ("truncation",)
_REACH = 4
"""Number of mel frames after the last audio sample whose STFT windows still contain samples."""
_MAX_SECONDS = 2400
"""Maximum length in seconds of audio for Qwen3-Omni."""


class OmniProcessor(GridProcessor):
    """Processor of Qwen2.5-Omni for images, videos and audio. The arguments of images are ignored for audio,
    and those of audio for images."""

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        towers: OmniFacts = facts.tower
        super().__init__(path, replace(facts, tower=towers.grid), tokenizer)
        self.audio_facts: OmniAudioFacts = towers.sound
        self.audio = AudioProcessor(path, self.audio_facts.encoder)
        video = self.settings["video"]
        least, most = (count * video.unit**2 for count in _FRAME_VECTORS)
        self.settings["video"] = replace(video, least=least, most=most)

    def marks(self, modality: str) -> list[int]:
        return [self.audio_facts.audio_id] if modality == "audio" else super().marks(modality)

    def text(self, modality: str, number: int) -> str:
        if modality != "audio":
            return super().text(modality, number)
        ids = [self.audio_facts.start_id, self.audio_facts.audio_id, self.audio_facts.end_id]
        return "".join(token or "" for token in self.tokenizer.convert_ids_to_tokens(ids))

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        other = {name: value for name, value in arguments.items() if name not in _AUDIO_ARGUMENTS}
        if not isinstance(content, Audio):
            return super().process(modality, content, other)
        self.settings["image"].with_arguments(other)
        audio_arguments = {name: value for name, value in arguments.items() if name in _AUDIO_ARGUMENTS}
        (longest,) = self.largest("audio")
        mel = self.log_mel(self.audio.samples(content, audio_arguments, longest, self.fewest))
        span = [self.audio_facts.audio_id] * self.num_audio_vectors(len(mel))
        return ProcessedItem(span, arrays={"mel": Array.of(mel)})

    @property
    def fewest(self) -> int:
        """Return the number of samples of the shortest audio."""
        return self.audio.min_samples

    def num_audio_vectors(self, frames: int) -> int:
        return (frames + 1) // 2 // 2

    def log_mel(self, samples: Samples) -> Samples:
        """Return the log-mel spectrogram of samples that are padded with silence, [frames, mels]."""
        (longest,), hop = self.largest("audio"), self.audio.hop
        frames = -(-len(samples) // hop)
        return self.audio.mel(samples, min(frames + _REACH, longest // hop))[:frames]

    def process_embeds(self, modality: str, embeds: Mapping[str, NDArray[Any]]) -> ProcessedItem:
        if modality != "audio":
            return super().process_embeds(modality, embeds)
        vectors = read_vectors("audio", embeds, self.width)
        return ProcessedItem([self.audio_facts.audio_id] * len(vectors), arrays={"embeds": Array.of(vectors)})

    def max_vectors(self, modality: str) -> int:
        if modality != "audio":
            return super().max_vectors(modality)
        (longest,) = self.largest("audio")
        return self.num_audio_vectors(longest // self.audio.hop)

    def largest(self, modality: str) -> tuple[int, ...]:
        if modality != "audio":
            return super().largest(modality)
        return (self.audio.settings.size("chunk_length", 300) * self.audio.rate,)

    def positions(
        self, token_ids: Sequence[int], items: Sequence[MediaItem], facts: Sequence[Mapping[str, Any]]
    ) -> Array | None:
        """Return the M-RoPE positions of a prompt; audio tokens have positions like text."""
        visual = [(item, known) for item, known in zip(items, facts, strict=True) if "grid" in known]
        if not visual:
            return None
        visual_items, known = [item for item, _ in visual], [known for _, known in visual]
        return Array.of(mrope_positions(len(token_ids), visual_items, known, self.tower.merge, has_time=True))


class Qwen3OmniProcessor(OmniProcessor):
    """Processor of Qwen3-Omni: longer audio than for Qwen2.5-Omni, and no silence after the last sample."""

    @property
    def fewest(self) -> int:
        return self.audio.fft // 2 + 1

    def num_audio_vectors(self, frames: int) -> int:
        return num_chunk_vectors(frames, self.audio_facts.window)

    def log_mel(self, samples: Samples) -> Samples:
        return self.audio.mel(samples, len(samples) // self.audio.hop, is_cut=True)

    def largest(self, modality: str) -> tuple[int, ...]:
        if modality != "audio":
            return super().largest(modality)
        return (_MAX_SECONDS * self.audio.rate,)
