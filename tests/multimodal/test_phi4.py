"""Tests of Phi-4-multimodal against transformers: audio, and checkpoints as published. Its images are among
the vision families of `seeing.py`."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finished import finished
from hearing import sound
from safetensors.torch import load_file, save_file
from seeing import Twin, picture
from seeing_phi4 import SOUND
from tiny_engine import check_answers, generate_reference, load_tower, open_llm

from quire.checkpoint.model import read_checkpoint
from quire.errors import ConfigError, RequestError
from quire.loader.load import stored_name
from quire.multimodal.processors.phi4 import bicubic, log_mel

COUNT = 3
LENGTHS = [400, 1700, 5000, 16001, 650_000]
"""Numbers of samples; the last has more encoder states than attend to each other."""
PUBLISHED = {
    r"feed_forward_(in|out)\.gate_up_proj": r"feed_forward_\1.net.0.linear",
    r"feed_forward_(in|out)\.down_proj": r"feed_forward_\1.net.2",
    r"(audio_embed\..*self_attn)\.([qkv])_proj": r"\1.linear_\2",
    r"(audio_embed\..*self_attn)\.o_proj": r"\1.linear_out",
    r"image_embed\.img_projection_up": "image_embed.img_projection.0",
    r"image_embed\.img_projection_down": "image_embed.img_projection.2",
    r"global_img_feature_extensor": "glb_GN",
    r"sub_img_feature_extensor": "sub_GN",
    r"up_proj_for_speech": "audio_projection.speech.0",
    r"down_proj_for_speech": "audio_projection.speech.2",
    r"up_proj_for_vision_speech": "audio_projection.vision.0",
    r"down_proj_for_vision_speech": "audio_projection.vision.2",
    r"^(model\.layers\..*_proj)\.weight": r"\1.base_layer.weight",
}
"""Names of tensors as published, by patterns of transformers' names."""


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return Twin(tmp_path_factory.mktemp("phi4"), "phi4")


def mel(count: int, mels: int = 20) -> torch.Tensor:
    return torch.from_numpy(log_mel(sound(count).samples, mels))


def vectors(model: Any, count: int, mode: str = "speech") -> torch.Tensor:
    """Return the embeddings of one clip by transformers. Clips in a batch change each other's there."""
    embed, features = model.model.embed_tokens_extend.audio_embed, mel(count)[None]
    num = -(-features.shape[1] // 8)
    ids = torch.full((1, num), model.config.audio_config.audio_token_id)
    empty, sizes = torch.zeros(1, num, model.config.hidden_size), torch.tensor([num])
    out: torch.Tensor = embed(ids, empty, features, sizes, None, audio_projection_mode=mode)
    return out[0]


@pytest.mark.parametrize("mels", [20, 80])
def test_spectrograms_equal_transformers(mels: int) -> None:
    from transformers import Phi4MultimodalFeatureExtractor

    extract = Phi4MultimodalFeatureExtractor(feature_size=mels)
    for count in LENGTHS[:-1]:
        made = extract(sound(count).samples, sampling_rate=16000, return_tensors="pt")
        torch.testing.assert_close(mel(count, mels), made["audio_input_features"][0], atol=1e-3, rtol=1e-4)


def test_whole_images_are_resized_as_by_torch() -> None:
    pixels = np.array(picture(90, 61))
    floats = torch.from_numpy(pixels).permute(2, 0, 1)[None].float()
    for side in (28, 80):
        expected = torch.nn.functional.interpolate(floats, (side, side), mode="bicubic")[0].permute(1, 2, 0)
        torch.testing.assert_close(torch.from_numpy(bicubic(pixels, side)), expected, atol=1e-3, rtol=1e-4)


@torch.inference_mode()
def test_audio_embeddings_equal_transformers(twin: Twin) -> None:
    """Catches audio beside images with the wrong projector, and pieces of long audio that are mixed up."""
    tower = load_tower(twin.path)
    for mode in ("speech", "vision"):
        items = [twin.ours.process("audio", sound(n), {"audio_projection_mode": mode}) for n in LENGTHS]
        embeddings = tower.encode("audio", [finished(item.arrays) for item in items])
        for embedding, item, count in zip(embeddings, items, LENGTHS, strict=True):
            torch.testing.assert_close(embedding, vectors(twin.model, count, mode), atol=1e-3, rtol=1e-3)
            assert len(embedding) == len(item.token_ids)
    (blank,) = tower.encode("audio", [tower.blank("audio", 12)])
    assert len(blank) == 12 and twin.ours.max_vectors("audio") == 22500
    assert tower.cost("audio", {"mel": (300, 20)}) > tower.cost("audio", {"mel": (100, 20)}) > 0


@torch.inference_mode()
def test_answers_about_audio_equal_transformers(twin: Twin) -> None:
    """Covers placeholders as the published chat template writes them: alone, in chunks, and preempted."""
    contents = [("what is <|audio_1|> this", [9000]), ("<|audio_1|>one <|audio_2|>", [1000, 5000])]
    requests, expected = [], []
    for text, counts in contents:
        requests.append({"prompt": text, "multi_modal_data": {"audio": [sound(n) for n in counts]}})
        embeddings = [vectors(twin.model, count) for count in counts]
        for number, embedding in enumerate(embeddings, 1):
            text = text.replace(f"<|audio_{number}|>", "\0" * len(embedding))
        tokens = twin.processor.tokenizer(text.replace("\0", "<|audio|>"), return_tensors="pt")
        ids = tokens["input_ids"]
        x = twin.model.get_input_embeddings()(ids)
        x[ids == twin.model.config.audio_config.audio_token_id] = torch.cat(embeddings)
        out = {"inputs_embeds": x, "attention_mask": torch.ones_like(ids), "input_ids": ids[:, :0]}
        expected.append(generate_reference(twin.model, out, COUNT))
    llm = open_llm(twin.path, max_num_batched_tokens=16, max_logprobs=-1)
    check_answers(llm, requests, expected, at=(1, 3))


def test_published_checkpoint_is_loaded(twin: Twin, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The config has other keys, tensors have other names, and adapters are stored beside the weights."""
    for file in twin.path.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = {}
    for name, tensor in load_file(twin.path / "model.safetensors").items():
        for pattern, new in PUBLISHED.items():
            name = re.sub(pattern, new, name)
        tensors[name] = tensor
        if ".base_layer." in name:
            tensors[name.replace("base_layer", "lora_A.vision")] = torch.ones(2, 3)
    assert sum("base_layer" in name for name in tensors) == 8 and len(tensors) > 150
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((twin.path / "config.json").read_text())
    vision, audio = config.pop("vision_config"), config.pop("audio_config")
    old = {key: audio[key] for key in SOUND if key not in ("nemo_conv_channels", "bias_max_distance")}
    old |= {"attention_dim": old.pop("hidden_size"), "linear_units": old.pop("intermediate_size")}
    old |= {"attention_heads": old.pop("num_attention_heads"), "chunk_size": -1, "time_reduction": 8}
    old["nemo_conv_settings"] = {"conv_channels": audio["nemo_conv_channels"]}
    old["relative_attention_bias_args"] = {"type": "t5", "t5_bias_max_distance": audio["bias_max_distance"]}
    config |= {
        "architectures": ["Phi4MMForCausalLM"],
        "model_type": "phi4mm",
        "audio_processor": {"config": old},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = read_checkpoint(tmp_path).facts.media
    assert facts is not None and facts.tower.vit.hidden == 1152 and facts.tower.image_id == 200010
    small = {
        key: vision[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "patch_size")
    }
    small |= {
        key: vision[key] for key in ("num_attention_heads", "image_size", "crop_size", "image_token_id")
    }
    ids = {"audio_token_id": audio["audio_token_id"]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vision_config": small}))
    assert (
        read_checkpoint(tmp_path).facts.media.tower.sound
        == read_checkpoint(twin.path).facts.media.tower.sound
    )  # type: ignore[union-attr]
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"vision_config": small, "audio_config": {**audio, **ids}})
    )
    request = {
        "prompt": "a <|image_1|> b <|audio_1|>",
        "multi_modal_data": {"image": picture(60, 28), "audio": sound(5000)},
    }
    with caplog.at_level(logging.WARNING):
        answers = [open_llm(path).generate(request, use_tqdm=False)[0] for path in (twin.path, tmp_path)]
    assert answers[0].outputs[0].token_ids == answers[1].outputs[0].token_ids
    assert not [record for record in caplog.records if "not used" in record.message]


def test_stored_adapters_do_not_hide_the_weight() -> None:
    stored = {"a.base_layer.weight": (2, 3), "a.lora_A.weight": (1, 3), "b.weight": (1,)}
    assert stored_name("a.weight", stored) == "a.base_layer.weight"
    assert stored_name("b.weight", stored) == "b.weight"


def test_settings_are_checked(twin: Twin) -> None:
    for wrong, message in (
        ({"vision_config": {"image_size": 35}}, "image_size is 35, expected an even number of patches"),
        ({"vision_config": {"crop_size": 56}}, "crop_size is 56, expected 28"),
        ({"vision_config": {"feature_layer": 9}}, "feature_layer is 9, expected one of 3 layers"),
        ({"audio_config": {"chunk_size": 18}}, "chunk_size is 18, expected -1"),
        ({"audio_config": {"ext_pw_out_channel": 7}}, "ext_pw_out_channel is 7, expected 32"),
        ({"audio_config": {"time_reduction": 6}}, "time_reduction is 6, expected a power of 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_checkpoint(twin.path, wrong)
    with pytest.raises(RequestError, match="audio_projection_mode is 'x', expected 'speech', or 'vision'"):
        twin.ours.process("audio", sound(5000), {"audio_projection_mode": "x"})
    with pytest.raises(RequestError, match="resized to 168 x 5, and 10 x 10 are the minimum"):
        twin.ours.process("image", picture(150, 5), {})
