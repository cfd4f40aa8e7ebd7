"""Log-mel spectrograms of the Universal Speech Model (Gemma 3n and Gemma 4)."""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from quire.checkpoint.reader import ConfigReader
from quire.multimodal.mel import Samples


class USMSpectrogram:
    """Spectrogram with the settings `keys` of a feature extractor. With `adds_floor` the floor is added to
    the magnitudes; otherwise it is their minimum."""

    def __init__(self, keys: ConfigReader, mels: int, *, adds_floor: bool) -> None:
        if keys.size("feature_size") != mels:
            raise keys.wrong("feature_size", f"{mels}, as the encoder has")
        self.keys, self.mels, self.adds_floor = keys, mels, adds_floor
        self.rate = keys.size("sampling_rate", 16000)
        self.frame = round(self.rate * keys.number("frame_length_ms") / 1000)
        self.hop = round(self.rate * keys.number("hop_length_ms", 10.0) / 1000)

    def __call__(self, samples: Samples) -> NDArray[np.float32]:
        """Return the log-mel spectrogram, [frames, mels]."""
        keys, frame = self.keys, self.frame
        scaled = samples * keys.number("input_scale_factor", 1.0)
        frames = np.lib.stride_tricks.sliding_window_view(scaled, frame + 1)[:: self.hop]
        preemphasis = float(keys.get("preemphasis") or 0)
        if not preemphasis:
            emphasized = frames[:, :-1]
        elif keys.flag("preemphasis_htk_flavor", True):
            emphasized = frames[:, :-1].copy()
            emphasized[:, 1:] -= preemphasis * frames[:, :-2]
            emphasized[:, 0] *= 1 - preemphasis
        else:
            emphasized = frames[:, 1:] - preemphasis * frames[:, :-1]
        angles = 2 * np.pi * np.arange(frame, dtype=np.float32) / frame
        window = (0.5 * (1 - np.cos(angles))).astype(np.float32)
        size = 2 ** math.ceil(math.log2(frame)) * (2 if keys.flag("fft_overdrive") else 1)
        edges = float(keys.get("min_frequency") or 0), keys.number("max_frequency")
        filters = htk_filters(self.mels, size, self.rate, edges)
        magnitudes = np.abs(np.fft.rfft(emphasized * window, n=size)) @ filters
        floor = keys.number("mel_floor")
        out = np.log(magnitudes + floor if self.adds_floor else np.maximum(magnitudes, floor))
        for name, change in (("per_bin_mean", np.subtract), ("per_bin_stddev", np.divide)):
            if keys.get(name) is not None:
                out = change(out, np.asarray(keys.get(name)))
        return out.astype(np.float32)


@lru_cache
def htk_filters(count: int, fft: int, rate: int, edges: tuple[float, float]) -> NDArray[np.float64]:
    """Return the mel filter bank, [frequencies, count]: triangles of equal height, evenly spaced in mels."""
    low, high = (2595.0 * math.log10(1 + edge / 700.0) for edge in edges)
    corners = 700.0 * (10 ** (np.linspace(low, high, count + 2) / 2595.0) - 1)
    away = corners[None] - (np.arange(fft // 2 + 1) * (rate / fft))[:, None]
    widths = np.diff(corners)
    slopes: NDArray[np.float64] = np.minimum(-away[:, :-2] / widths[:-1], away[:, 2:] / widths[1:])
    return np.maximum(0, slopes)
