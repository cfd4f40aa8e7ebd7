"""Tests of audio and videos of Gemma 4 against transformers: encoder inputs, placeholders, embeddings,
answers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finished import finished
from hearing import sound
from PIL import Image
from seeing_gemma4 import Gemma4Stand
from tiny_engine import check_answers, generate_reference, load_tower, open_llm
from tiny_seeing import STRONG, make_tokenizer, picture, save_tiny

from quire.checkpoint import weights
from quire.checkpoint.model import read_checkpoint
from quire.errors import ConfigError, RequestError
from quire.multimodal.processors import PROCESSORS, Video
from quire.text.tokenizer import load_tokenizer

COUNT = 5
LENGTHS = [161, 320, 321, 1600, 5000, 16001, 24000]
"""Numbers of audio samples, from the fewest that have an embedding."""
MARKS = ["<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>"]
FRAMES = np.stack([np.asarray(picture(30, 20, seed)) for seed in range(3)])
FILM = Video(FRAMES, 1.0, 90, (0, 30, 64), 1.0)
Content = tuple[str, list[int], list[Video]]
CONTENTS: list[Content] = [
    ("what is <|audio|> this", [5000], []),
    ("nothing to hear here, only words", [], []),
    ("<|audio|>one\n<|audio|>\nand then", [16001, 1000], []),
    ("a film: <|video|> with <|audio|>", [5000], [FILM]),
]


class Twin:
    """A checkpoint with the vision and audio encoders, and transformers' model."""

    def __init__(self, path: Path) -> None:
        import transformers as hf

        self.path, self.hf = path, make_tokenizer(MARKS)
        ids = dict(zip(MARKS, self.hf.convert_tokens_to_ids(MARKS), strict=True))
        vision = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 16}
        vision |= {"num_attention_heads": 2, "num_key_value_heads": 2, "patch_size": 2}
        vision |= {"pooling_kernel_size": 2, "position_embedding_size": 150, "initializer_range": 0.2}
        audio = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        audio |= {"subsampling_conv_channels": [16, 6], "attention_chunk_size": 4, "conv_kernel_size": 3}
        audio |= {"attention_context_left": 5, "output_proj_dims": 24, "initializer_range": 0.2}
        config = hf.Gemma4Config(
            vision_config=vision,
            audio_config=audio,
            text_config=hf.Gemma4TextConfig(
                **STRONG | {"pad_token_id": 5},
                head_dim=16,
                global_head_dim=32,
                sliding_window=16,
                layer_types=["sliding_attention", "full_attention"],
                hidden_size_per_layer_input=8,
                vocab_size_per_layer_input=160,
                use_bidirectional_attention=None,
            ),
            image_token_id=ids["<|image|>"],
            boi_token_id=ids["<|image>"],
            eoi_token_id=ids["<image|>"],
            video_token_id=ids["<|video|>"],
            audio_token_id=ids["<|audio|>"],
            boa_token_id=ids["<|audio>"],
            eoa_token_index=ids["<audio|>"],
        )
        self.images = Gemma4Stand(self.hf)
        self.model = save_tiny(path, self._build, config, self.images)
        self.features = hf.Gemma4AudioFeatureExtractor(feature_size=16)
        self.features.save_pretrained(path / "audio")
        audio_file = (path / "audio" / "preprocessor_config.json").read_text()
        images_file = (path / "preprocessor_config.json").read_text()
        both = f'{{"image_processor": {images_file}, "feature_extractor": {audio_file}}}'
        (path / "processor_config.json").write_text(both)
        self.checkpoint = read_checkpoint(path)
        media = self.checkpoint.facts.media
        assert media is not None and media.modalities == ("image", "video", "audio")
        self.ours = PROCESSORS[media.family](path, media, load_tokenizer(path, "hf"))

    @staticmethod
    def _build(config: Any) -> Any:
        """Build a model whose clipped layers have bounds."""
        import transformers as hf

        model = hf.Gemma4ForConditionalGeneration(config)
        for name, tensor in model.named_buffers():
            if name.endswith(("_min", "_max")):
                tensor.fill_(-1.5 if name.endswith("min") else 1.2)
        return model

    def heard(self, counts: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the spectrograms of audio items and their masks, [frames, mels] and [frames]."""
        made = [self.features([sound(count).samples], return_tensors="pt") for count in counts]
        return [item["input_features"][0] for item in made], [item["input_features_mask"][0] for item in made]

    def mel(self, count: int) -> torch.Tensor:
        return finished(self.ours.process("audio", sound(count), {}).arrays)["mel"]

    def inputs(self, content: Content) -> dict[str, torch.Tensor]:
        text, counts, videos = content
        out: dict[str, torch.Tensor] = {}
        features, masks = self.heard(counts)
        for mask in masks:
            span = "<|audio>" + "\0" * int(mask[::2][::2].sum()) + "<audio|>"
            text = text.replace("<|audio|>", span, 1)
        if counts:
            pad = torch.nn.utils.rnn.pad_sequence
            out["input_features"] = pad(features, batch_first=True)
            out["input_features_mask"] = pad(masks, batch_first=True)
        for video in videos:
            made = self.images.images([Image.fromarray(frame) for frame in video.frames], return_tensors="pt")
            out["pixel_values_videos"] = made["pixel_values"]
            out["video_position_ids"] = made["image_position_ids"]
            out["num_frames_per_video"] = torch.tensor([len(video.frames)])
            span = " ".join(
                f"{time} <|image>{MARKS[3] * int(made['num_soft_tokens_per_image'][0])}<image|>"
                for time in ("00:00", "00:30", "01:04")
            )
            text = text.replace("<|video|>", span)
        tokens = self.hf(text.replace("\0", "<|audio|>"), return_tensors="pt", return_token_type_ids=False)
        return dict(tokens) | out

    def request(self, content: Content) -> Any:
        text, counts, videos = content
        data: dict[str, Any] = {"audio": [sound(count) for count in counts]} if counts else {}
        if videos:
            facts = {"fps": 1.0, "total_num_frames": 90, "frames_indices": list(FILM.indices)}
            data["video"] = [(video.frames, facts) for video in videos]
        return {"prompt": text, "multi_modal_data": data} if data else text


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return Twin(tmp_path_factory.mktemp("gemma4"))


def test_mel_frames_equal_transformers(twin: Twin) -> None:
    """Catches a wrong window or filter, and frames with silence at the end."""
    for count in LENGTHS:
        (expected,), (mask,) = twin.heard([count])
        np.testing.assert_allclose(twin.mel(count), expected[mask], atol=1e-4)
    with pytest.raises(RequestError, match="too short: it has 160 samples at 16000 Hz, and 161"):
        twin.ours.process("audio", sound(160), {})
    with pytest.raises(RequestError, match="30.1 seconds long, and 30.0 are the maximum"):
        twin.ours.process("audio", sound(481000), {"truncation": False, "max_soft_tokens": 70})


@torch.inference_mode()
def test_audio_embeddings_equal_transformers(twin: Twin) -> None:
    """Catches attention that reaches too far, and convolutions that read beyond the end."""
    tower = load_tower(twin.path)
    embeddings = tower.encode("audio", [{"mel": twin.mel(count)} for count in LENGTHS])
    for embedding, count in zip(embeddings, LENGTHS, strict=True):
        (features,), (mask,) = twin.heard([count])
        output = twin.model.model.get_audio_features(features[None], mask[None])
        expected = output.pooler_output[0][output.attention_mask[0]]
        torch.testing.assert_close(embedding, expected, atol=1e-4, rtol=1e-4)
        assert len(embedding) + 2 == len(twin.ours.process("audio", sound(count), {}).token_ids)
    numbers = sum(parameter.numel() for parameter in tower.parameters())
    assert weights.count_parameters(twin.checkpoint.facts).tower == pytest.approx(numbers, rel=0.06)
    (blank,) = tower.encode("audio", [tower.blank("audio", twin.ours.max_vectors("audio"))])
    assert len(blank) == 750
    assert tower.cost("audio", {"mel": (300, 16)}) > tower.cost("audio", {"mel": (100, 16)}) > 0


def test_videos_are_frames_with_timestamps(twin: Twin) -> None:
    item = twin.ours.process("video", FILM, {})
    assert twin.ours.num_vectors(FILM, {}) == sum(length for _, length in item.runs) < 3 * 70
    assert len(item.runs) == 3
    pixels = finished(item.arrays)["pixels"]
    for frame, expected in zip(pixels, FRAMES, strict=True):
        reference = twin.images.pixels(Image.fromarray(expected))["pixels"]
        np.testing.assert_allclose(frame.numpy(), reference, atol=1 / 255 + 1e-6)
    assert twin.ours.largest("video")[0] * 70 == twin.ours.max_vectors("video")


def test_answers_about_audio_and_videos_equal_transformers(twin: Twin) -> None:
    """Covers one audio item, several, a video beside audio, and none: at once, in chunks that end within
    items, with the prefix cache, and with preemptions."""
    inputs = [twin.inputs(content) for content in CONTENTS]
    expected = [generate_reference(twin.model, item, COUNT) for item in inputs]
    llm = open_llm(twin.path, max_num_batched_tokens=24, max_logprobs=-1)
    outputs = check_answers(llm, [twin.request(content) for content in CONTENTS], expected, at=(1, 3, 6))
    for item, output in zip(inputs, outputs, strict=True):
        assert output.prompt_token_ids == item["input_ids"][0].tolist()


def test_settings_of_the_audio_encoder_are_checked(twin: Twin) -> None:
    for wrong, message in (
        ({"attention_chunk_size": 9}, "attention_chunk_size is 9, expected 4"),
        ({"attention_context_right": 2}, "attention_context_right is 2, expected 0"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu', expected silu"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_checkpoint(twin.path, {"audio_config": wrong})
