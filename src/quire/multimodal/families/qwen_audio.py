"""Sounds of Qwen2-Audio and Audio Flamingo 3: how loud each pitch is, hundred times a second."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quire.config.facts import MediaFacts
from quire.config.media.qwen_audio import QwenAudioFacts
from quire.data.media import Array
from quire.errors import ConfigError, RequestError
from quire.multimodal.families import Content, Processed, Sound
from quire.multimodal.families.pictures import Pictures
from quire.multimodal.images import asked, stored_settings, whole_settings, wrong_argument
from quire.multimodal.mel import Samples, log_mel, resampled
from quire.text.tokenizer import Tokenizer

_MARKED = "Audio {}: <|audio_bos|>{}<|audio_eos|>"
_LEAST = 3
"""Moments of a sound of one vector."""


class QwenAudioProcessor(Pictures):
    """At most as long as the tower hears, in the rate that it was trained with; the rest is cut off."""

    modalities = ("audio",)

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        self.facts: QwenAudioFacts = facts.tower
        super().__init__(self.facts.audio_id, self.facts.audio_id, self.facts.size_out, tokenizer)
        encoder = self.facts.encoder
        self.settings = stored_settings(path, "feature_extractor", feature_size=encoder.mels)
        if self.settings.size("feature_size") != encoder.mels:
            raise self.settings.wrong("feature_size", f"{encoder.mels}, as many as the tower has")
        self.rate = self.settings.size("sampling_rate", 16000)
        self.fft, self.hop = self.settings.size("n_fft", 400), self.settings.size("hop_length", 160)
        self.pieces = self.num_pieces(path)

    def num_pieces(self, path: Path) -> int:
        """Of the longest sound, each as long as the tower hears at once."""
        return 1

    def text(self, modality: str, number: int) -> str:
        return _MARKED.format(number, super().text(modality, number))

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> Processed:
        assert isinstance(content, Sound)
        try:
            is_cut = asked(self.settings, arguments, ("truncation",)).flag("truncation", True)
        except ConfigError as error:
            raise wrong_argument(error) from error
        sound = content if content.rate else Sound(content.samples, self.rate)
        (longest,) = self.largest(modality)
        if not is_cut and len(sound.samples) * self.rate > longest * sound.rate:
            raise RequestError(
                f"the sound is {len(sound.samples) / sound.rate:.1f} seconds long, and "
                f"{longest / self.rate:.1f} are the most, unless it may be cut: truncation"
            )
        samples = resampled(sound, self.rate, longest)
        if len(samples) <= (_LEAST - 1) * self.hop:
            raise RequestError(
                f"the sound is too short: it has {len(samples)} samples at {self.rate} Hz, and "
                f"{(_LEAST - 1) * self.hop + 1} are the fewest"
            )
        at_once = self.facts.moments * self.hop
        pieces = [self._heard(samples[at : at + at_once]) for at in range(0, len(samples), at_once)]
        pieces = [each for each in pieces if len(each) > _LEAST]
        count = sum(len(each) // 4 for each in pieces)
        return Processed([self.image_id] * count, arrays={"mel": Array.of(np.concatenate(pieces))})

    def _heard(self, samples: Samples) -> Samples:
        """[moments, mels] of a piece, two for each state."""
        encoder = self.facts.encoder
        mel = log_mel(
            samples, self.facts.moments, mels=encoder.mels, rate=self.rate, fft=self.fft, hop=self.hop
        )
        states = (-(-len(samples) // self.hop) + 1) // 2
        # The convolutions look at the moment behind the last; behind the longest piece's last is nothing.
        return np.pad(mel, ((0, 1), (0, 0)))[: 2 * states + 1]

    def most_vectors(self, modality: str) -> int:
        return self.pieces * self.facts.tokens

    def largest(self, modality: str) -> tuple[int, ...]:
        return (self.pieces * self.facts.moments * self.hop,)


class AudioFlamingoProcessor(QwenAudioProcessor):
    """Some minutes, in pieces, each as loud as its own loudest."""

    def num_pieces(self, path: Path) -> int:
        seconds = whole_settings(path).size("max_audio_len", 600)
        return max(1, seconds * self.rate // (self.facts.moments * self.hop))

    def text(self, modality: str, number: int) -> str:
        return Pictures.text(self, modality, number)
