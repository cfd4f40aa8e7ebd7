"""Resampling of audio, and log-mel spectrograms as Whisper computes them."""

import math
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from quire.errors import RequestError
from quire.multimodal.processors import Audio

Samples = NDArray[np.float32]
_CROSSINGS = 64
"""Zero crossings on each side of the sinc, the filter that resamples audio."""
_PASSED = 0.95
"""Cutoff of the filter, as a fraction of the lower of both Nyquist frequencies. The pass band ends at 0.9,
and nothing aliases from 1 on."""
_KAISER_BETA = 10.0
"""Shape of the Kaiser window: the stop band is attenuated by 100 dB."""
_POINTS = 2048
"""Number of points in the filter's table between two zero crossings."""
_PHASES = 1000
"""Maximum number of filter phases. Other ratios of sample rates are approximated to some millionths."""
_AT_ONCE = 1 << 14
"""Number of output samples of the resampler that are computed at once."""
_LEAST_HZ = 1000
_LINEAR_HZ, _LINEAR_MELS = 1000.0, 15.0
"""Frequency in Hz, and the same in mels, up to which the mel scale is linear; above, it is logarithmic."""
_MELS_PER_LOG = 27 / math.log(6.4)
_QUIETEST = 1e-10
_FRAMES = 4096
"""Maximum number of frames whose spectra are in memory at once."""


def resampled(sound: Audio, rate: int, most: int) -> Samples:
    """Convert audio to `rate` samples per second, and return at most the first `most` samples."""
    samples = sound.samples
    if sound.rate == rate:
        return samples[:most]
    if sound.rate < _LEAST_HZ:
        raise RequestError(f"a sample rate of {sound.rate} Hz is too low: {_LEAST_HZ} is the minimum")
    down, up = Fraction(sound.rate, rate).limit_denominator(_PHASES).as_integer_ratio()
    count = min(most, -(-len(samples) * up // down))
    cutoff = _PASSED * min(1.0, up / down)
    reach = math.ceil(_CROSSINGS / cutoff)
    used = samples[: count * down // up + reach + 1]
    padded = np.pad(used, (reach, reach + down // up + 1))
    distances = cutoff * np.arange(-reach, reach + 1)
    places, filter = _filter()
    out = np.empty(count, np.float32)
    for phase in range(min(up, count)):
        # All outputs of a phase have the same distance to an input sample.
        first, behind = divmod(phase * down, up)
        taps = np.interp(np.abs(distances - cutoff * behind / up), places, filter, right=0)
        rows = out[phase::up]
        rows[:] = _filtered(padded[first:], (cutoff * taps).astype(np.float32), down, len(rows))
    return out


def _filtered(samples: Samples, taps: Samples, step: int, count: int) -> Samples:
    """Return the dot products of the filter `taps` with `count` windows of the samples. Each window begins
    `step` samples after the one before."""
    wide = -(-len(taps) // step)
    if step == 1 or wide == 1:
        around = np.lib.stride_tricks.sliding_window_view(samples, len(taps))
        windows: Samples = around[::step][:count] @ taps
        return windows
    # Windows overlap, but rows of `step` samples do not: multiply those with all rows of taps in one matmul,
    # then sum the diagonals.
    weights = np.pad(taps, (0, wide * step - len(taps))).reshape(wide, step).T
    out = np.empty(count, np.float32)
    for start in range(0, count, _AT_ONCE):
        num = min(_AT_ONCE, count - start)
        used = samples[start * step : (start + num + wide - 1) * step]
        rows = np.pad(used, (0, (num + wide - 1) * step - len(used))).reshape(-1, step)
        products = rows @ weights
        down, right = products.strides
        diagonals = np.lib.stride_tricks.as_strided(products, (num, wide), (down, down + right))
        out[start : start + num] = diagonals.sum(axis=1)
    return out


@lru_cache
def _filter() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the right half of a Kaiser-windowed sinc filter: positions, in zero crossings, and values."""
    places = np.linspace(0, _CROSSINGS, _CROSSINGS * _POINTS + 1)
    window = np.i0(_KAISER_BETA * np.sqrt(1 - (places / _CROSSINGS) ** 2)) / np.i0(_KAISER_BETA)
    return places, np.sinc(places) * window


@lru_cache
def mel_filters(count: int, fft: int, rate: int) -> NDArray[np.float64]:
    """Return the mel filter bank, [frequencies, count]: triangles of equal area with corners evenly spaced in
    mels up to 8 kHz."""
    top = _LINEAR_MELS + math.log(8000.0 / _LINEAR_HZ) * _MELS_PER_LOG
    mels = np.linspace(0.0, top, count + 2)
    above = _LINEAR_HZ * np.exp((mels - _LINEAR_MELS) / _MELS_PER_LOG)
    corners = np.where(mels < _LINEAR_MELS, mels * _LINEAR_HZ / _LINEAR_MELS, above)
    left, middle, right = corners[:-2], corners[1:-1], corners[2:]
    hertz = np.linspace(0, rate // 2, fft // 2 + 1)[:, None]
    sides = np.minimum((hertz - left) / (middle - left), (right - hertz) / (right - middle))
    filters: NDArray[np.float64] = np.maximum(0, sides) * 2 / (right - left)
    return filters


def log_mel(
    samples: Samples,
    frames: int,
    *,
    mels: int,
    rate: int,
    fft: int = 400,
    hop: int = 160,
    is_cut: bool = False,
) -> Samples:
    """Return the log-mel spectrogram, [frames, mels], clipped at 80 dB below its maximum and scaled as for
    Whisper. The samples are padded with silence to `frames * hop`, or not padded if `is_cut`."""
    length = len(samples) if is_cut else min(len(samples) + 2 * fft, frames * hop)
    signal = np.zeros(length, np.float64)
    signal[: len(samples)] = samples[: len(signal)]
    around = np.lib.stride_tricks.sliding_window_view(np.pad(signal, fft // 2, mode="reflect"), fft)[::hop]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(fft) / fft)
    out: Samples = np.full((frames, mels), np.log10(_QUIETEST), np.float32)
    for first in range(0, min(frames, len(around)), _FRAMES):
        power = np.abs(np.fft.rfft(around[first : min(first + _FRAMES, frames)] * window)) ** 2
        log_power = np.log10(np.maximum(power @ mel_filters(mels, fft, rate), _QUIETEST))
        out[first : first + len(log_power)] = log_power
    out = (np.maximum(out, out.max() - 8) + 4) / 4
    return out
