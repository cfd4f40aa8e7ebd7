"""Tests of a tiny Whisper behind a server: audio in chunks is transcribed as transformers transcribes each
chunk."""

from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import torch
from fake_inputs import wav
from hearing import SECONDS, save_scribe
from preloaded import Preloaded
from serve_process import PATIENCE_S, ServeProcess, eventually

from quire.frontend.speech import RATE, split_audio

PROMPT = "<|startoftranscript|><|de|><|transcribe|>"
NUM_TOKENS = 9


@torch.no_grad()
def reference_ids(model: Any, processor: Any, samples: np.ndarray, *, timed: bool = False) -> list[int]:
    """Return the ids that the transformers model generates greedily."""
    from transformers import WhisperTimeStampLogitsProcessor

    mel = processor.features(samples, sampling_rate=RATE, return_tensors="pt").input_features
    prompt = PROMPT if timed else PROMPT + "<|notimestamps|>"
    ids: list[int] = processor.tokenizer(prompt, add_special_tokens=False).input_ids
    rules = WhisperTimeStampLogitsProcessor(model.generation_config, len(ids))
    for _ in range(NUM_TOKENS):
        so_far = torch.tensor([ids])
        logits = model(input_features=mel, decoder_input_ids=so_far).logits[:, -1]
        ids.append(int((rules(so_far, logits) if timed else logits).argmax()))
    return ids[-NUM_TOKENS:]


def check_timestamps(
    transcription: Any, all_ids: list[list[int]], starts: list[int], zero: int, end_id: int
) -> None:
    """Check that every text token is in a segment between its timestamps, and so are words."""
    segments = iter(transcription.segments)
    for start, ids in zip(starts, all_ids, strict=True):
        assert ids[0] >= zero
        moment = 0
        for is_time, group in groupby(ids, lambda id: id >= zero):
            if is_time:
                *_, moment = group
            elif text := [id for id in group if id < end_id]:
                segment = next(segments)
                assert segment.tokens == text and segment.seek == round(start / RATE, 3)
                assert segment.start == round(start / RATE + 0.02 * (moment - zero), 3) <= segment.end
                assert 0 < segment.no_speech_prob < 1 and segment.avg_logprob < 0
    assert next(segments, None) is None
    times = [(word.start, word.end) for word in transcription.words]
    assert times and all(start <= end for start, end in times) and times[-1][1] <= transcription.duration


def test_audio_is_transcribed(tmp_path: Path, preloaded: Preloaded) -> None:
    path = tmp_path / "whisper"
    model, processor = save_scribe(path)
    samples = np.random.default_rng(0).normal(0, 0.2, 5 * RATE).astype(np.float32)
    file = wav(samples[:, None], RATE, kind=3)
    starts, pieces = zip(*split_audio(samples, SECONDS * RATE), strict=True)
    assert len(pieces) > 2
    decode = partial(processor.tokenizer.decode, skip_special_tokens=True)
    expected = "".join(decode(reference_ids(model, processor, piece)) for piece in pieces)
    timed = [reference_ids(model, processor, piece, timed=True) for piece in pieces]
    flags = ("--dtype", "float32", "--served-model-name", "tiny")
    with ServeProcess(str(path), *flags, log=tmp_path / "log", preloaded=preloaded) as server:
        server.until_healthy()
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE_S)
        few = {"max_completion_tokens": NUM_TOKENS}
        fields: Any = {"model": "tiny", "file": ("a.wav", file), "language": "de", "extra_body": few}
        whole = client.audio.transcriptions.create(**fields)
        assert whole.text == expected.strip()
        verbose = {"response_format": "verbose_json", "timestamp_granularities": ["word", "segment"]}
        zero = model.generation_config.no_timestamps_token_id + 1
        end_id = model.generation_config.eos_token_id
        result = client.audio.transcriptions.create(**fields, **verbose)
        check_timestamps(result, timed, list(starts), zero, end_id)
        stream: Any = client.audio.transcriptions.create(**fields, stream=True)
        assert "".join(chunk.choices[0]["delta"]["content"] for chunk in stream) == expected.lstrip()
        with (
            httpx.Client(base_url=server.url, timeout=PATIENCE_S) as fresh,
            fresh.stream(
                "POST", "/v1/audio/translations", data={"stream": "1"}, files={"file": file}
            ) as reply,
        ):
            assert reply.status_code == 200  # and the client reads no further
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        for name in gauges:
            eventually(f"{name} is 0", lambda name=name: server.metrics()[name] == 0.0)
        server.end_cleanly()
