"""Tests of Qwen3-ASR against transformers: features, placeholders, embeddings, answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hearing import MARK, RATE, save_qwen3_asr, sound
from safetensors.torch import load_file, save_file
from seeing import close
from test_audio_models import PARAMS, Twin, engine, generate_reference

from quire import LLM
from quire.checkpoint import weights
from quire.checkpoint.model import read_checkpoint
from quire.errors import ConfigError, RequestError
from quire.multimodal.processors import Audio

LENGTHS = (1, 700, 8000, 12345, 16000, 16001, 70000, 5 * RATE + 777)
"""Numbers of audio samples: padded to half a second, of less than a chunk, of several windows."""


class Recording(Twin):
    """Transformers' processor, which accepts one audio clip for each text."""

    def inputs(self, text: str, sounds: list[Audio]) -> Any:
        if not sounds:
            return super().inputs(text, sounds)
        (item,) = sounds
        return self.processor(text=[text], audio=[item.samples], sampling_rate=RATE)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return Recording(tmp_path_factory.mktemp("qwen3_asr"), save_qwen3_asr)


@torch.no_grad()
def test_features_and_embeddings_equal_transformers(twin: Recording) -> None:
    """Compare each clip alone with all clips in one batch."""
    sounds = [sound(count, seed) for seed, count in enumerate(LENGTHS)]
    items = [twin.ours.process("audio", item, {}) for item in sounds]
    arrays = [{"mel": torch.from_numpy(item.arrays["mel"].numbers().copy())} for item in items]
    tower = twin.tower()
    vectors = tower.encode("audio", arrays)
    for audio, item, array, vector in zip(sounds, items, arrays, vectors, strict=True):
        inputs = twin.inputs(MARK, [audio])
        assert item.token_ids == inputs["input_ids"][0].tolist()[1:-1]
        mask = inputs["input_features_mask"]
        assert len(array["mel"]) == int(mask.sum())
        close(array["mel"].numpy(), inputs["input_features"][0].T[: len(array["mel"])], 1e-4)
        expected = twin.model.model.get_audio_features(inputs["input_features"], mask).pooler_output
        torch.testing.assert_close(vector, expected, atol=1e-4, rtol=1e-4)
    (blank,) = tower.encode("audio", [tower.blank("audio", 130)])
    assert len(blank) == 130
    assert tower.cost("audio", {"mel": (80, 20)}) < tower.cost("audio", {"mel": (190, 20)})
    numbers = sum(parameter.numel() for parameter in tower.parameters())
    assert weights.count_parameters(twin.checkpoint.facts).tower == pytest.approx(numbers, rel=0.06)
    assert twin.ours.max_vectors("audio") == 2400 * 13
    with pytest.raises(RequestError, match="too short"):
        twin.ours.process("audio", Audio(sound(5).samples[:0], RATE), {})


def requests_of(contents: list[tuple[str, list[Audio]]]) -> list[Any]:
    return [
        {"prompt": text, "multi_modal_data": {"audio": [tuple(item) for item in sounds]}} if sounds else text
        for text, sounds in contents
    ]


def test_answers_equal_transformers(twin: Recording) -> None:
    """Covers prompts in chunks that end within the audio, and the prefix cache."""
    contents = [
        (f"what is {MARK} this", [sound(70000, 1)]),
        ("nothing to hear here, only words", []),
        (f"{MARK}?", [sound(900, 2)]),
    ]
    expected = [generate_reference(twin, text, sounds) for text, sounds in contents]
    llm = engine(twin)
    for turn in range(2):
        outputs = llm.generate(requests_of(contents), PARAMS, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert not turn or all(2 * o.num_cached_tokens > len(o.prompt_token_ids) for o in outputs)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_names_of_the_first_checkpoints(size: int, twin: Recording, tmp_path: Path) -> None:
    """Covers the names of the thinker, its nested configuration and M-RoPE, on one rank and on two."""
    for file in twin.path.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    stored = {}
    for name, tensor in load_file(twin.path / "model.safetensors").items():
        name = name.replace("model.language_model.", "thinker.model.")
        name = name.replace("model.multi_modal_projector.linear_", "model.audio_tower.proj")
        stored[name.replace("model.audio_tower.", "thinker.audio_tower.")] = tensor
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((twin.path / "config.json").read_text())
    inner = {key: config.pop(key) for key in ("audio_config", "text_config", "audio_token_id")}
    inner["text_config"]["model_type"] = "qwen3_asr_text"
    inner["text_config"]["rope_scaling"] = {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
    (tmp_path / "config.json").write_text(json.dumps(config | {"thinker_config": inner}))
    assert read_checkpoint(tmp_path).facts == read_checkpoint(twin.path).facts
    contents = [(f"what is {MARK} this", [sound(20000, 1)])]
    llm = LLM(str(tmp_path), dtype="float32", max_model_len=512, tensor_parallel_size=size, max_num_seqs=2)
    (output,) = llm.generate(requests_of(contents), PARAMS, use_tqdm=False)
    assert output.outputs[0].token_ids == generate_reference(twin, *contents[0])


def test_configurations_are_checked(twin: Recording) -> None:
    for wrong, message in (
        ({"output_dim": 8}, "output_dim is 8, expected 32"),
        ({"n_window_infer": 130}, "n_window_infer is 130, expected a multiple of 100"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_checkpoint(twin.path, {"audio_config": wrong})
