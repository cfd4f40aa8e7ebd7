"""Sounds as numbers: at another rate, and how loud each pitch is in each moment, as Whisper hears it."""

import math
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from quire.errors import RequestError
from quire.multimodal.processors import Sound

Samples = NDArray[np.float32]
_CROSSINGS = 64
"""Zeros of the sinc on each side."""
_PASSED = 0.95
"""Of the lower rate's half, where the filter falls by half: nothing is lost up to 0.9, nothing folds back
from 1 on."""
_KAISER_BETA = 10.0
"""What is to be kept out is 100 dB down."""
_POINTS = 2048
"""Of the filter's table, from one zero to the next."""
_PHASES = 1000
"""Filters at most: rates that need more are taken for their neighbours, some millionths away."""
_AT_ONCE = 1 << 14
"""Samples that are made of so many windows."""
_LEAST_HZ = 1000
_LINEAR_HZ, _LINEAR_MELS = 1000.0, 15.0
"""Mels count pitches evenly up to there, and by their logarithms above."""
_MELS_PER_LOG = 27 / math.log(6.4)
_QUIETEST = 1e-10
_FRAMES = 4096
"""Whose spectra are in memory at once."""


def resampled(sound: Sound, rate: int, most: int) -> Samples:
    """The first `most` samples of the sound at this rate."""
    samples = sound.samples
    if sound.rate == rate:
        return samples[:most]
    if sound.rate < _LEAST_HZ:
        raise RequestError(f"a sample rate of {sound.rate} Hz is too low: {_LEAST_HZ} is the least")
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
        # These outputs all lie equally far behind an input.
        first, behind = divmod(phase * down, up)
        taps = np.interp(np.abs(distances - cutoff * behind / up), places, filter, right=0)
        rows = out[phase::up]
        rows[:] = _filtered(padded[first:], (cutoff * taps).astype(np.float32), down, len(rows))
    return out


def _filtered(samples: Samples, taps: Samples, step: int, count: int) -> Samples:
    """The sums of `count` windows of samples, each `step` behind the one before, times the taps."""
    wide = -(-len(taps) // step)
    if step == 1 or wide == 1:
        around = np.lib.stride_tricks.sliding_window_view(samples, len(taps))
        windows: Samples = around[::step][:count] @ taps
        return windows
    # Windows overlap, and rows of `step` samples do not: these times each row of taps is one fast product,
    # whose diagonals are summed.
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
    """A sinc under Kaiser's window, from its middle on: how far, in zeros, and how much."""
    places = np.linspace(0, _CROSSINGS, _CROSSINGS * _POINTS + 1)
    window = np.i0(_KAISER_BETA * np.sqrt(1 - (places / _CROSSINGS) ** 2)) / np.i0(_KAISER_BETA)
    return places, np.sinc(places) * window


@lru_cache
def mel_filters(count: int, fft: int, rate: int) -> NDArray[np.float64]:
    """[frequencies, count]: triangles over the frequencies, of one area, whose corners are even in mels up to
    8 kHz."""
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
    """[frames, mels] of samples with silence behind them, `frames * hop` in all, or with nothing (`is_cut`):
    logarithms of the power, from the loudest of all down to 80 dB less."""
    length = len(samples) if is_cut else min(len(samples) + 2 * fft, frames * hop)
    heard = np.zeros(length, np.float64)
    heard[: len(samples)] = samples[: len(heard)]
    around = np.lib.stride_tricks.sliding_window_view(np.pad(heard, fft // 2, mode="reflect"), fft)[::hop]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(fft) / fft)
    out: Samples = np.full((frames, mels), np.log10(_QUIETEST), np.float32)
    for first in range(0, min(frames, len(around)), _FRAMES):
        power = np.abs(np.fft.rfft(around[first : min(first + _FRAMES, frames)] * window)) ** 2
        found = np.log10(np.maximum(power @ mel_filters(mels, fft, rate), _QUIETEST))
        out[first : first + len(found)] = found
    out = (np.maximum(out, out.max() - 8) + 4) / 4
    return out
