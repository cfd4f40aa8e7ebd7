"""Audio that is small as a file and large in memory: an hour of silence compresses to kilobytes, and a header
may claim any rate or length. Quire limits the bytes of a file, its samples and its rate before it decodes
them. This is the class of CVE-2026-34755, for audio."""

import io
from typing import Any

import numpy as np
import pytest
from ask import chat, refused
from fake_engine import FakeEngine
from fake_inputs import data_url, engine_with_media, media, wav

SHORT = np.zeros((400, 1), np.int16)


def send_audio(engine: FakeEngine, data: bytes) -> Any:
    part = {"type": "audio_url", "audio_url": {"url": data_url(data, "audio/wav")}}
    return chat(engine, messages=[{"role": "user", "content": [part]}])


def silence(num_samples: int) -> bytes:
    """Return a FLAC file with one channel, far smaller than its samples."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format="flac") as output:
        stream = output.add_stream("flac", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, num_samples), np.int16), format="s16", layout="mono")
        frame.sample_rate = 16000
        for packet in (*stream.encode(frame), *stream.encode()):
            output.mux(packet)
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (wav(SHORT, rate=2**30), "sample rate of 1073741824 Hz is not supported"),
        (wav(SHORT, rate=0), "0 Hz"),
        (wav(np.zeros((4, 65), np.int16)), "65 channels"),
        (wav(np.full((4, 1), np.nan, np.float32), kind=3), "samples that are NaN"),
        (wav(SHORT)[:30], "broken or truncated"),
    ],
    ids=["rate", "no rate", "channels", "not a number", "cut off"],
)
def test_false_audio_headers_are_refused(data: bytes, words: str) -> None:
    engine = engine_with_media()
    assert words in refused(send_audio(engine, data))["message"] and not engine.seen
    assert send_audio(engine, wav(SHORT)).status_code == 200


def test_false_length_ends_with_the_file() -> None:
    data = wav(SHORT)
    place = data.index(b"data") + 4
    engine = engine_with_media()
    assert send_audio(engine, data[:place] + b"\xff\xff\xff\xff" + data[place + 4 :]).status_code == 200
    ((_, prompt, _, _),) = engine.seen
    assert prompt.media is not None and prompt.media.items[0].num_vectors == 400 // 100 + 1


@pytest.mark.parametrize("packed", [False, True])
def test_sample_count_is_bounded(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.multimodal.audio.MAX_SAMPLES", 10_000)
    engine = engine_with_media()
    data = silence(100_000) if packed else wav(np.zeros((100_000, 1), np.int16))
    assert not packed or len(data) < 20_000
    assert "more than 10000 samples" in refused(send_audio(engine, data))["message"] and not engine.seen


def test_file_size_is_bounded() -> None:
    engine = engine_with_media(media(env={"media_max_mb": 0.001}))
    assert "QUIRE_MEDIA_MAX_MB" in refused(send_audio(engine, wav(np.zeros((4000, 1), np.int16))))["message"]
    assert not engine.seen
