"""Audio of Qwen2-Audio, Audio Flamingo 3, Voxtral, GLM-ASR and Qwen3-ASR: spectrograms of 100 frames per
second."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.omni import OmniAudioFacts
from quire.checkpoint.multimodal.qwen_audio import QwenAudioFacts
from quire.data.multimodal import Array
from quire.multimodal.images import processor_settings
from quire.multimodal.mel import Samples
from quire.multimodal.processors import Audio, Content, ProcessedItem
from quire.multimodal.processors.audio_base import MIN_FRAMES, AudioProcessor, num_chunk_vectors
from quire.multimodal.processors.image_base import SpanProcessor
from quire.text.tokenizer import Tokenizer

_MARKED = "Audio {}: <|audio_bos|>{}<|audio_eos|>"
_MAX_SECONDS = 2400
"""Maximum length in seconds of audio for Voxtral and Qwen3-ASR."""
_LEAST_SAMPLES = 8000
"""Number of samples to which shorter audio is padded for Qwen3-ASR."""


class QwenAudioProcessor(SpanProcessor):
    """Processor of Qwen2-Audio, and base of those of Audio Flamingo 3 and Voxtral. It resamples audio, and
    cuts off what exceeds the longest input of the encoder."""

    modalities = ("audio",)

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        self.facts: QwenAudioFacts = facts.tower
        super().__init__(self.facts.audio_id, self.facts.audio_id, self.facts.size_out, tokenizer)
        self.audio = AudioProcessor(path, self.facts.encoder)
        self.pieces = self.num_pieces(path)

    def num_pieces(self, path: Path) -> int:
        """Return the number of pieces, each an input of the encoder, into which the longest audio is cut."""
        return 1

    def text(self, modality: str, number: int) -> str:
        return _MARKED.format(number, super().text(modality, number))

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        assert isinstance(content, Audio)
        (longest,) = self.largest(modality)
        samples = self.audio.samples(content, arguments, longest, self.audio.min_samples)
        return self._process_samples(samples)

    def _process_samples(self, samples: Samples) -> ProcessedItem:
        max_samples = self.audio.max_samples
        pieces = [
            self._piece_mel(samples[at : at + max_samples]) for at in range(0, len(samples), max_samples)
        ]
        pieces = [piece for piece in pieces if len(piece) > MIN_FRAMES]
        count = sum(len(piece) // 4 for piece in pieces)
        return ProcessedItem([self.image_id] * count, arrays={"mel": Array.of(np.concatenate(pieces))})

    def _piece_mel(self, samples: Samples) -> Samples:
        """Return the log-mel spectrogram of a piece, [frames, mels], with two frames per hidden state of the
        encoder."""
        states = (-(-len(samples) // self.audio.hop) + 1) // 2
        return self.audio.padded_mel(samples)[: 2 * states + 1]

    def max_vectors(self, modality: str) -> int:
        return self.pieces * self.facts.tokens

    def largest(self, modality: str) -> tuple[int, ...]:
        return (self.pieces * self.audio.max_samples,)


class AudioFlamingoProcessor(QwenAudioProcessor):
    """Processor of Audio Flamingo 3: some minutes of audio, in pieces that are normalized separately."""

    max_seconds = 600
    """Maximum length in seconds of audio, unless the checkpoint sets it."""

    def num_pieces(self, path: Path) -> int:
        seconds = processor_settings(path).size("max_audio_len", self.max_seconds)
        return max(1, seconds * self.audio.rate // self.audio.max_samples)

    def text(self, modality: str, number: int) -> str:
        return SpanProcessor.text(self, modality, number)


class GlmAsrProcessor(AudioFlamingoProcessor):
    """Processor of GLM-ASR: pieces that are normalized separately, the last padded with silence."""

    max_seconds = 655

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        assert isinstance(content, Audio)
        (longest,) = self.largest(modality)
        fewest = (2 * self.facts.states - 2) * self.audio.hop + 1
        return self._process_samples(self.audio.samples(content, arguments, longest, fewest))

    def _process_samples(self, samples: Samples) -> ProcessedItem:
        max_samples, states = self.audio.max_samples, (-(-len(samples) // self.audio.hop) + 1) // 2
        pieces = [
            self.audio.padded_mel(samples[at : at + max_samples])
            for at in range(0, len(samples), max_samples)
        ]
        count = states // self.facts.states
        arrays = {
            "mel": Array.of(np.concatenate(pieces)),
            "count": Array.of(np.array([count], np.int32)),
        }
        return ProcessedItem([self.image_id] * count, arrays=arrays)


class VoxtralProcessor(QwenAudioProcessor):
    """Processor of Voxtral: audio in pieces of equal length, the last padded with silence, normalized
    together."""

    def num_pieces(self, path: Path) -> int:
        return max(1, _MAX_SECONDS * self.audio.rate // self.audio.max_samples)

    def text(self, modality: str, number: int) -> str:
        return f"[BEGIN_AUDIO]{SpanProcessor.text(self, modality, number)}"

    def _process_samples(self, samples: Samples) -> ProcessedItem:
        count = -(-len(samples) // self.audio.max_samples)
        token_ids = [self.image_id] * (count * self.facts.tokens)
        return ProcessedItem(token_ids, arrays={"mel": Array.of(self.audio.padded_mel(samples, count))})


class Qwen3ASRProcessor(SpanProcessor):
    """Processor of Qwen3-ASR: audio of up to 40 minutes as one spectrogram; short audio is padded with
    silence."""

    modalities = ("audio",)

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        self.facts: OmniAudioFacts = facts.tower
        super().__init__(self.facts.audio_id, self.facts.audio_id, self.facts.size_out, tokenizer)
        self.audio = AudioProcessor(path, self.facts.encoder)
        self.least = self.audio.settings.size("min_length", _LEAST_SAMPLES)

    def text(self, modality: str, number: int) -> str:
        ids = [self.facts.start_id, self.facts.audio_id, self.facts.end_id]
        return "".join(token or "" for token in self.tokenizer.convert_ids_to_tokens(ids))

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        assert isinstance(content, Audio)
        (longest,) = self.largest(modality)
        samples = self.audio.samples(content, arguments, longest, fewest=1)
        samples = np.pad(samples, (0, max(0, self.least - len(samples))))
        mel = self.audio.mel(samples, len(samples) // self.audio.hop, is_cut=True)
        count = num_chunk_vectors(len(mel), self.facts.window)
        return ProcessedItem([self.image_id] * count, arrays={"mel": Array.of(mel)})

    def max_vectors(self, modality: str) -> int:
        return num_chunk_vectors(self.largest(modality)[0] // self.audio.hop, self.facts.window)

    def largest(self, modality: str) -> tuple[int, ...]:
        return (_MAX_SECONDS * self.audio.rate,)
