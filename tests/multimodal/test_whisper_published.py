"""Tests of Whisper in the format of OpenAI's checkpoints, with all tokens, against `generate` of
transformers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hearing import RATE, noise
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from quire import LLM, SamplingParams
from quire.frontend.speech import Transcriber, split_audio

END, START, TRANSLATE, TRANSCRIBE, UNTIMED = 50257, 50258, 50358, 50359, 50363
TASKS = {"transcribe": TRANSCRIBE, "translate": TRANSLATE}
COUNT = 20


def languages() -> list[str]:
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    return list(LANGUAGES)[:99]


def save_tokenizer(path: Path) -> None:
    """Save the ids of the multilingual tokenizer: words, the end, languages, tasks, timestamps."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"Ġw{i}" for i in range(len(letters), END))]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    rest = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
    names = [f"<|{name}|>" for name in ("endoftext", "startoftranscript", *languages(), *rest)]
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    backend.add_tokens([AddedToken(f"<|{i * 0.02:.2f}|>", normalized=False) for i in range(1501)])
    assert (backend.token_to_id(names[-1]), backend.get_vocab_size()) == (UNTIMED, 51865)
    backend.save(str(path / "tokenizer.json"))
    named = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), names[0])
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "WhisperTokenizer", **named}))


class Published:
    """A tiny random model in the published format, with transformers' model."""

    def __init__(self, path: Path) -> None:
        import transformers as hf

        ends = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"), END)
        halves = {"layers": 2, "attention_heads": 2, "ffn_dim": 48}
        sizes = {f"{half}_{name}": n for half in ("encoder", "decoder") for name, n in halves.items()}
        config = hf.WhisperConfig(
            vocab_size=51865, d_model=32, decoder_start_token_id=START, init_std=0.5, **ends, **sizes
        )
        torch.manual_seed(0)
        self.model = hf.WhisperForConditionalGeneration(config).eval()
        codes = {f"<|{code}|>": START + 1 + i for i, code in enumerate(languages())}
        settings = {
            "suppress_tokens": [1, 2, 7, 8, START, TRANSLATE, TRANSCRIBE, 50360, 50361, 50362],
            "begin_suppress_tokens": [220, END],
            "lang_to_id": codes,
            "task_to_id": TASKS,
            "is_multilingual": True,
            "no_timestamps_token_id": UNTIMED,
            "max_initial_timestamp_index": 50,
            "alignment_heads": [[1, 0], [1, 1]],
            "max_length": 448,
            "forced_decoder_ids": [[1, None], [2, TRANSCRIBE]],
            "decoder_start_token_id": START,
            **ends,
        }
        self.model.save_pretrained(path)
        (path / "generation_config.json").write_text(json.dumps(settings))
        tensors = load_file(path / "model.safetensors")
        head = {"proj_out.weight": tensors["model.decoder.embed_tokens.weight"].clone()}
        save_file(tensors | head, path / "model.safetensors", {"format": "pt"})
        self.extractor = hf.WhisperFeatureExtractor()
        self.extractor.save_pretrained(path)
        save_tokenizer(path)
        for name, value in settings.items():
            setattr(self.model.generation_config, name, value)
        self.model.generation_config.forced_decoder_ids = (
            None  # this version of transformers does not support them
        )
        sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 200}
        self.llm = LLM(str(path), dtype="float32", use_tqdm_on_load=False, **sizes)

    @property
    def speech(self) -> Transcriber:
        transcriber = self.llm.llm_engine.inputs.media.speech
        assert transcriber is not None
        return transcriber

    def transcribe(self, samples: Any, task: str, language: str | None, **wanted: Any) -> list[int]:
        params = SamplingParams(temperature=0, **({"max_tokens": COUNT} | wanted))
        prompt = {
            "prompt_token_ids": self.speech.prompt(task, language),
            "multi_modal_data": {"audio": (samples, RATE)},
        }
        (output,) = self.llm.generate([prompt], params, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def features(self, samples: Any) -> torch.Tensor:
        transcriber: torch.Tensor = self.extractor(
            samples, sampling_rate=RATE, return_tensors="pt"
        ).input_features
        return transcriber


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Published]:
    yield Published(tmp_path_factory.mktemp("published"))


@torch.inference_mode()
def test_tasks_and_chunks_equal_transformers(published: Published) -> None:
    """Covers the prefix tokens that `generate` adds, and all suppressed tokens."""
    samples = noise(40 * RATE)
    pieces = [piece for _, piece in split_audio(samples, published.speech.max_samples)]
    assert len(pieces) == 2 and [*published.speech.languages] == languages()
    transcriptions = []
    for piece, task, language in ((pieces[0], "transcribe", "de"), (pieces[1], "translate", "yo")):
        expected = published.model.generate(
            input_features=published.features(piece), task=task, language=language, max_new_tokens=COUNT
        )
        transcriptions.append(published.transcribe(piece, task, language))
        assert (
            transcriptions[-1] == expected[0].tolist()[-len(transcriptions[-1]) :]
            and len(transcriptions[-1]) > 4
        )
    assert transcriptions[0] != transcriptions[1]


@torch.inference_mode()
def test_timestamps_equal_transformers(published: Published) -> None:
    """Covers all rules for timestamps, in a batch with answers without timestamps."""
    speech, cases = published.speech, list[tuple[Any, str, str, bool]]()
    for seconds, task, language in ((3, "transcribe", "de"), (29, "translate", "yo")):
        cases += [(noise(seconds * RATE, seconds), task, language, timed) for timed in (True, False)]
    prompts = [
        {
            "prompt_token_ids": speech.prompt(task, language, timed=timed),
            "multi_modal_data": {"audio": (samples, RATE)},
        }
        for samples, task, language, timed in cases
    ]
    params = [SamplingParams(temperature=0, max_tokens=COUNT + 4, timestamps=case[-1]) for case in cases]
    outputs = published.llm.generate(prompts, params, use_tqdm=False)
    for output, (samples, task, language, timed) in zip(outputs, cases, strict=True):
        token_ids = list(output.outputs[0].token_ids)
        expected = published.model.generate(
            input_features=published.features(samples),
            task=task,
            language=language,
            max_new_tokens=COUNT + 4,
            return_timestamps=timed,
            force_unique_generate_call=True,  # or it continues after the last timestamp
        )
        assert token_ids == expected[0].tolist()[-len(token_ids) :]
        if timed:
            assert UNTIMED < token_ids[0] <= UNTIMED + 51 and sum(id > UNTIMED for id in token_ids) >= 3


@torch.inference_mode()
def test_token_times_equal_transformers(published: Published) -> None:
    """Covers two alignment heads in the upper layer, in chunks, with audio of several lengths at once."""
    model, requests = published.model, list[Any]()
    model.set_attn_implementation("eager")
    params, expected = list[SamplingParams](), list[list[int]]()
    for seconds in (3, 12, 29):
        samples = noise(seconds * RATE, seconds)
        heard = published.extractor(
            samples, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True
        )
        reference = model.generate(
            **heard,
            language="de",
            max_new_tokens=COUNT + seconds,
            return_timestamps=True,
            return_token_timestamps=True,
            force_unique_generate_call=True,
            return_dict_in_generate=True,
        )
        moments, ids = reference["token_timestamps"][0], reference["sequences"][0].tolist()
        expected.append((moments[3:-1] * 50).round().int().tolist())
        prompt_ids, aligning = published.speech.aligning(ids[:3], ids[3:], len(samples))
        requests.append({"prompt_token_ids": prompt_ids, "multi_modal_data": {"audio": (samples, RATE)}})
        fields = {"max_tokens": 1, "temperature": 0, "skip_reading_prefix_cache": True}
        params.append(SamplingParams(**fields, aligning=aligning))
    outputs = published.llm.generate(requests, params, use_tqdm=False)
    assert [output.aligned for output in outputs] == expected
    assert all(len(set(times)) > 2 for times in expected[::2])


@torch.inference_mode()
def test_detected_language_equals_transformers(published: Published) -> None:
    codes, config = published.speech.languages, published.model.generation_config
    for seconds in (1, 12):
        samples = noise(seconds * RATE, seconds)
        features = published.features(samples)
        (expected,) = published.model.detect_language(features, generation_config=config).tolist()
        options = {"max_tokens": 1, "allowed_token_ids": [*codes.values()]}
        assert published.transcribe(samples, "transcribe", None, **options) == [expected]


def test_timestamps_split_the_text_into_segments(published: Published) -> None:
    zero = UNTIMED + 1
    words = [100, 101]
    token_ids = [zero, *words, zero + 75, zero + 75, 102, zero + 1500, END]
    segments = [*published.speech.segments(token_ids, 30.0)]
    moments = [(segment.start, segment.end) for segment in segments]
    assert np.allclose(moments, [(0.0, 1.5), (1.5, 30.0)])
    assert [segment.token_ids for segment in segments] == [words, [102]]
