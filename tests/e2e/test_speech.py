"""A tiny Whisper behind a server: a sound in pieces is written down as its twin hears each of them."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import torch
from fake_inputs import wav
from hearing import SECONDS, save_whisper
from seeing import make_tokenizer
from serve_process import PATIENCE_S, ServeProcess, eventually

from quire.frontend.speech import RATE, pieces_of

MARKS = "endoftext startoftranscript en de translate transcribe startofprev notimestamps"
PROMPT = "<|startoftranscript|><|de|><|transcribe|><|notimestamps|>"
NUM_TOKENS = 9


def heard(model: Any, processor: Any, tokenizer: Any, samples: np.ndarray) -> str:
    """What the twin writes, greedily."""
    mel = processor.features(samples, sampling_rate=RATE, return_tensors="pt").input_features
    ids = tokenizer(PROMPT, add_special_tokens=False).input_ids
    for _ in range(NUM_TOKENS):
        with torch.no_grad():
            logits = model(input_features=mel, decoder_input_ids=torch.tensor([ids])).logits
        ids.append(int(logits[0, -1].argmax()))
    return str(tokenizer.decode(ids[-NUM_TOKENS:], skip_special_tokens=True))


def test_sounds_are_written_down(tmp_path: Path) -> None:
    path = tmp_path / "whisper"
    model, processor = save_whisper(path)
    tokenizer = make_tokenizer([f"<|{name}|>" for name in MARKS.split()])
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(path)
    samples = np.random.default_rng(0).normal(0, 0.2, 5 * RATE).astype(np.float32)
    file = wav(samples[:, None], RATE, kind=3)
    pieces = [piece for _, piece in pieces_of(samples, SECONDS * RATE)]
    assert len(pieces) > 2
    expected = "".join(heard(model, processor, tokenizer, piece) for piece in pieces)
    flags = ("--dtype", "float32", "--served-model-name", "tiny")
    with ServeProcess(str(path), *flags, log=tmp_path / "log") as server:
        server.until_healthy()
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=PATIENCE_S)
        few = {"max_completion_tokens": NUM_TOKENS}
        asked: Any = {"model": "tiny", "file": ("a.wav", file), "language": "de", "extra_body": few}
        whole = client.audio.transcriptions.create(**asked)
        assert whole.text == expected.strip()
        stream: Any = client.audio.transcriptions.create(**asked, stream=True)
        assert "".join(chunk.choices[0]["delta"]["content"] for chunk in stream) == expected.lstrip()
        with (
            httpx.Client(base_url=server.url, timeout=PATIENCE_S) as fresh,
            fresh.stream(
                "POST", "/v1/audio/translations", data={"stream": "1"}, files={"file": file}
            ) as reply,
        ):
            assert reply.status_code == 200  # and nobody reads on
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        for name in gauges:
            eventually(f"{name} is 0", lambda name=name: server.metrics()[name] == 0.0)
        server.end_cleanly()
