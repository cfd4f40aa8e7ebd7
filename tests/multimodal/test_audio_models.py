"""Tests of audio models against transformers: features, placeholders, embeddings, answers."""

import base64
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_inputs import data_url, wav
from finished import finished
from hearing import (
    MARK,
    RATE,
    SECONDS,
    noise,
    save_flamingo,
    save_glm_asr,
    save_qwen_audio,
    save_voxtral,
    sound,
)
from seeing import close
from tiny_engine import load_tower, open_llm

from quire import LLM, SamplingParams
from quire.checkpoint import weights
from quire.checkpoint.model import read_checkpoint
from quire.errors import RequestError
from quire.multimodal.mel import _filtered, log_mel, resampled
from quire.multimodal.processors import PROCESSORS, Audio
from quire.text.tokenizer import load_tokenizer

COUNT = 5
PARAMS = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
LENGTHS = (321, 480, 481, 5000, 12345, 31840, 31841, SECONDS * RATE, SECONDS * RATE + 777)
"""Numbers of samples: the fewest, at window borders, the maximum, and more."""


class Twin:
    """A tiny checkpoint, with transformers' model and processor, and our processor."""

    def __init__(self, path: Path, save: Callable[[Path], tuple[Any, Any]]) -> None:
        self.path = path
        self.model, self.processor = save(path)
        self.checkpoint = read_checkpoint(path)
        assert self.checkpoint.facts.media is not None
        self.media = self.checkpoint.facts.media
        self.ours = PROCESSORS[self.media.family](path, self.media, load_tokenizer(path, "hf"))

    def tower(self) -> Any:
        return load_tower(self.path)

    def inputs(self, text: str, sounds: list[Audio]) -> Any:
        samples = [item.samples[: SECONDS * RATE] for item in sounds]
        if not samples:
            return self.processor.tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        return self.processor(text=text, audio=samples, sampling_rate=RATE, return_tensors="pt")


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return Twin(tmp_path_factory.mktemp("qwen_audio"), save_qwen_audio)


@pytest.mark.parametrize("mels", [80, 128])
def test_mel_features_equal_transformers(mels: int) -> None:
    from transformers import WhisperFeatureExtractor

    reference = WhisperFeatureExtractor(feature_size=mels, chunk_length=SECONDS)
    for count in (1, *LENGTHS[:-1]):
        samples = noise(count)
        padded = np.pad(samples, (0, SECONDS * RATE - count))
        (expected,) = reference._np_extract_fbank_features(padded[None], "cpu")
        close(log_mel(samples, SECONDS * 100, mels=mels, rate=RATE), expected.T)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 44101, 48000, 96000, 767999])
def test_resampling_keeps_a_tone(rate: int) -> None:
    """Tones up to 0.9 of both Nyquist frequencies are kept; higher ones are removed. Tones at odd sample
    rates are off by millionths."""
    within = 0.03 if rate in (44101, 767999) else 2e-5

    def tone(hertz: float, rate: int, count: int) -> np.ndarray[Any, Any]:
        return np.sin(2 * np.pi * hertz * np.arange(count) / rate).astype(np.float32)

    for hertz in (50, 0.44 * min(rate, RATE)):
        result = resampled(Audio(tone(hertz, rate, rate // 4), rate), RATE, RATE)
        assert len(result) == -(-(rate // 4) * RATE // rate)
        middle = slice(len(result) // 4, -len(result) // 4)
        close(result[middle], tone(hertz, RATE, len(result))[middle], within)
    if rate > RATE * 1.1:
        gone = resampled(Audio(tone(8100, rate, rate // 4), rate), RATE, RATE)
        assert np.abs(gone[len(gone) // 4 : -len(gone) // 4]).max() < 2e-5
    assert len(resampled(Audio(tone(50, rate, rate // 4), rate), RATE, 100)) == 100


def test_placeholders_and_features_equal_transformers(twin: Twin) -> None:
    for count in LENGTHS:
        audio = sound(count)
        reference = twin.inputs(MARK, [audio])
        processed = twin.ours.process("audio", audio, {})
        mel = processed.arrays["mel"].numbers()
        expected = np.pad(reference["input_features"][0].numpy().T, ((0, 1), (0, 0)))
        close(mel, expected[: len(mel)], 1e-4)
        assert processed.token_ids == reference["input_ids"][0].tolist()[1:-1]
    for wrong, message in (
        (Audio(noise(320), RATE), "too short: it has 320 samples"),
        (Audio(noise(900), 7), "7 Hz is too low"),
    ):
        with pytest.raises(RequestError, match=message):
            twin.ours.process("audio", wrong, {})
    with pytest.raises(RequestError, match="seconds long"):
        twin.ours.process("audio", sound(LENGTHS[-1]), {"truncation": False})
    with pytest.raises(RequestError, match="has no 'size'"):
        twin.ours.process("audio", sound(5000), {"size": 3})


@torch.no_grad()
def test_audio_embeddings_equal_transformers(twin: Twin) -> None:
    """Audio of all lengths is in one batch. Catches a missing layer, attention to padding, a wrong
    convolution border."""
    sounds = [sound(count, seed) for seed, count in enumerate(LENGTHS)]
    inputs = twin.inputs(MARK * len(sounds), sounds)
    parts = twin.model.model
    lens = inputs["feature_attention_mask"].sum(-1)
    states, _ = parts.audio_tower._get_feat_extract_output_lengths(lens)
    seen = torch.arange(SECONDS * 50)[None] < states[:, None]
    mask = torch.zeros(len(sounds), 1, 1, SECONDS * 50).masked_fill(~seen[:, None, None], -torch.inf)
    heard = parts.audio_tower(inputs["input_features"], attention_mask=mask).last_hidden_state
    reference = parts.multi_modal_projector(heard)
    tower = twin.tower()
    items = [twin.ours.process("audio", audio, {}) for audio in sounds]
    arrays = [{"mel": torch.from_numpy(item.arrays["mel"].numbers().copy())} for item in items]
    vectors = tower.encode("audio", arrays)
    for item, vector, their in zip(items, vectors, reference, strict=True):
        assert len(vector) == len(item.token_ids)
        torch.testing.assert_close(vector, their[: len(vector)], atol=1e-4, rtol=1e-4)
    (blank,) = tower.encode("audio", [tower.blank("audio", twin.ours.max_vectors("audio"))])
    assert len(blank) == twin.ours.max_vectors("audio") == max(map(len, vectors))
    assert tower.cost("audio", {"mel": (9, 20)}) < tower.cost("audio", {"mel": (19, 20)})


@torch.inference_mode()
def generate_reference(twin: Twin, text: str, sounds: list[Audio]) -> list[int]:
    inputs = twin.inputs(text, sounds)
    out = twin.model.generate(**inputs, max_new_tokens=COUNT, do_sample=False)
    token_ids: list[int] = out[0, inputs["input_ids"].shape[1] :].tolist()
    return token_ids


def engine(twin: Twin) -> LLM:
    return open_llm(twin.path, max_num_seqs=4, max_num_batched_tokens=32)


@pytest.fixture(scope="module")
def llm(twin: Twin) -> LLM:
    return engine(twin)


def test_answers_about_audio_equal_transformers(twin: Twin, llm: LLM) -> None:
    """Covers one audio item, several with text between, and none: in chunks that end within audio, then again
    with the prefix cache. One item has another sample rate."""
    contents = [
        (f"what is {MARK} this", [sound(LENGTHS[-1], 1)]),
        ("nothing to hear here, only words", []),
        (f"{MARK}one {MARK}\nand then {MARK}?", [sound(900, 2), sound(14321, 3), sound(7000, 4)]),
    ]
    requests = [
        {"prompt": text, "multi_modal_data": {"audio": [tuple(item) for item in sounds]}} if sounds else text
        for text, sounds in contents
    ]
    expected = [generate_reference(twin, text, sounds) for text, sounds in contents]
    first = llm.generate(requests, PARAMS, use_tqdm=False)
    for output, (text, sounds) in zip(first, contents, strict=True):
        assert output.prompt_token_ids == twin.inputs(text, sounds)["input_ids"][0].tolist()
    assert [output.outputs[0].token_ids for output in first] == expected
    again = llm.generate(requests, PARAMS, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in again] == expected
    assert all(output.num_cached_tokens > 0.5 * len(output.prompt_token_ids) for output in again)
    slow = Audio(noise(8000), 8000)
    one = {"prompt": f"{MARK} so", "multi_modal_data": {"audio": (slow.samples, slow.rate)}}
    (output,) = llm.generate([one], PARAMS, use_tqdm=False)
    same = Audio(resampled(slow, RATE, SECONDS * RATE), RATE)
    assert output.outputs[0].token_ids == generate_reference(twin, f"{MARK} so", [same])


def part(samples: np.ndarray[Any, Any], rate: int, kind: int = 1) -> dict[str, Any]:
    data = base64.b64encode(wav(samples, rate, kind=kind)).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def test_audio_in_a_conversation(twin: Twin, llm: LLM) -> None:
    """Audio in other encodings gives the same answer; invalid audio is refused, and the next request is
    answered."""
    samples = (noise(9000) * 30000).astype(np.int16)
    url = data_url(wav(samples[:, None], RATE), "audio/wav")
    same = [
        part(np.stack([samples, samples], 1), RATE),
        part(samples[:, None].astype(np.float32) / 2**15, RATE, kind=3),
        {"type": "audio_url", "audio_url": {"url": url}},
    ]
    conversations = [
        [{"role": "user", "content": [audio_part, {"type": "text", "text": "so"}]}] for audio_part in same
    ]
    answers = llm.chat(conversations, PARAMS, use_tqdm=False)
    expected = generate_reference(twin, f"{MARK}\nso", [Audio(samples / np.float32(2**15), RATE)])
    assert [answer.outputs[0].token_ids for answer in answers] == [expected] * len(same)
    loud = np.full((900, 2), 3e38, np.float32)
    for wrong, message in (
        (part(samples[:9, None], RATE), "too short"),
        (part(samples[:0, None], RATE), "has no samples"),
        (part(samples[:, None], 20), "20 Hz is too low"),
        (part(samples[:, None], 10**6), "1000000 Hz is not supported"),
        (part(samples[:, None], RATE, kind=2), "format 2 with 16 bits"),
        (part(np.full((900, 1), np.nan, np.float32), RATE, kind=3), "NaN"),
        (part(loud, RATE, kind=3), "NaN or larger"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.chat([{"role": "user", "content": [wrong]}], PARAMS, use_tqdm=False)
    (answer,) = llm.chat(conversations[:1], PARAMS, use_tqdm=False)
    assert answer.outputs[0].token_ids == expected


@pytest.mark.parametrize(
    ("save", "mark", "most"), [(save_flamingo, "<sound>", 150), (save_glm_asr, "<|pad|>", 75)]
)
@torch.inference_mode()
def test_long_audio_is_split_into_windows(save: Any, mark: str, most: int, tmp_path: Path) -> None:
    """Covers audio for Audio Flamingo and GLM-ASR: less than a window, several windows, a last window that is
    too short, and truncation."""
    twin = Twin(tmp_path, save)
    sounds = [sound(count, seed) for seed, count in enumerate((1000, 80000, 64100, 200000))]
    inputs = [
        twin.processor(text=f"so {mark}?", audio=[audio.samples], sampling_rate=RATE, return_tensors="pt")
        for audio in sounds
    ]
    items = [finished(twin.ours.process("audio", audio, {}).arrays) for audio in sounds]
    tower = twin.tower()
    vectors = tower.encode("audio", items)
    for vector, model_inputs in zip(vectors, inputs, strict=True):
        features = model_inputs["input_features"], model_inputs["input_features_mask"]
        reference = twin.model.model.get_audio_features(*features).pooler_output
        torch.testing.assert_close(vector, reference, atol=1e-4, rtol=1e-4)
    numbers = sum(audio.numel() for audio in tower.parameters())
    assert weights.count_parameters(twin.checkpoint.facts).tower == pytest.approx(numbers, rel=0.06)
    (blank,) = tower.encode("audio", [tower.blank("audio", 57)])
    assert len(blank) == 57 and len(vectors[-1]) == twin.ours.max_vectors("audio") == most
    generated = [twin.model.generate(**audio, max_new_tokens=COUNT, do_sample=False) for audio in inputs]
    requests = [{"prompt": f"so {mark}?", "multi_modal_data": {"audio": tuple(audio)}} for audio in sounds]
    for output, whole in zip(engine(twin).generate(requests, PARAMS, use_tqdm=False), generated, strict=True):
        assert [*output.prompt_token_ids, *output.outputs[0].token_ids] == whole[0].tolist()


@pytest.mark.parametrize(
    ("step", "num_taps", "count"), [(48, 6469, 20000), (3, 7, 1), (5, 5, 40), (1, 9, 30)]
)
def test_overlapping_windows_equal_a_direct_convolution(step: int, num_taps: int, count: int) -> None:
    draw = np.random.default_rng(step)
    samples = draw.normal(size=(count - 1) * step + num_taps).astype(np.float32)
    taps = draw.normal(size=num_taps).astype(np.float32)
    result = _filtered(samples, taps, step, count)
    some = [0, count // 2, count - 1]
    expected = [samples[k * step : k * step + num_taps].astype(np.float64) @ taps for k in some]
    assert result.shape == (count,)
    np.testing.assert_allclose(result[some], expected, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_voxtral_pads_to_whole_windows(tmp_path: Path) -> None:
    """Covers a part of a window, exactly one, and several with padding, in one batch. Answers are about one
    audio item, several with text between, and one from the prefix cache."""
    from transformers.models.voxtral.processing_voxtral import VoxtralProcessor

    twin = Twin(tmp_path, save_voxtral)
    extractor, tokenizer = twin.processor
    sounds = [sound(count, seed) for seed, count in enumerate((900, SECONDS * RATE, 80000))]
    whole = {"pad_to_multiple_of": SECONDS * RATE, "padding": True, "truncation": False}
    options = {"sampling_rate": RATE, "return_tensors": "pt", **whole}

    def compute_features(sounds: list[Audio]) -> torch.Tensor:
        processor = SimpleNamespace(feature_extractor=extractor)
        samples = [audio.samples for audio in sounds]
        return VoxtralProcessor._retrieve_input_features(processor, samples, SECONDS * 100, **options)

    items = [twin.ours.process("audio", audio, {}) for audio in sounds]
    tower = twin.tower()
    mels = [item.arrays["mel"].numbers().copy() for item in items]
    vectors = tower.encode("audio", [{"mel": torch.from_numpy(mel)} for mel in mels])
    for item, mel, processor, audios in zip(items, mels, vectors, sounds, strict=True):
        features = compute_features([audios])
        pieces = np.pad(features.transpose(1, 2).numpy(), ((0, 0), (0, 1), (0, 0)))
        close(mel, pieces.reshape(-1, 20), 1e-4)
        reference = twin.model.model.get_audio_features(features).pooler_output
        torch.testing.assert_close(processor, reference, atol=1e-4, rtol=1e-4)
        assert len(item.token_ids) == len(processor)
    numbers = sum(audio.numel() for audio in tower.parameters())
    assert weights.count_parameters(twin.checkpoint.facts).tower == pytest.approx(numbers, rel=0.06)
    (blank,) = tower.encode("audio", [tower.blank("audio", 77)])
    assert len(blank) == 77 and twin.ours.max_vectors("audio") == 25 * 2400 // SECONDS
    llm, mark = engine(twin), "[BEGIN_AUDIO][AUDIO]"
    contents = [(f"so {mark}?", sounds[2:]), (f"{mark} one {mark}two", sounds[:2]), ("words", [])]
    requests = [
        {"prompt": text, "multi_modal_data": {"audio": [tuple(audio) for audio in audios]}}
        if audios
        else text
        for text, audios in contents
    ]
    first = llm.generate(requests, PARAMS, use_tqdm=False)
    for output, (text, audios) in zip(first, contents, strict=True):
        spans = ["[AUDIO]" * (25 * -(-len(audio.samples) // (SECONDS * RATE))) for audio in audios]
        parts = [audio for pair in zip(text.split("[AUDIO]"), [*spans, ""], strict=True) for audio in pair]
        inputs = tokenizer("".join(parts), return_tensors="pt", return_token_type_ids=False)
        features = {"input_features": compute_features(audios)} if audios else {}
        generated = twin.model.generate(**inputs, **features, max_new_tokens=COUNT, do_sample=False)
        assert [*output.prompt_token_ids, *output.outputs[0].token_ids] == generated[0].tolist()
    again = llm.generate(requests[:2], PARAMS, use_tqdm=False)
    assert [audio.outputs[0].token_ids for audio in again] == [
        audio.outputs[0].token_ids for audio in first[:2]
    ]
    assert all(audio.num_cached_tokens > 0.5 * len(audio.prompt_token_ids) for audio in again)
    speech = llm.llm_engine.inputs.media.speech
    assert speech is not None and speech.max_samples < 2400 * RATE
    for language, named in ((None, ""), ("de", "lang:de")):
        token_ids = speech.prompt("transcribe", language)
        prompt = {"prompt_token_ids": token_ids, "multi_modal_data": {"audio": tuple(sounds[0])}}
        (output,) = llm.generate([prompt], PARAMS, use_tqdm=False)
        text = f"<s>[INST][BEGIN_AUDIO]{'[AUDIO]' * 25}[/INST]{named}[TRANSCRIBE]"
        inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        features = compute_features(sounds[:1])
        generated = twin.model.generate(
            **inputs, input_features=features, max_new_tokens=COUNT, do_sample=False
        )
        assert [*output.prompt_token_ids, *output.outputs[0].token_ids] == generated[0].tolist()
