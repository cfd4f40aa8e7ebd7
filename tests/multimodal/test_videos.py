"""Tests of videos of MiniCPM-V and Kimi-K2.5 against transformers: frames, placeholders, embeddings,
answers."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_qwen
import torch
from finished import finished, patches
from numpy.typing import NDArray
from PIL import Image
from seeing import Twin, picture
from seeing_minicpm import MiniCPMStand, OlderMiniCPMStand
from seeing_more import KimiStand
from tiny_engine import open_llm

from quire import SamplingParams
from quire.checkpoint.model import read_checkpoint
from quire.errors import RequestError
from quire.multimodal.placeholders import place
from quire.multimodal.processing import PreparedItem
from quire.multimodal.processors import PROCESSORS, Video
from quire.text.tokenizer import load_tokenizer

COUNT, FPS = 5, 2.0
PARAMS = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
MARKS = {
    "minicpm_v26": "(<video>./</video>)",
    "minicpm_v45": "(<video>./</video>)",
    "minicpm_v46": "<|video_pad|>",
    "kimi_k25": "<|kimi_k25_video_placeholder|>",
}


def film(count: int, width: int, height: int) -> Video:
    """Return every third frame of a longer video."""
    frames = np.stack([np.asarray(picture(width, height, seed)) for seed in range(count)])
    return Video(frames, FPS, 3 * count, tuple(range(0, 3 * count, 3)), 3 * FPS)


class VideoReference:
    """Results of transformers, or of a plain published model, for a prompt with one video."""

    def __init__(self, path: Path, family: str) -> None:
        self.twin, self.mark = Twin(path, family), MARKS[family]
        self.stand = self.twin.processor

    def expected(self, text: str, video: Video) -> tuple[list[int], dict[str, Any]]:
        """Return the tokens and the other inputs of the model."""
        images = [Image.fromarray(frame) for frame in video.frames]
        before, after = text.split(self.mark)
        make = {OlderMiniCPMStand: self._older, MiniCPMStand: self._newer, KimiStand: self._kimi}
        span, more = make[type(self.stand)](images, video)
        return self.stand.tokenizer(before + span + after)["input_ids"], more

    def _older(self, images: list[Image.Image], video: Video) -> tuple[str, dict[str, Any]]:
        pixels = [torch.from_numpy(self.stand.pixels(frame_part)["pixels"].copy()) for frame_part in images]
        return f"<image>{'<unk>' * 4}</image>" * len(images), {"squares": pixels}

    def _newer(self, images: list[Image.Image], video: Video) -> tuple[str, dict[str, Any]]:
        from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor

        made = self.stand.images(images, return_tensors="pt", max_slice_nums=1)
        processor = SimpleNamespace(
            image_start_token="<image>",
            image_end_token="</image>",
            video_token="<|video_pad|>",
            video_slice_mode=True,
        )
        settings = {
            "target_sizes_videos": made["target_sizes"],
            "num_frames_per_video": [len(images)],
            "grids_videos": np.zeros((len(images), 2), int),
        }
        text = MiniCPMV4_6Processor.replace_video_token(processor, settings, 0, video_token_divisor=16)
        more = {
            "pixel_values_videos": made["pixel_values"],
            "target_sizes_videos": made["target_sizes"],
        }
        return f"<image_id>0</image_id>{text}", more

    def _kimi(self, images: list[Image.Image], video: Video) -> tuple[str, dict[str, Any]]:
        from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor
        from transformers.video_utils import VideoMetadata

        pixels = [torch.from_numpy(self.stand.pixels(frame_part)["pixels"]) for frame_part in images]
        rows, columns = pixels[0].shape[1] // 7, pixels[0].shape[2] // 7
        flat = [
            frame_part.view(3, rows, 7, columns, 7).permute(1, 3, 0, 2, 4).flatten(0, 1)
            for frame_part in pixels
        ]
        counts = [min(4, len(images) - at) for at in range(0, len(images), 4)]
        grids = torch.tensor([(count, rows, columns) for count in counts])
        processor = SimpleNamespace(
            video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=4),
            video_token="<|media_pad|>",
        )
        facts = VideoMetadata(
            total_num_frames=video.total_frames, fps=video.source_fps, frames_indices=list(video.indices)
        )
        settings = {"num_chunks_per_video": [len(counts)], "video_grid_thw": grids, "video_metadata": [facts]}
        text = Kimi_K25Processor.replace_video_token(processor, settings, 0)
        return text, {"pixel_values_videos": torch.cat(flat), "video_grid_thw": grids}

    @torch.inference_mode()
    def generate_reference(self, token_ids: list[int], more: dict[str, Any]) -> list[int]:
        ids = torch.tensor([token_ids])
        model_inputs: dict[str, Any] = {"input_ids": ids, **more}
        if isinstance(self.stand, KimiStand):
            embeds = self.twin.model.get_input_embeddings()(ids)
            embeds[ids == self.twin.ours.image_id] = self.vectors(more)
            model_inputs = {"input_ids": ids, "inputs_embeds": embeds}
        out = self.twin.model.generate(
            **model_inputs,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=COUNT,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        generated: list[int] = out.sequences[0, ids.shape[1] :].tolist()
        return generated

    @torch.inference_mode()
    def vectors(self, more: dict[str, Any]) -> torch.Tensor:
        if isinstance(self.stand, OlderMiniCPMStand):
            return self.stand.features(self.twin.model, more)
        inner = self.twin.model.model
        if isinstance(self.stand, MiniCPMStand):
            result = inner.get_video_features(**more).pooler_output
            return torch.cat([frame_part.reshape(-1, frame_part.shape[-1]) for frame_part in result])
        # transformers counts the vectors of a clip by all of its patches: its parts are called one by one
        grids = more["video_grid_thw"]
        parts = more["pixel_values_videos"].split(grids.prod(1).tolist())
        made = [
            inner.mm_projector(inner.vision_tower(frame_part, grid[None]).pooler_output)
            for frame_part, grid in zip(parts, grids, strict=True)
        ]
        return torch.cat([frame_part.reshape(-1, frame_part.shape[-1]) for frame_part in made])


@pytest.fixture(scope="module", params=MARKS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VideoReference:
    return VideoReference(tmp_path_factory.mktemp(request.param), request.param)


@torch.inference_mode()
def test_video_placeholders_and_embeddings_equal_transformers(reference: VideoReference) -> None:
    """Covers frames of several sizes, incomplete clips, a clip of a single frame, and an image before the
    video."""
    twin, tower = reference.twin, reference.twin.tower()
    for count, width, height in ((6, 56, 50), (5, 40, 30), (1, 28, 28)):
        video = film(count, width, height)
        actual = twin.ours.process("video", video, {})
        text = f"user\n{reference.mark} what"
        expected, more = reference.expected(text, video)
        spelled = twin.tokenizer.encode(twin.ours.rewrite_text(text))
        assert place(spelled, [PreparedItem("video", b"v", actual)], twin.ours)[0] == expected
        (vectors,) = tower.encode("video", [finished(actual.arrays)])
        torch.testing.assert_close(vectors, reference.vectors(more), atol=1e-4, rtol=1e-4)
        assert len(vectors) == sum(n for _, n in actual.runs) == twin.ours.num_vectors(video, {})
    shapes = {name: tuple(item.shape) for name, item in finished(actual.arrays).items()}
    assert tower.cost("video", shapes) > 0
    (blank,) = tower.encode("video", [tower.blank("video", 100)])
    assert len(blank) == pytest.approx(100, rel=0.05)
    largest = Video.black(*twin.ours.largest("video"))
    assert twin.ours.max_vectors("video") >= twin.ours.num_vectors(largest, {})


def test_answers_about_videos_equal_transformers(reference: VideoReference) -> None:
    """Covers a video alone, and a video after an image, which has its own placeholder and number."""
    video, text = film(8, 40, 30), f"user\n{reference.mark} what"
    expected, more = reference.expected(text, video)
    message = reference.generate_reference(expected, more)
    llm = open_llm(reference.twin.path, max_num_seqs=4, max_num_batched_tokens=256)
    facts = {"fps": video.source_fps, "total_num_frames": 24, "frames_indices": list(video.indices)}
    data = {"video": (video.frames, facts)}
    (output,) = llm.generate([{"prompt": text, "multi_modal_data": data}], PARAMS, use_tqdm=False)
    assert (output.prompt_token_ids, output.outputs[0].token_ids) == (expected, message)
    image = picture(28, 28)
    both = {"prompt": reference.twin.mark + text, "multi_modal_data": {**data, "image": image}}
    (output,) = llm.generate([both], PARAMS, use_tqdm=False)
    alone = reference.twin.inputs(reference.twin.mark, [image])["input_ids"][0].tolist()
    assert output.prompt_token_ids == alone + expected


def test_slices_of_frames_follow_them(tmp_path: Path) -> None:
    """The slices of a frame equal those of an image of the same size, and follow the frame."""
    twin = Twin(tmp_path, "minicpm_v46")
    video, arguments = film(2, 120, 90), {"max_slice_nums": 4}
    actual = twin.ours.process("video", video, arguments)
    images = [twin.ours.process("image", Image.fromarray(frame), arguments) for frame in video.frames]
    tower = twin.tower()
    (vectors,) = tower.encode("video", [finished(actual.arrays)])
    embeddings = tower.encode("image", [finished(image.arrays) for image in images])
    torch.testing.assert_close(vectors, torch.cat(embeddings), atol=1e-5, rtol=1e-5)
    spans = [id for image in images for id in image.token_ids]
    video_id = twin.media.tower.video_id
    assert actual.token_ids == [video_id if id == twin.ours.image_id else id for id in spans]
    assert (
        twin.ours.num_vectors(video, arguments)
        == len(vectors)
        > len(twin.tower().encode("video", [finished(twin.ours.process("video", video, {}).arrays)])[0])
    )
    with pytest.raises(RequestError, match="769 frames"):
        twin.ours.num_vectors(Video.black(769, 8, 8), {})


# ---- frames, against processors that need torchvision


def check_similar(actual: NDArray[Any], expected: NDArray[Any]) -> None:
    """Compare pixels. A few may differ by one level of brightness, since the filters of Pillow and
    torchvision round differently. Very narrow frames differ more and are not compared."""
    away = np.abs(actual.reshape(-1) - expected.reshape(-1))
    assert np.mean(away > 1e-5) < 0.02 and away.max() < 1.01 / 255 / 0.26


def frames_of(flat: NDArray[Any], shape: tuple[int, int], patch: int) -> NDArray[Any]:
    """[frames * patches, 3, patch, patch] -> [frames, 3, height, width]"""
    rows, columns = shape[0] // patch, shape[1] // patch
    grid = flat.reshape(-1, rows, columns, 3, patch, patch).transpose(0, 3, 1, 4, 2, 5)
    return grid.reshape(-1, 3, *shape)


def test_kimi_frames_equal_its_processor(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    from transformers import Kimi_K25VideoProcessor

    twin = Twin(tmp_path, "kimi_k25")
    settings = {"max_patches": 64, "size": {"max_height": 16, "max_width": 16}, "patch_size": 7}
    reference_processor = Kimi_K25VideoProcessor(
        **settings, image_mean=[0.5, 0.4, 0.3], image_std=[0.5, 0.6, 0.7]
    )
    for width, height in ((40, 30), (90, 61)):
        video = film(6, width, height)
        pixels = finished(twin.ours.process("video", video, {}).arrays)["pixels"].numpy()
        made = reference_processor(
            [video.frames.transpose(0, 3, 1, 2)], do_sample_frames=False, return_tensors="np"
        )
        check_similar(pixels, frames_of(made["pixel_values_videos"], pixels.shape[-2:], 7))


@pytest.mark.parametrize(("family", "slices"), [("minicpm_v46", 1), ("minicpm_v46", 4)])
def test_minicpm_frames_equal_its_processor(family: str, slices: int, tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    from transformers import MiniCPMV4_6VideoProcessor

    twin = Twin(tmp_path, family)
    settings = {**MiniCPMStand.settings, "max_slice_nums": slices}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(settings))
    twin.reread()
    reference_processor = MiniCPMV4_6VideoProcessor(**settings)
    for width, height in ((40, 30), (120, 90)):
        video = film(3, width, height)
        seen = finished(twin.ours.process("video", video, {}).arrays)
        made = reference_processor(
            [video.frames.transpose(0, 3, 1, 2)], do_sample_frames=False, return_tensors="np"
        )
        parts = [seen["pixels"][:, None], *([seen["slices"]] if "slices" in seen else [])]
        squares = [item for frame in zip(*parts, strict=True) for part in frame for item in part]
        done = 0
        for square, (rows, columns) in zip(squares, made["target_sizes_videos"], strict=True):
            flat = made["pixel_values_videos"][0, :, :, done : done + rows * columns * 7]
            done += rows * columns * 7
            whole = flat.reshape(3, 7, rows, columns, 7).transpose(0, 2, 1, 3, 4)
            check_similar(square.numpy(), whole)
        assert ("slices" in seen) == (slices > 1 and width > 100)


@pytest.mark.parametrize("family", ["llava_onevision", "internvl"])
def test_square_frames_equal_their_processors(family: str, tmp_path: Path) -> None:
    """The settings come from the video processor's file, not from that of images."""
    pytest.importorskip("torchvision")
    import transformers as hf

    settings = {"size": {"height": 28, "width": 28}, "image_mean": [0.5, 0.4, 0.3]}
    kind = {"llava_onevision": hf.LlavaOnevisionVideoProcessor, "internvl": hf.InternVLVideoProcessor}
    reference_processor = kind[family](**settings)
    twin = Twin(tmp_path, family)
    reference_processor.save_pretrained(tmp_path)
    twin.reread()
    video = film(3, 90, 61)
    pixels = finished(twin.ours.process("video", video, {}).arrays)["pixels"].numpy()
    made = reference_processor(
        [video.frames.transpose(0, 3, 1, 2)], do_sample_frames=False, return_tensors="np"
    )
    check_similar(pixels, made["pixel_values_videos"][0])


@pytest.mark.parametrize("family", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Glm4v", "Glm46V"])
def test_patch_frames_equal_their_processors(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("torchvision")
    import transformers as hf

    path, _ = tiny_qwen.made(family, tmp_path_factory.getbasetemp())
    facts = read_checkpoint(path).facts.media
    assert facts is not None
    processor = PROCESSORS[facts.family](path, facts, load_tokenizer(path, "hf"))
    name = "Qwen2VL" if family == "Qwen2_5_VL" else family
    reference_processor = getattr(hf, f"{name}VideoProcessor").from_pretrained(path)
    for count, width, height in ((4, 24, 16), (5, 90, 61), (6, 40, 120)):
        video = film(count, width, height)
        made = reference_processor(
            [video.frames.transpose(0, 3, 1, 2)], do_sample_frames=False, return_tensors="np"
        )
        result = processor.process("video", video, {"do_sample_frames": False})
        assert result.facts["grid"] == made["video_grid_thw"][0].tolist()
        check_similar(patches(result.arrays).numpy(), made["pixel_values_videos"])
