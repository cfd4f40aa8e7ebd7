"""Decoding of audio files to mono samples at the sample rate of the file."""

import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import RequestError
from quire.multimodal import pyav
from quire.multimodal.limits import Take
from quire.multimodal.processors import Audio

MAX_SAMPLES = 1 << 28
"""Maximum number of samples of a file, summed over its channels: 1.5 hours of mono audio at 48 kHz."""
MAX_RATE = 768_000
_MAX_SAMPLE = 1e12
"""Maximum absolute sample. Clients may send unscaled 32-bit integers; the power of more may overflow."""
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_SAMPLE_BYTES = 8
"""Bytes that are reserved per sample while decoding: for an intermediate copy and for the float32 result."""
_RESERVED_SAMPLES = 1 << 20
"""Number of samples for which memory is reserved at a time, if the length of the audio is unknown."""

_Samples = NDArray[np.float32]
_WIDTHS: dict[tuple[int, int], Callable[[memoryview], _Samples]] = {
    (_PCM, 8): lambda data: _scaled(np.frombuffer(data, np.uint8).astype(np.int16) - 128, 7),
    (_PCM, 16): lambda data: _scaled(np.frombuffer(data, "<i2"), 15),
    (_PCM, 24): lambda data: _of_24_bits(data),
    (_PCM, 32): lambda data: _scaled(np.frombuffer(data, "<i4"), 31),
    (_FLOAT, 32): lambda data: np.frombuffer(data, "<f4").astype(np.float32),
    (_FLOAT, 64): lambda data: np.frombuffer(data, "<f8").astype(np.float32),
}
"""Functions that convert the sample data of a WAV file to float32, by format code and bits per sample.
Integers are scaled to the range from -1 to 1."""


def decode_audio(data: bytes, take: Take = lambda num_bytes: None) -> Audio:
    """Decode an audio file to mono samples at the sample rate of the file. `take` is called with each number
    of bytes to reserve before memory is allocated."""
    if data[:4] in (b"RIFF", b"RIFX") and data[8:12] == b"WAVE":
        return _decode_wav(data, take)
    return _decode_with_pyav(data, take)


def checked(samples: NDArray[Any], rate: int) -> Audio:
    """Return samples [n] or [n, channels] as mono audio, with the channels averaged. Raise a RequestError for
    invalid samples or an unsupported `rate` (samples per second)."""
    if not 0 <= rate <= MAX_RATE:
        raise RequestError(f"a sample rate of {rate} Hz is not supported: the maximum is {MAX_RATE}")
    if not samples.size or samples.ndim > 2:
        raise RequestError(f"audio of shape {list(samples.shape)} has no samples")
    if samples.size > MAX_SAMPLES:
        raise RequestError(f"the audio has {samples.size} samples, and {MAX_SAMPLES} are the maximum")
    numbers: _Samples = samples.astype(np.float32, copy=False)
    if not (numbers.min() >= -_MAX_SAMPLE and numbers.max() <= _MAX_SAMPLE):  # both are false for NaN
        raise RequestError(f"the audio has samples that are NaN or larger than {_MAX_SAMPLE:g}")
    return Audio(numbers if numbers.ndim == 1 else numbers.mean(axis=1, dtype=np.float32), rate)


def _decode_wav(data: bytes, take: Take) -> Audio:
    if data[:4] == b"RIFX":
        raise RequestError("RIFX WAV files are not supported; send RIFF")
    form: bytes | None = None
    for name, body in _chunks(data):
        if name == b"fmt ":
            form = bytes(body)
        elif name == b"data" and form is not None:
            return _decode_samples(form, body, take)
    raise RequestError("the WAV file is broken or truncated: it has no `fmt ` or no `data`")


def _chunks(data: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the name and content of each chunk of a WAV file; content beyond the file's end is cut off."""
    place, view = 12, memoryview(data)
    while place + 8 <= len(data):
        name, length = struct.unpack_from("<4sI", data, place)
        yield name, view[place + 8 : place + 8 + length]
        place += 8 + length + length % 2


def _decode_samples(form: bytes, body: memoryview, take: Take) -> Audio:
    if len(form) < 16:
        raise RequestError("the WAV file is broken: its `fmt ` is too short")
    kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", form)
    if kind == _EXTENSIBLE and len(form) >= 26:
        kind = struct.unpack_from("<H", form, 24)[0]
    read = _WIDTHS.get((kind, bits))
    if read is None:
        raise RequestError(
            f"a WAV file of format {kind} with {bits} bits is not supported: send PCM of 8, 16, 24 or 32 "
            "bits, or floats"
        )
    if not 1 <= channels <= 64 or not rate:
        raise RequestError(f"a WAV file of {channels} channels and {rate} Hz is not supported")
    width = channels * bits // 8
    if len(body) // (bits // 8) > MAX_SAMPLES:
        raise RequestError(f"the audio has more than {MAX_SAMPLES} samples")
    take(len(body) // (bits // 8) * _SAMPLE_BYTES)
    samples = read(body[: len(body) // width * width])
    return checked(samples.reshape(-1, channels), rate)


def _scaled(numbers: NDArray[Any], bits: int) -> _Samples:
    scaled: _Samples = numbers.astype(np.float32)
    scaled *= np.float32(2.0**-bits)
    return scaled


def _of_24_bits(data: memoryview) -> _Samples:
    wide = np.zeros((len(data) // 3, 4), np.uint8)
    wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
    return _scaled(wide.view("<i4")[:, 0], 31)


def _decode_with_pyav(data: bytes, take: Take) -> Audio:
    with pyav.opened(data, "audio") as container:
        import av

        if not container.streams.audio:
            raise RequestError("the file has no audio stream")
        stream = container.streams.audio[0]
        rate, pieces, count, reserved = stream.rate, [], 0, 0
        resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
        for frame in container.decode(stream):
            for chunk in resampler.resample(frame):
                pieces.append(chunk.to_ndarray().reshape(-1))
                count += pieces[-1].size
                if count > MAX_SAMPLES:
                    raise RequestError(f"the audio has more than {MAX_SAMPLES} samples")
                if count > reserved:  # the length in the header may be wrong
                    take(_RESERVED_SAMPLES * _SAMPLE_BYTES)
                    reserved += _RESERVED_SAMPLES
        return checked(np.concatenate(pieces) if pieces else np.zeros(0, np.float32), rate)
