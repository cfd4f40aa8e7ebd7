"""Tiny models with vision and audio encoders, and transformers' results for the same prompts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from finished import finished, patches
from hearing import sound
from numpy.typing import NDArray
from PIL import Image
from tiny_qwen import ROPE, VISION
from tiny_seeing import STRONG, make_tokenizer, save_tiny
from torch.nn import functional as F

from quire.checkpoint.model import read_checkpoint
from quire.multimodal.placeholders import place
from quire.multimodal.processing import PreparedItem
from quire.multimodal.processors import PROCESSORS, Video
from quire.text.tokenizer import load_tokenizer

NAMES = ["<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>", "<|vis|>", "<|/vis|>", "<|aud|>", "<|/aud|>"]
IMAGE_TOKENS, VIDEO_TOKENS, AUDIO_TOKENS = (
    "<|vis|><|IMAGE|><|/vis|>",
    "<|vis|><|VIDEO|><|/vis|>",
    "<|aud|><|AUDIO|><|/aud|>",
)
SECONDS = 2
FPS = 2.0
GRID = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
FILM = {"min_pixels": 256, "max_pixels": 2048}
"""mm_processor_kwargs of videos."""
_HEARING = {
    "num_mel_bins": 20,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 40,
    "d_model": 32,
    "output_dim": 32,
    "n_window": 15,
    "max_source_positions": 100,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3OmniMoe": {
        "text_config": STRONG
        | _EXPERTS
        | {"num_attention_heads": 2, "num_hidden_layers": 3}
        | {"rope_parameters": ROPE | {"mrope_interleaved": True}},
        "vision_config": VISION | {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]},
        "audio_config": _HEARING | {"n_window": 50, "n_window_infer": 100, "downsample_hidden_size": 12},
        "initializer_range": 0.3,
    },
    "Qwen2_5Omni": {
        "text_config": STRONG | {"num_attention_heads": 2, "rope_parameters": ROPE},
        "vision_config": VISION | {"window_size": 16, "fullatt_block_indexes": [1]},
        "audio_config": _HEARING,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
    },
}


class Content(NamedTuple):
    """A prompt with its images, videos and audio."""

    text: str
    images: list[Image.Image] = []
    videos: list[NDArray[np.uint8]] = []
    sounds: list[int] = []
    """Number of samples of each audio item."""

    @property
    def request(self) -> Any:
        data: dict[str, Any] = {"image": self.images, "audio": [sound(count) for count in self.sounds]}
        data["video"] = [(video, {"fps": FPS}) for video in self.videos]
        data = {name: items for name, items in data.items() if items}
        if not data:
            return self.text
        return {
            "prompt": self.text,
            "multi_modal_data": data,
            "mm_processor_kwargs": FILM if self.videos else {},
        }


class Omni:
    """Checkpoint with transformers' model and processor, and our processor."""

    def __init__(self, path: Path, family: str) -> None:
        import transformers as hf

        self.path = path
        self.is_long = family == "Qwen3OmniMoe"
        """Whether long audio is not truncated."""
        tokenizer = make_tokenizer(NAMES)
        ids = dict(zip(NAMES, tokenizer.convert_tokens_to_ids(NAMES), strict=True))
        tokenizer._set_model_specific_special_tokens(
            {
                "image_token": NAMES[0],
                "video_token": NAMES[1],
                "audio_token": NAMES[2],
                "vision_bos_token": NAMES[3],
                "vision_eos_token": NAMES[4],
                "audio_bos_token": NAMES[5],
                "audio_eos_token": NAMES[6],
            }
        )
        images = hf.models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil(
            **GRID, size={"shortest_edge": 256, "longest_edge": 4096}
        )
        features = hf.WhisperFeatureExtractor(feature_size=20, chunk_length=SECONDS)
        special_tokens = {
            "image_token_id": ids[NAMES[0]],
            "video_token_id": ids[NAMES[1]],
            "audio_token_id": ids[NAMES[2]],
            "vision_start_token_id": ids[NAMES[3]],
            "vision_end_token_id": ids[NAMES[4]],
            "audio_start_token_id": ids[NAMES[5]],
            "audio_end_token_id": ids[NAMES[6]],
        }
        kind = getattr(hf, f"{family}ThinkerForConditionalGeneration")
        config = kind.config_class(**FAMILIES[family], **special_tokens)
        self.model = save_tiny(path, kind.__name__, config, images)
        self.model.generation_config.eos_token_id = None
        features.save_pretrained(path / "hearing")
        (path / "hearing" / "preprocessor_config.json").rename(path / "hearing.json")
        self._both(path)
        tokenizer.save_pretrained(path)

        class Processor(getattr(hf, f"{family}Processor")):  # type: ignore[misc]
            def check_argument_for_proper_class(self, *_: Any) -> None:
                """Accept any class: the video processor needs torchvision."""

        films = SimpleNamespace(merge_size=2, temporal_patch_size=2)
        self.processor = Processor(images, films, features, tokenizer)
        self.media = read_checkpoint(path).facts.media
        assert self.media is not None
        self.tokenizer = load_tokenizer(path, "hf")
        self.ours = PROCESSORS[self.media.family](path, self.media, self.tokenizer)

    def _both(self, path: Path) -> None:
        """Write the settings of images and audio into one file, as in published checkpoints."""
        import json

        files = [path / "preprocessor_config.json", path / "hearing.json"]
        both = [json.loads(file.read_text()) for file in files]
        files[0].write_text(json.dumps(both[1] | both[0]))

    def inputs(self, content: Content) -> dict[str, Any]:
        """Return the inputs of transformers' model; images and audio come from its processor, videos from
        ours."""
        made = [self.ours.process("image", image, {}) for image in content.images]
        films = [self.ours.process("video", Video(video, fps=FPS), FILM) for video in content.videos]
        sounds = [self.ours.process("audio", sound(count), {}) for count in content.sounds]
        kinds = ["image"] * len(made) + ["video"] * len(films) + ["audio"] * len(sounds)
        ready = [
            PreparedItem(kind, b"%d" % at, item)
            for at, (kind, item) in enumerate(zip(kinds, [*made, *films, *sounds], strict=True))
        ]
        ids = self.tokenizer.encode(content.text)
        tokens, _ = place(ids, ready, self.ours) if ready else (ids, None)
        model_inputs: dict[str, Any] = {"input_ids": torch.tensor([tokens])}
        model_inputs["attention_mask"] = torch.ones_like(model_inputs["input_ids"])
        if made:
            reference = self.processor.image_processor(images=content.images, return_tensors="pt")
            model_inputs |= {name: reference[name] for name in ("pixel_values", "image_grid_thw")}
        if films:
            model_inputs["pixel_values_videos"] = torch.cat(
                [patches(item.arrays).flatten(0, 2) for item in films]
            )
            model_inputs["video_grid_thw"] = torch.tensor([item.facts["grid"] for item in films])
            model_inputs["video_second_per_grid"] = torch.tensor([2 / FPS] * len(films))
        if sounds:
            features = self.audio_features(content)
            model_inputs["input_features"], model_inputs["feature_attention_mask"] = features
        return model_inputs

    def audio_features(self, content: Content) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the features of each audio item, computed as if it were alone."""
        options = {"padding": True, "truncation": False} if self.is_long else {"padding": "max_length"}
        item = [
            self.processor.feature_extractor(
                sound(count).samples,
                sampling_rate=16000,
                return_attention_mask=True,
                return_tensors="pt",
                **options,
            )
            for count in content.sounds
        ]
        longest = max(one["input_features"].shape[2] for one in item)
        features, masks = (
            torch.cat([F.pad(one[name], (0, longest - one[name].shape[-1])) for one in item])
            for name in ("input_features", "attention_mask")
        )
        return features, masks

    def mel(self, count: int) -> torch.Tensor:
        return finished(self.ours.process("audio", sound(count), {}).arrays)["mel"]
