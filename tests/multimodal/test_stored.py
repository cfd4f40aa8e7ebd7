"""Tests of vision checkpoints as published: with other weight names, other files, and sparse
configurations."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finished import finished
from oracle import load_tiny, make_tiny, random_prompts, run_paged
from PIL import Image
from safetensors.torch import load_file, save_file
from seeing import Twin, close, picture
from seeing_latest import LATEST
from seeing_more import MORE
from threads import run_threads, tp_worlds

from quire.attention.torch_sdpa import TorchSDPA
from quire.checkpoint.model import read_checkpoint
from quire.checkpoint.multimodal import MEDIA_FAMILIES
from quire.checkpoint.reader import ConfigReader
from quire.data.multimodal import Array
from quire.errors import ConfigError, RequestError
from quire.loader import load_model
from quire.models.towers import TOWERS
from quire.multimodal.processors import Video
from quire.parallel.world import World

Tensors = dict[str, torch.Tensor]


def _vectors(twin: Twin) -> torch.Tensor:
    arrays = twin.ours.process("image", picture(60, 28), {}).arrays
    assert arrays is not None
    (vectors,) = twin.tower().encode("image", [finished(arrays)])
    return torch.as_tensor(vectors)


def _older_llava(tensors: Tensors) -> Tensors:
    """Rename weights as in llava-hf's checkpoints on the hub."""
    return {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for name, tensor in tensors.items()
    }


def _inner_llava(tensors: Tensors) -> Tensors:
    """Rename weights as in transformers' modules, with the body first."""
    moved = {name.removeprefix("language_model."): tensor for name, tensor in tensors.items()}
    return {
        name.replace("model.", "model.language_model.", 1)
        if name.startswith("model.")
        else name
        if name.startswith("lm_head")
        else f"model.{name}": item
        for name, item in moved.items()
    }


_INTERN = {
    "vision_tower.": "vision_model.",
    "patch_embeddings.projection": "patch_embedding",
    "cls_token": "class_embedding",
    "position_embeddings": "position_embedding",
    "encoder.layer.": "encoder.layers.",
    "attention.": "attn.",
    "projection_layer": "proj",
    "lambda_": "ls",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "multi_modal_projector.layer_norm": "mlp1.0",
    "multi_modal_projector.linear_1": "mlp1.1",
    "multi_modal_projector.linear_2": "mlp1.3",
}


def _intern_chat(tensors: Tensors) -> Tensors:
    """Rename weights as in the checkpoints of InternVL's authors."""
    out = {}
    for name, tensor in tensors.items():
        if not name.startswith("language_model."):
            for old, new in _INTERN.items():
                name = name.replace(old, new)
        out[name] = tensor
    for name in [name for name in out if ".attn.q_proj." in name]:
        parts = [out.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        out[name.replace("q_proj", "qkv")] = torch.cat(parts)
    return out


def _intern_config(config: dict[str, Any]) -> dict[str, Any]:
    vision = config["vision_config"]
    return {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "llm_config": config["text_config"],
        "vision_config": vision
        | {"model_type": "intern_vit_6b", "qkv_bias": True, "qk_normalization": True, "image_size": 448},
        "force_image_size": 28,
        "dynamic_image_size": True,
        "max_dynamic_patch": 6,
        "select_layer": -1,
        "tie_word_embeddings": True,
        "use_thumbnail": True,
    }


def _kimi_vl(tensors: Tensors) -> Tensors:
    """Rename weights as in Kimi-VL, the older of the two Kimi models."""
    parts = {"proj.0": "linear_1", "proj.2": "linear_2", "mm_projector": "multi_modal_projector"}
    out = {}
    for name, tensor in tensors.items():
        for old, new in parts.items() if name.startswith("mm_projector.") else ():
            name = name.replace(old, new)
        out[name] = tensor
    return out


def _kimi_config(config: dict[str, Any]) -> dict[str, Any]:
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size")
    vision = {key: config["vision_config"][key] for key in kept}
    return {
        "architectures": ["KimiVLForConditionalGeneration"],
        "model_type": "kimi_vl",
        "media_placeholder_token_id": config["image_token_id"],
        "text_config": config["text_config"],
        "vision_config": vision
        | {"model_type": "moonvit", "merge_kernel_size": [2, 2]}
        | {"init_pos_emb_height": 6, "init_pos_emb_width": 6},
    }


@pytest.mark.parametrize(
    ("family", "rename", "change"),
    [
        ("kimi_k25", _kimi_vl, _kimi_config),
        ("llava", _older_llava, dict),
        ("llava", _inner_llava, dict),
        ("internvl", _intern_chat, _intern_config),
    ],
)
def test_renamed_vision_weights_are_loaded(
    family: str, rename: Callable[[Tensors], Tensors], change: Callable[[Any], Any], tmp_path: Path
) -> None:
    """Catches a published checkpoint with a weight that is not found, or fused weights that are split
    wrongly."""
    twin = Twin(tmp_path, family)
    expected = _vectors(twin)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    save_file(rename(load_file(weights)), weights)
    config.write_text(json.dumps(change(json.loads(config.read_text()))))
    twin.reread()
    torch.testing.assert_close(_vectors(twin), expected, atol=1e-6, rtol=1e-6)


def test_pan_and_scan_is_supported(tmp_path: Path) -> None:
    """Covers the crops of wide and tall images, and the words between them."""
    twin = Twin(tmp_path, "gemma3")
    scan = {
        "do_pan_and_scan": True,
        "pan_and_scan_min_crop_size": 10,
        "pan_and_scan_max_num_crops": 3,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    for size in ((100, 31), (25, 90), (40, 40), (30, 12)):
        image = picture(*size)
        expected = twin.processor(images=[image], text=twin.mark, return_tensors="np", **scan)
        actual = twin.ours.process("image", image, scan)
        assert actual.arrays is not None and actual.token_ids == expected["input_ids"][0].tolist()
        assert abs(finished(actual.arrays)["pixels"].numpy() - expected["pixel_values"]).max() < 1e-5
        assert all(count == 4 for _, count in actual.runs)
        assert len(actual.runs) == len(expected["pixel_values"])


def test_invalid_arguments_and_embeddings_are_named(tmp_path: Path) -> None:
    twin = Twin(tmp_path, "llava")
    image = picture(30, 30)
    with pytest.raises(RequestError, match="do_pan_and_scan"):
        twin.ours.process("image", image, {"do_pan_and_scan": True})
    with pytest.raises(RequestError, match="the vision encoder needs 28 x 28"):
        twin.ours.process("image", image, {"crop_size": {"height": 14, "width": 14}})
    rows = torch.zeros(3, 32).numpy()
    brought = twin.ours.process_embeds("image", {"embeds": rows})
    assert len(brought.token_ids) == 3 and isinstance((brought.arrays or {})["embeds"], Array)
    with pytest.raises(RequestError, match=r"\(3, 16\), expected \(vectors, 32\)"):
        twin.ours.process_embeds("image", {"embeds": rows[:, :16]})


def test_sparse_configs_are_completed(tmp_path: Path) -> None:
    """The config.json of llava-1.5-7b and gemma-3-4b has only a few sizes of the decoder."""
    llava = {
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_index": 32000,
        "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
        "torch_dtype": "float16",
        "vision_config": {
            "hidden_size": 1024,
            "image_size": 336,
            "intermediate_size": 4096,
            "model_type": "clip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(llava))
    facts = read_checkpoint(tmp_path).facts
    assert (facts.hidden, len(facts.layers), facts.vocab, facts.max_len) == (4096, 32, 32064, 4096)
    assert facts.media is not None and facts.media.tower.tokens == 576
    assert facts.media.tower.depths == (23,)
    gemma = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
    }
    text, media = MEDIA_FAMILIES["Gemma3ForConditionalGeneration"](ConfigReader("config.json", gemma))
    assert media is not None
    assert (text.get("vocab_size"), text.get("rope_theta"), media.tower.tokens) == (262208, 1e6, 256)


@pytest.mark.parametrize(
    ("keys", "architecture"),
    [
        ({"version": 2.5}, "LlamaForCausalLM"),
        ({"version": "2.6"}, "Qwen2ForCausalLM"),
        ({"version": 4}, "LlamaForCausalLM"),
        ({"query_num": 96}, "LlamaForCausalLM"),
        ({"query_num": 64}, None),
        ({"version": 2.0}, None),
        ({"version": [2.5]}, None),
    ],
)
def test_versions_of_minicpm(keys: dict[str, Any], architecture: str | None) -> None:
    """The first files of MiniCPM-V 2.5 have no version. Those of 2.0 have none either, and are refused."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    reader = ConfigReader("config.json", {**sizes, "vision_config": sizes, **keys})
    if architecture is None:
        with pytest.raises(ConfigError, match="version is .*, expected one of 2.5, 2.6, 4.0, 4.5"):
            MEDIA_FAMILIES["MiniCPMV"](reader)
        return
    text, media = MEDIA_FAMILIES["MiniCPMV"](reader)
    assert media is not None and text.get("architectures") == [architecture]
    is_first = architecture == "LlamaForCausalLM" and keys.get("version") != 4
    assert media.modalities == (("image",) if is_first else ("image", "video"))


@torch.no_grad()
def test_video_is_frames_of_half_the_patches(tmp_path: Path) -> None:
    """Frames are in order, halved as in transformers, with one embedding after all of them."""
    twin = Twin(tmp_path, "llava_onevision")
    frames = np.stack([np.asarray(picture(40, 30, seed)) for seed in range(3)])
    actual = twin.ours.process("video", Video(frames), {})
    pixels = finished(actual.arrays)["pixels"]
    expected = twin.model.model.get_video_features(pixels[None]).pooler_output[0]
    (vectors,) = twin.tower().encode("video", [{"pixels": pixels}])
    torch.testing.assert_close(vectors, expected, atol=1e-4, rtol=1e-4)
    assert actual.token_ids == [twin.processor.video_token_id] * len(expected)


@torch.no_grad()
def test_center_of_frames_is_averaged(tmp_path: Path) -> None:
    """LLaVA-Next-Video averages patches before the projector, without an embedding after the frames."""
    twin = Twin(tmp_path, "llava_next_video")
    frames = np.stack([np.asarray(picture(40, 30, seed)) for seed in range(3)])
    actual = twin.ours.process("video", Video(frames), {})
    pixels = finished(actual.arrays)["pixels"]
    resized = [Image.fromarray(frame).resize((37, 28), Image.Resampling.BICUBIC) for frame in frames]
    cropped = np.stack([np.asarray(frame)[:, 4:32] for frame in resized])
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    close(pixels.numpy(), ((cropped / 255 - mean) / std).transpose(0, 3, 1, 2))
    expected = twin.model.model.get_video_features(pixels[None]).pooler_output[0]
    (vectors,) = twin.tower().encode("video", [{"pixels": pixels}])
    torch.testing.assert_close(vectors, expected, atol=1e-4, rtol=1e-4)
    video_id = twin.model.config.video_token_index
    assert actual.token_ids == [video_id] * len(expected) and len(expected) == 12
    with pytest.raises(ConfigError, match="spatial_pool_mode is 'max', expected average"):
        read_checkpoint(tmp_path, {"spatial_pool_mode": "max"})


@pytest.mark.parametrize(
    ("family", "arguments", "size"),
    [
        ("llava", {"image_mean": [0.5, "x", 0.5]}, (30, 30)),
        ("llava", {"image_std": [0, 0, 0]}, (30, 30)),
        ("llava", {"rescale_factor": 1e300, "do_normalize": False}, (30, 30)),
        ("llava", {"rescale_factor": 10**400}, (30, 30)),
        ("llava", {"image_mean": [10**400, 0, 0]}, (30, 30)),
        ("llava", {"resample": [1]}, (30, 30)),
        ("llava", {"size": {"shortest_edge": 8000}}, (1, 9)),
        ("llava", {"size": {"shortest_edge": 10**9}}, (30, 30)),
        ("llava", {}, (1, 100_000)),
        ("gemma3", {"size": {"height": 8000, "width": 8000}}, (30, 30)),
        ("gemma3", {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 10**9}, (30, 30)),
        ("internvl", {"max_patches": 10**9}, (30, 30)),
        ("llama4", {"max_patches": 10**9}, (30, 30)),
        ("idefics3", {"do_resize": False}, (5000, 2)),
        ("kimi_k25", {"max_patches": 10**9}, (30, 30)),
        ("kimi_k25", {"in_token_limit": "many"}, (30, 30)),
        ("kimi_k25", {"size": {"height": 28, "width": 28}}, (30, 30)),
        ("minicpm_v46", {"size": {"height": 28, "width": 28}}, (30, 30)),
        ("kimi_k25", {"patch_limit_on_one_side": 10**400}, (30, 30)),
        ("minicpm_v46", {"max_slice_nums": 10**9}, (30, 30)),
        ("minicpm_v46", {"scale_resolution": 10**400}, (30, 30)),
        ("minicpm_v46", {}, (1, 5000)),
        ("dots_ocr", {"max_pixels": 10**9}, (30, 30)),
        ("step_vl", {"rescale_factor": 10**400}, (30, 30)),
        ("step_vl", {"patch_size": 1}, (30, 30)),
        ("step_vl", {}, (32, 5000)),
    ],
)
def test_arguments_cannot_allocate_gigabytes(
    family: str, arguments: dict[str, Any], size: tuple[int, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Invalid numbers, and values that would take all memory or run forever, are refused before any
    allocation."""
    if family not in _TWINS:
        _TWINS[family] = Twin(tmp_path_factory.mktemp(family), family)
    with pytest.raises(RequestError):
        _TWINS[family].ours.process("image", picture(*size), arguments)


_TWINS: dict[str, Twin] = {}


@pytest.mark.parametrize("family", [*MORE, *LATEST])
def test_tensor_parallel_vision_encoder_equals_one_device(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Catches fused head weights that are split wrongly, and an all-reduce that is missing or done twice."""
    if family not in _TWINS:
        _TWINS[family] = Twin(tmp_path_factory.mktemp(family), family)
    twin = _TWINS[family]
    items = [finished(twin.ours.process("image", picture(*size), {}).arrays) for size in ((60, 28), (30, 90))]
    with torch.inference_mode():
        expected = torch.cat(twin.tower().encode("image", items))
    worlds = tp_worlds(2)
    towers = [twin.tower(world=world) for world in worlds]

    @torch.inference_mode()
    def run(world: World) -> Any:
        return torch.cat(towers[world.tp.rank].encode("image", items))

    for vectors in run_threads(2, run, worlds=lambda _: worlds):
        torch.testing.assert_close(vectors, expected, atol=1e-4, rtol=1e-4)
    can_shard = TOWERS[twin.media.family].can_shard
    assert can_shard(twin.media, 2) and not can_shard(twin.media, 4)


@pytest.mark.parametrize("family", [*MORE, *LATEST])
def test_decoder_is_loaded_without_its_vision_encoder(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With language_model_only, the unused weights are those of the vision encoders, under all of their
    names."""
    if family not in _TWINS:
        _TWINS[family] = Twin(tmp_path_factory.mktemp(family), family)
    checkpoint = _TWINS[family].checkpoint
    alone = replace(checkpoint, facts=replace(checkpoint.facts, media=None))
    options = {"dtype": torch.float32, "device": torch.device("cpu"), "backend": TorchSDPA()}
    model = load_model(alone, max_model_len=64, show_progress=False, **options)
    assert not hasattr(model, "tower")


@torch.no_grad()
def test_smolvlm_is_loaded_as_idefics3(tmp_path: Path) -> None:
    """Covers the configuration of SmolVLM and the names of its weights."""
    import transformers as hf

    twin = Twin(tmp_path, "idefics3")
    config = json.loads((tmp_path / "config.json").read_text())
    kept = {key: config[key] for key in ("image_token_id", "scale_factor", "text_config")}
    vision = {key: value for key, value in config["vision_config"].items() if key != "model_type"}
    torch.manual_seed(1)
    model = hf.SmolVLMForConditionalGeneration(hf.SmolVLMConfig(**kept, vision_config=vision)).eval()
    model.float().save_pretrained(tmp_path)
    twin.reread()
    assert twin.checkpoint.facts.architecture == "LlamaForCausalLM"
    inputs = twin.inputs(twin.mark, [picture(60, 28)])
    kinds = ("pixel_values", "pixel_attention_mask")
    (expected,) = model.model.get_image_features(**{name: inputs[name] for name in kinds}).pooler_output
    torch.testing.assert_close(_vectors(twin), expected, atol=1e-4, rtol=1e-4)


def test_published_paddleocr_is_loaded(tmp_path: Path) -> None:
    """In config.json, the decoder's keys are next to those of the vision encoder, in an older format; the
    weights have other prefixes."""
    twin = Twin(tmp_path, "paddleocr_vl")
    expected, facts = _vectors(twin), twin.checkpoint.facts
    names = {"model.language_model.": "model.", "model.projector.": "mlp_AR.", "model.visual.": "visual."}
    tensors = {}
    for name, item in load_file(tmp_path / "model.safetensors").items():
        front = next((front for front in names if name.startswith(front)), "")
        tensors[names.get(front, "") + name.removeprefix(front)] = item
    save_file(tensors | {"visual.vision_model.head.probe": torch.zeros(1)}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_scaling": {"type": "default", **rope}, "rope_theta": rope.pop("rope_theta")}
    (tmp_path / "config.json").write_text(json.dumps({**text, **config}))
    twin.reread()
    assert twin.checkpoint.facts == facts
    torch.testing.assert_close(_vectors(twin), expected)
    load_model(
        twin.checkpoint,
        dtype=torch.float32,
        device=torch.device("cpu"),
        backend=TorchSDPA(),
        max_model_len=64,
        show_progress=False,
    )


def test_aya_vision_placeholder_need_not_be_a_token(tmp_path: Path) -> None:
    """Covers also a request for an image without tiles."""
    twin = Twin(tmp_path, "aya_vision")
    image = picture(60, 28)
    with_token = twin.token_ids("a<image>b", [image])
    vocab = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in vocab["added_tokens"]:
        token["content"] = "<other>" if token["content"] == "<image>" else token["content"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(vocab))
    twin.reread()
    assert twin.token_ids("a<image>b", [image]) == with_token
    whole = twin.ours.process("image", image, {"crop_to_patches": False})
    assert whole.token_ids.count(twin.image_id) == 4 < with_token.count(twin.image_id)


def test_published_gemma3n_is_loaded(tmp_path: Path) -> None:
    """The unused encoders are skipped, and layers share the KV cache of other layers."""
    path, _ = make_tiny("Gemma3nForCausalLM", tmp_path)
    prompts = random_prompts(9, 14)
    expected = run_paged(load_tiny(path), prompts, [[9, 14]])
    tensors = load_file(path / "model.safetensors")
    inner = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    keys = tensors["model.layers.1.self_attn.k_proj.weight"]
    more = {"model.language_model.layers.4.self_attn.k_proj.weight": keys.clone()}
    more["model.vision_tower.timm_model.conv_stem.conv.weight"] = torch.zeros(2)
    save_file(inner | more, path / "model.safetensors")
    text = json.loads((path / "config.json").read_text())
    whole = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": text, "vision_config": {}}
    (path / "config.json").write_text(json.dumps(whole))
    for actual, reference in zip(run_paged(load_tiny(path), prompts, [[9, 14]]), expected, strict=True):
        assert torch.equal(actual, reference)


def test_published_gemma4_is_loaded(tmp_path: Path) -> None:
    """The unused encoders are skipped; layer sizes have the names of the first published files."""
    path, _ = make_tiny("Gemma4ForCausalLM", tmp_path)
    prompts = random_prompts(9, 14)
    expected = run_paged(load_tiny(path), prompts, [[9, 14]])
    tensors = load_file(path / "model.safetensors")
    inner = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    inner["model.vision_tower.std_bias"] = torch.zeros(2)
    inner["model.embed_audio.embedding_projection.weight"] = torch.zeros(2)
    save_file(inner, path / "model.safetensors")
    text = json.loads((path / "config.json").read_text())
    assert {layer["head_dim"] for layer in text.pop("per_layer_config").values()} == {32}
    text["global_head_dim"] = 32
    whole = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    (path / "config.json").write_text(json.dumps(whole))
    for actual, reference in zip(run_paged(load_tiny(path), prompts, [[9, 14]]), expected, strict=True):
        assert torch.equal(actual, reference)
