"""Tests of Qwen's omni models against transformers: encoder inputs, embeddings, answers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hearing import sound
from oracle import load_tiny, random_prompts, run_paged
from safetensors.torch import load_file, save_file
from threads import run_threads, tp_worlds
from tiny_engine import check_answers, generate_reference, load_tower, open_llm
from tiny_omni import AUDIO_TOKENS, FAMILIES, IMAGE_TOKENS, VIDEO_TOKENS, Content, Omni
from tiny_seeing import picture

from quire.attention.torch_sdpa import TorchSDPA
from quire.checkpoint import weights
from quire.checkpoint.model import read_checkpoint
from quire.errors import RequestError
from quire.loader import load_model
from quire.parallel.world import World

COUNT = 5
LENGTHS = [481, 1600, 4800, 9600, 9601, 16123, 31990, 32000]
"""Numbers of audio samples, from the fewest that have an embedding to the maximum."""
FRAMES = np.random.default_rng(3).integers(0, 256, (6, 24, 32, 3), np.uint8)
PIXELS = torch.randn(1, 4, 6, 96, generator=torch.Generator().manual_seed(0))
CONTENTS = [
    Content(f"what is {IMAGE_TOKENS} this", [picture(60, 40)]),
    Content("nothing to see here, only words"),
    Content(f"{AUDIO_TOKENS}and {IMAGE_TOKENS}, {AUDIO_TOKENS}?", [picture(17, 19)], [], [17001, 20000]),
    Content(
        f"a film: {VIDEO_TOKENS} and {IMAGE_TOKENS} {AUDIO_TOKENS}", [picture(20, 60)], [FRAMES], [31990]
    ),
    Content(f"{AUDIO_TOKENS} again", [], [], [17001]),
]


@pytest.fixture(scope="module", params=FAMILIES)
def omni(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Omni:
    return Omni(tmp_path_factory.mktemp(request.param), request.param)


def test_mel_frames_and_placeholders_equal_transformers(omni: Omni) -> None:
    """Catches missing padding, a frame too many, an embedding too few. Placeholders are in any order."""
    for count in LENGTHS:
        features, mask = omni.audio_features(Content("", sounds=[count]))
        actual = omni.mel(count)
        assert len(actual) == int(mask.sum())
        torch.testing.assert_close(actual, features[0, :, : len(actual)].T, atol=1e-5, rtol=0)
    for content in CONTENTS:
        if content.videos or content.text == CONTENTS[1].text:
            continue
        sounds = [sound(count).samples for count in content.sounds] or None
        expected = omni.processor(text=content.text, images=content.images or None, audio=sounds)
        assert omni.inputs(content)["input_ids"][0].tolist() == list(expected["input_ids"][0])
    with pytest.raises(RequestError, match="too short: it has 200 samples"):
        omni.ours.process("audio", sound(200), {})
    with pytest.raises(RequestError, match="'max_pixel'; known.* did you mean 'max_pixels'"):
        omni.ours.process("audio", sound(1000), {"max_pixel": 3})
    if omni.is_long:
        return
    with pytest.raises(RequestError, match="2.2 seconds long, and 2.0 are the maximum"):
        omni.ours.process("audio", sound(36000), {"truncation": False, "max_pixels": 512})


@torch.inference_mode()
def test_embeddings_equal_transformers(omni: Omni) -> None:
    """Catches attention between chunks, an embedding too many, and items that are mixed up in a batch."""
    checkpoint, tower = read_checkpoint(omni.path), load_tower(omni.path)
    reference = []
    for count in LENGTHS:
        features, mask = omni.audio_features(Content("", sounds=[count]))
        output = omni.model.model.get_audio_features(features, feature_attention_mask=mask)
        reference.append(output.last_hidden_state)
    embeddings = tower.encode("audio", [{"mel": omni.mel(count)} for count in LENGTHS])
    torch.testing.assert_close(torch.cat(embeddings)[:, :32], torch.cat(reference), atol=1e-4, rtol=1e-4)
    assert not torch.cat(embeddings)[:, 32:].any()
    assert [len(tensor) for tensor in embeddings] == [
        len(omni.ours.process("audio", sound(count), {}).token_ids) for count in LENGTHS
    ]
    numbers = sum(tensor.numel() for tensor in tower.parameters())
    assert weights.count_parameters(checkpoint.facts).tower == pytest.approx(numbers, rel=0.06)
    for modality in ("audio", "image"):
        most = min(omni.ours.max_vectors(modality), 500)
        (blank,) = tower.encode(modality, [tower.blank(modality, most)])
        assert len(blank) == pytest.approx(most, rel=0.1)
    assert tower.cost("audio", {"mel": (300, 20)}) > tower.cost("audio", {"mel": (100, 20)}) > 0


def test_answers_equal_transformers(omni: Omni) -> None:
    """Covers an image, audio around an image, a video and both, and none: at once, in chunks that end within
    items, with the prefix cache, and with preemptions."""
    llm = open_llm(omni.path, max_num_batched_tokens=24, max_logprobs=-1)
    expected = [generate_reference(omni.model, omni.inputs(content), COUNT) for content in CONTENTS]
    outputs = check_answers(llm, [content.request for content in CONTENTS], expected, at=(1, 3, 6))
    for content, output in zip(CONTENTS, outputs, strict=True):
        assert output.prompt_token_ids == omni.inputs(content)["input_ids"][0].tolist()


def test_placeholders_are_those_of_the_template(omni: Omni) -> None:
    assert [omni.ours.text(modality, 1) for modality in ("image", "video", "audio")] == [
        IMAGE_TOKENS,
        VIDEO_TOKENS,
        AUDIO_TOKENS,
    ]
    assert omni.ours.modalities == ("image", "video", "audio")


@torch.inference_mode()
def test_published_checkpoint_is_loaded(omni: Omni, tmp_path: Path) -> None:
    """In a published checkpoint, the thinker is one of several parts, and its weights have other names."""
    tensors, config = dict[str, torch.Tensor](), json.loads((omni.path / "config.json").read_text())
    for name, tensor in load_file(omni.path / "model.safetensors").items():
        bare = name.removeprefix("thinker.").replace("model.language_model.", "model.")
        bare = bare.replace("model.visual.", "visual.").replace("model.audio_tower.", "audio_tower.")
        tensors[f"thinker.{bare}"] = tensor
    save_file(tensors | {"talker.model.norm.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    architecture = config.pop("architectures")[0].replace("Thinker", "")
    whole = {"architectures": [architecture], "thinker_config": config, "talker_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    facts, same = read_checkpoint(tmp_path).facts, read_checkpoint(omni.path).facts
    assert facts == same
    for modality, items in {"audio": [{"mel": omni.mel(9601)}], "image": [{"pixels": PIXELS}]}.items():
        (actual,), (expected,) = (load_tower(path).encode(modality, items) for path in (tmp_path, omni.path))
        assert torch.equal(actual, expected)
    prompts = random_prompts(7, 12)
    for actual, expected in zip(
        *(run_paged(load_tiny(path), prompts, [[7, 12]]) for path in (tmp_path, omni.path)), strict=True
    ):
        assert torch.equal(actual, expected)


def test_tensor_parallel_encoders_equal_one_device(omni: Omni) -> None:
    """The decoder is also loaded without its encoders."""
    inputs = {"audio": [{"mel": omni.mel(count)} for count in LENGTHS[-2:]], "image": [{"pixels": PIXELS}]}
    worlds = tp_worlds(2)
    towers = [load_tower(omni.path, world=world) for world in worlds]
    whole = load_tower(omni.path)

    @torch.inference_mode()
    def run(world: World) -> Any:
        return [torch.cat(towers[world.tp.rank].encode(*batch)) for batch in inputs.items()]

    with torch.inference_mode():
        expected = [torch.cat(whole.encode(*batch)) for batch in inputs.items()]
    for outputs in run_threads(2, run, worlds=lambda _: worlds):
        torch.testing.assert_close(outputs, expected, atol=1e-4, rtol=1e-4)
    checkpoint = read_checkpoint(omni.path)
    alone = replace(checkpoint, facts=replace(checkpoint.facts, media=None))
    options = {"dtype": torch.float32, "device": torch.device("cpu"), "backend": TorchSDPA()}
    assert not hasattr(load_model(alone, max_model_len=64, show_progress=False, **options), "tower")
