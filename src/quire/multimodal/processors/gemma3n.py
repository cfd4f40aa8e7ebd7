"""Audio of Gemma 3n: log-mel spectrograms, 100 frames per second, of at most 30 seconds."""

import math
from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.checkpoint.facts import MediaFacts
from quire.checkpoint.multimodal.gemma3n import Gemma3nFacts
from quire.data.multimodal import Array
from quire.errors import RequestError
from quire.multimodal.images import stored_settings
from quire.multimodal.mel import Samples
from quire.multimodal.processors import Audio, Content, ProcessedItem
from quire.multimodal.processors.audio_base import read_samples
from quire.multimodal.processors.gemma import NewlineTokens
from quire.multimodal.processors.image_base import SpanProcessor
from quire.text.tokenizer import Tokenizer

_LONGEST = 480000
"""Maximum number of audio samples."""
_UNIT = 128
"""Number of samples to a multiple of which audio is padded with silence."""


class Gemma3nProcessor(SpanProcessor):
    """Processor of Gemma 3n audio. The placeholder in prompts is the audio token; newlines around the span
    merge with the text's."""

    modalities = ("audio",)

    def __init__(self, path: Path, facts: MediaFacts, tokenizer: Tokenizer) -> None:
        self.facts: Gemma3nFacts = facts.tower
        super().__init__(self.facts.audio_id, self.facts.audio_id, self.facts.size_out, tokenizer)
        self.joined = NewlineTokens(tokenizer).joined
        self.settings = stored_settings(path, "feature_extractor", feature_size=self.facts.mels)
        if self.settings.size("feature_size") != self.facts.mels:
            raise self.settings.wrong("feature_size", f"{self.facts.mels}, as the encoder has")
        self.rate = self.settings.size("sampling_rate", 16000)
        self.frame = round(self.rate * self.settings.number("frame_length_ms", 32.0) / 1000)
        self.hop = round(self.rate * self.settings.number("hop_length_ms", 10.0) / 1000)

    def process(self, modality: str, content: Content, arguments: Mapping[str, Any]) -> ProcessedItem:
        assert isinstance(content, Audio)
        samples = read_samples(
            content, self.settings, arguments, rate=self.rate, longest=_LONGEST, fewest=self.frame + 1
        )
        return self.build_item(self._span, arrays={"mel": Array.of(self._log_mel(samples))})

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

    def _log_mel(self, samples: Samples) -> NDArray[np.float32]:
        """Return the log-mel spectrogram of samples, [frames, mels]."""
        keys, frame = self.settings, self.frame
        padded = np.pad(samples, (0, -len(samples) % _UNIT)) * keys.number("input_scale_factor", 1.0)
        frames = np.lib.stride_tricks.sliding_window_view(padded, frame + 1)[:: self.hop]
        preemphasis = keys.number("preemphasis", 0.97)
        if keys.flag("preemphasis_htk_flavor", True):
            emphasized = frames[:, :-1].copy()
            emphasized[:, 1:] -= preemphasis * frames[:, :-2]
            emphasized[:, 0] *= 1 - preemphasis
        else:
            emphasized = frames[:, 1:] - preemphasis * frames[:, :-1]
        angles = 2 * np.pi * np.arange(frame, dtype=np.float32) / frame
        window = (0.5 * (1 - np.cos(angles))).astype(np.float32)
        size = 2 ** math.ceil(math.log2(frame)) * (2 if keys.flag("fft_overdrive", True) else 1)
        edges = keys.number("min_frequency", 125.0), keys.number("max_frequency", 7600.0)
        filters = _filters(self.facts.mels, size, self.rate, edges)
        magnitudes = np.abs(np.fft.rfft(emphasized * window, n=size)) @ filters
        out: NDArray[np.float32] = np.log(np.maximum(magnitudes, keys.number("mel_floor", 1e-5)))
        for name, change in (("per_bin_mean", np.subtract), ("per_bin_stddev", np.divide)):
            if keys.get(name) is not None:
                out = change(out, np.asarray(keys.get(name)))
        return out.astype(np.float32)

    def max_vectors(self, modality: str) -> int:
        return self.facts.tokens + 1

    def largest(self, modality: str) -> tuple[int, ...]:
        return (_LONGEST,)


@lru_cache
def _filters(count: int, fft: int, rate: int, edges: tuple[float, float]) -> NDArray[np.float64]:
    """Return the mel filter bank, [frequencies, count]: triangles of equal height, evenly spaced in mels."""
    low, high = (2595.0 * math.log10(1 + edge / 700.0) for edge in edges)
    corners = 700.0 * (10 ** (np.linspace(low, high, count + 2) / 2595.0) - 1)
    away = corners[None] - (np.arange(fft // 2 + 1) * (rate / fft))[:, None]
    widths = np.diff(corners)
    slopes: NDArray[np.float64] = np.minimum(-away[:, :-2] / widths[:-1], away[:, 2:] / widths[1:])
    return np.maximum(0, slopes)
