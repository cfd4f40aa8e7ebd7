"""Qwen's models that see and hear, against transformers: what towers are given, vectors, answers."""

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
from tiny import generate_preempted
from tiny_omni import FAMILIES, HEARS, SEES, WATCHES, Content, Omni
from tiny_seeing import picture

from quire import LLM, SamplingParams
from quire.attention.torch_sdpa import TorchSDPA
from quire.checkpoint import weights
from quire.checkpoint.model import read_checkpoint
from quire.errors import RequestError
from quire.loader import load_model
from quire.models.towers import TOWERS
from quire.parallel.world import World

COUNT = 5
LENGTHS = [481, 1600, 4800, 9600, 9601, 16123, 31990, 32000]
"""Samples, of the fewest that make a vector to all that is heard."""
FRAMES = np.random.default_rng(3).integers(0, 256, (6, 24, 32, 3), np.uint8)
PIXELS = torch.randn(1, 4, 6, 96, generator=torch.Generator().manual_seed(0))
CONTENTS = [
    Content(f"what is {SEES} this", [picture(60, 40)]),
    Content("nothing to see here, only words"),
    Content(f"{HEARS}and {SEES}, {HEARS}?", [picture(17, 19)], [], [17001, 20000]),
    Content(f"a film: {WATCHES} and {SEES} {HEARS}", [picture(20, 60)], [FRAMES], [31990]),
    Content(f"{HEARS} again", [], [], [17001]),
]


@pytest.fixture(scope="module", params=FAMILIES)
def omni(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Omni:
    return Omni(tmp_path_factory.mktemp(request.param), request.param)


def test_moments_and_spans_are_those_of_transformers(omni: Omni) -> None:
    """Silence that is not there, a moment too many, a vector too few; marks in any order."""
    for count in LENGTHS:
        features, mask = omni.heard(Content("", sounds=[count]))
        ours = omni.mel(count)
        assert len(ours) == int(mask.sum())
        torch.testing.assert_close(ours, features[0, :, : len(ours)].T, atol=1e-5, rtol=0)
    for content in CONTENTS:
        if content.videos or content.text == CONTENTS[1].text:
            continue
        sounds = [sound(count).samples for count in content.sounds] or None
        theirs = omni.processor(text=content.text, images=content.images or None, audio=sounds)
        assert omni.inputs(content)["input_ids"][0].tolist() == list(theirs["input_ids"][0])
    with pytest.raises(RequestError, match="too short: it has 200 samples"):
        omni.ours.process("audio", sound(200), {})
    with pytest.raises(RequestError, match="'max_pixel'; known.* did you mean 'max_pixels'"):
        omni.ours.process("audio", sound(1000), {"max_pixel": 3})
    if omni.is_long:
        return
    with pytest.raises(RequestError, match="2.2 seconds long, and 2.0 are the maximum"):
        omni.ours.process("audio", sound(36000), {"truncation": False, "max_pixels": 512})


def tower_of(path: Path, **options: Any) -> Any:
    checkpoint = read_checkpoint(path)
    media = checkpoint.facts.media
    assert media is not None
    return load_model(
        checkpoint,
        dtype=torch.float32,
        device=torch.device("cpu"),
        backend=TorchSDPA(),
        max_model_len=64,
        show_progress=False,
        build=TOWERS[media.family],
        partly=True,
        **options,
    )


@torch.inference_mode()
def test_vectors_are_those_of_transformers(omni: Omni) -> None:
    """Pieces that see each other, a state too many, items mixed up in a batch."""
    checkpoint, tower = read_checkpoint(omni.path), tower_of(omni.path)
    theirs = []
    for count in LENGTHS:
        features, mask = omni.heard(Content("", sounds=[count]))
        found = omni.model.model.get_audio_features(features, feature_attention_mask=mask)
        theirs.append(found.last_hidden_state)
    ours = tower.encode("audio", [{"mel": omni.mel(count)} for count in LENGTHS])
    torch.testing.assert_close(torch.cat(ours)[:, :32], torch.cat(theirs), atol=1e-4, rtol=1e-4)
    assert not torch.cat(ours)[:, 32:].any()
    assert [len(each) for each in ours] == [
        len(omni.ours.process("audio", sound(count), {}).token_ids) for count in LENGTHS
    ]
    numbers = sum(each.numel() for each in tower.parameters())
    assert weights.count_parameters(checkpoint.facts).tower == pytest.approx(numbers, rel=0.06)
    for modality in ("audio", "image"):
        most = min(omni.ours.most_vectors(modality), 500)
        (blank,) = tower.encode(modality, [tower.blank(modality, most)])
        assert len(blank) == pytest.approx(most, rel=0.1)
    assert tower.cost("audio", {"mel": (300, 20)}) > tower.cost("audio", {"mel": (100, 20)}) > 0


def test_what_is_said_is_what_transformers_says(omni: Omni) -> None:
    """An image, sounds around one, a film and both, none; all at once, in chunks that end within items; then
    again, when their beginnings are kept; then with preemptions."""
    llm = LLM(
        str(omni.path),
        dtype="float32",
        block_size=4,
        max_num_seqs=8,
        max_model_len=512,
        max_num_batched_tokens=24,
        max_logprobs=-1,
        num_gpu_blocks_override=400,
        use_tqdm_on_load=False,
    )
    expected = [omni.says(content, COUNT) for content in CONTENTS]
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=0)
    asked = [content.asked for content in CONTENTS]
    for content, output, (said, likely) in zip(
        CONTENTS, llm.generate(asked, params, use_tqdm=False), expected, strict=True
    ):
        assert output.prompt_token_ids == omni.inputs(content)["input_ids"][0].tolist()
        answer = output.outputs[0]
        assert answer.token_ids == said, content.text
        found = [each[token].logprob for each, token in zip(answer.logprobs, said, strict=True)]
        assert found == pytest.approx(likely, abs=1e-3)
    again = llm.generate(asked, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in again] == [said for said, _ in expected]
    assert all(output.num_cached_tokens > 0.5 * len(output.prompt_token_ids) for output in again)
    llm.reset_prefix_cache()
    outputs = generate_preempted(llm, asked, COUNT, at=(1, 3, 6))
    assert [output.outputs[0].token_ids for output in outputs] == [said for said, _ in expected]


def test_marks_are_those_of_the_template(omni: Omni) -> None:
    assert [omni.ours.text(modality, 1) for modality in ("image", "video", "audio")] == [SEES, WATCHES, HEARS]
    assert omni.ours.modalities == ("image", "video", "audio")


@torch.inference_mode()
def test_the_whole_is_read_as_its_makers_publish_it(omni: Omni, tmp_path: Path) -> None:
    """The part that thinks among those that speak, and its names."""
    tensors, told = dict[str, torch.Tensor](), json.loads((omni.path / "config.json").read_text())
    for name, tensor in load_file(omni.path / "model.safetensors").items():
        bare = name.removeprefix("thinker.").replace("model.language_model.", "model.")
        bare = bare.replace("model.visual.", "visual.").replace("model.audio_tower.", "audio_tower.")
        tensors[f"thinker.{bare}"] = tensor
    save_file(tensors | {"talker.model.norm.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    architecture = told.pop("architectures")[0].replace("Thinker", "")
    whole = {"architectures": [architecture], "thinker_config": told, "talker_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    facts, same = read_checkpoint(tmp_path).facts, read_checkpoint(omni.path).facts
    assert facts == same
    for modality, items in {"audio": [{"mel": omni.mel(9601)}], "image": [{"pixels": PIXELS}]}.items():
        (ours,), (theirs,) = (tower_of(path).encode(modality, items) for path in (tmp_path, omni.path))
        assert torch.equal(ours, theirs)
    prompts = random_prompts(7, 12)
    for ours, theirs in zip(
        *(run_paged(load_tiny(path), prompts, [[7, 12]]) for path in (tmp_path, omni.path)), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_two_devices_that_share_the_towers_see_and_hear_the_same(omni: Omni) -> None:
    """And a decoder is loaded without them."""
    given = {"audio": [{"mel": omni.mel(count)} for count in LENGTHS[-2:]], "image": [{"pixels": PIXELS}]}
    worlds = tp_worlds(2)
    towers = [tower_of(omni.path, world=world) for world in worlds]
    whole = tower_of(omni.path)

    @torch.inference_mode()
    def run(world: World) -> Any:
        return [torch.cat(towers[world.tp.rank].encode(*each)) for each in given.items()]

    with torch.inference_mode():
        expected = [torch.cat(whole.encode(*each)) for each in given.items()]
    for found in run_threads(2, run, worlds=lambda _: worlds):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    checkpoint = read_checkpoint(omni.path)
    alone = replace(checkpoint, facts=replace(checkpoint.facts, media=None))
    options = {"dtype": torch.float32, "device": torch.device("cpu"), "backend": TorchSDPA()}
    assert not hasattr(load_model(alone, max_model_len=64, show_progress=False, **options), "tower")
