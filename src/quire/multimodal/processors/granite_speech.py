"""Audio of Granite Speech: log-mel spectrograms, two frames of 10 ms to a vector."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.granite_speech import GraniteSpeechFacts
from quire.checkpoint.reader import ConfigReader
from quire.data.multimodal import Array
from quire.multimodal.images import stored_settings
from quire.multimodal.mel import Samples
from quire.multimodal.processors import Audio, Content, ProcessedItem
from quire.multimodal.processors.audio_base import read_samples
from quire.multimodal.processors.image_base import SpanProcessor
from quire.multimodal.usm_mel import htk_filters
from quire.text.tokenizer import Tokenizer

_MAX_SECONDS = 600
_QUIETEST = 1e-10


class GraniteSpeechProcessor(SpanProcessor):
    """Processor of Granite Speech audio of at most ten minutes."""

    modalities = ("audio",)

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        self.facts: GraniteSpeechFacts = facts.tower
        super().__init__(self.facts.audio_id, self.facts.audio_id, self.facts.size_out, tokenizer)
        self.settings = stored_settings(path, "audio_processor")
        section = self.settings.get("melspec_kwargs")
        keys = ConfigReader(self.settings.source, section) if isinstance(section, dict) else self.settings
        self.rate = self.settings.size("sampling_rate", 16000)
        self.fft, self.hop = keys.size("n_fft", 512), keys.size("hop_length", 160)
        self.window, self.mels = keys.size("win_length", 400), self.facts.size_in // 2
        if keys.size("n_mels", self.mels) != self.mels:
            raise keys.wrong("n_mels", f"{self.mels}, as the encoder has")

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        assert isinstance(content, Audio)
        (longest,) = self.largest(modality)
        samples = read_samples(
            content, self.settings, arguments, rate=self.rate, longest=longest, fewest=self.fft // 2 + 1
        )
        mel = self._log_mel(samples)
        return ProcessedItem([self.image_id] * self._count(len(mel)), arrays={"mel": Array.of(mel)})

    def _count(self, num_states: int) -> int:
        """Return the number of embeddings of audio with this number of encoder states."""
        return -(-num_states // self.facts.window) * self.facts.queries

    def _log_mel(self, samples: Samples) -> NDArray[np.float32]:
        """Return the log-mel spectrogram with two frames in a row, clipped at 80 dB below its maximum."""
        around = np.pad(samples, self.fft // 2, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(around, self.fft)[:: self.hop]
        window = np.zeros(self.fft)
        first = (self.fft - self.window) // 2
        angles = 2 * np.pi * np.arange(self.window) / self.window
        window[first : first + self.window] = 0.5 - 0.5 * np.cos(angles)
        filters = htk_filters(self.mels, self.fft, self.rate, (0.0, self.rate / 2))
        power = np.abs(np.fft.rfft(frames[: len(frames) // 2 * 2] * window)) ** 2 @ filters
        out = np.log10(np.maximum(power, _QUIETEST))
        top = np.abs(np.fft.rfft(frames[-1:] * window)) ** 2 @ filters  # the maximum is of all frames
        most = max(out.max(), np.log10(np.maximum(top, _QUIETEST)).max())
        scaled = np.maximum(out, most - 8) / 4 + 1
        stacked: NDArray[np.float32] = scaled.astype(np.float32).reshape(-1, 2 * self.mels)
        return stacked

    def max_vectors(self, modality: str) -> int:
        (longest,) = self.largest(modality)
        return self._count((longest // self.hop + 1) // 2)

    def largest(self, modality: str) -> tuple[int, ...]:
        return (_MAX_SECONDS * self.rate,)
