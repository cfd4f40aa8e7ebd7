"""Base of the audio processors of models with Whisper's encoder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quire.checkpoint.multimodal.whisper import WhisperFacts
from quire.checkpoint.reader import ConfigReader
from quire.errors import RequestError
from quire.multimodal.images import argument_errors, override_settings, stored_settings
from quire.multimodal.mel import Samples, log_mel, resampled
from quire.multimodal.processors import Audio


def read_samples(
    sound: Audio,
    settings: ConfigReader,
    arguments: Mapping[str, Any],
    *,
    rate: int,
    longest: int,
    fewest: int = 0,
) -> Samples:
    """Return the samples of audio at the sample rate `rate` of an encoder. Samples beyond `longest` are cut
    off or, if the setting `truncation` is off, raise a RequestError, as do fewer samples than `fewest`."""
    with argument_errors():
        is_cut = override_settings(settings, arguments, ("truncation",)).flag("truncation", True)
    sound = sound if sound.rate else Audio(sound.samples, rate)
    if not is_cut and len(sound.samples) * rate > longest * sound.rate:
        raise RequestError(
            f"the audio is {len(sound.samples) / sound.rate:.1f} seconds long, and "
            f"{longest / rate:.1f} are the maximum: set truncation to cut it"
        )
    samples = resampled(sound, rate, longest)
    if len(samples) < fewest:
        raise RequestError(
            f"the audio is too short: it has {len(samples)} samples at {rate} Hz, and "
            f"{fewest} are the minimum"
        )
    return samples


MIN_FRAMES = 3
"""Number of spectrogram frames of the shortest audio, which has one embedding."""


def num_chunk_vectors(frames: int, window: int) -> int:
    """Return the number of embeddings of audio with `frames` spectrogram frames, which the encoder reads in
    chunks of `window` frames."""
    chunks, rest = divmod(frames, window)
    return chunks * -(-window // 8) - (-rest // 8)


class AudioProcessor:
    """Preprocessor of audio for Whisper's encoder, which computes log-mel spectrograms with 100 frames per
    second."""

    def __init__(self, path: Path, encoder: WhisperFacts) -> None:
        self.facts = encoder
        self.settings = stored_settings(path, "feature_extractor", feature_size=encoder.mels)
        if self.settings.size("feature_size") != encoder.mels:
            raise self.settings.wrong("feature_size", f"{encoder.mels}, as the encoder has")
        self.rate = self.settings.size("sampling_rate", 16000)
        self.fft, self.hop = self.settings.size("n_fft", 400), self.settings.size("hop_length", 160)

    @property
    def max_samples(self) -> int:
        """Return the number of samples that one input of the encoder has, including padding."""
        return self.facts.num_frames * self.hop

    @property
    def min_samples(self) -> int:
        return (MIN_FRAMES - 1) * self.hop + 1

    def samples(self, sound: Audio, arguments: Mapping[str, Any], longest: int, fewest: int = 0) -> Samples:
        return read_samples(sound, self.settings, arguments, rate=self.rate, longest=longest, fewest=fewest)

    def padded_mel(self, samples: Samples, pieces: int = 1) -> Samples:
        """Return the spectrogram of samples that are padded with silence to `pieces` encoder inputs: [pieces
        * (frames + 1), mels]. Each piece ends with a zero frame, which the convolutions read."""
        mel = self.mel(samples, pieces * self.facts.num_frames)
        divided = np.pad(mel.reshape(pieces, -1, self.facts.mels), ((0, 0), (0, 1), (0, 0)))
        return divided.reshape(-1, self.facts.mels)

    def mel(self, samples: Samples, num_frames: int, *, is_cut: bool = False) -> Samples:
        """Return the log-mel spectrogram, [num_frames, mels], with the settings of the encoder. The samples
        are padded with silence unless `is_cut`."""
        mels, rate = self.facts.mels, self.rate
        return log_mel(samples, num_frames, mels=mels, rate=rate, fft=self.fft, hop=self.hop, is_cut=is_cut)
