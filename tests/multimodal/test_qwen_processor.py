"""Tests of the inputs of Qwen's and GLM's vision encoders, against the processors of transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from finished import patches
from PIL import Image
from tiny_qwen import BEGIN, END, IMAGE, VIDEO, made

from quire.checkpoint.model import read_checkpoint
from quire.data.multimodal import MediaItem
from quire.errors import RequestError
from quire.multimodal.processors import PROCESSORS, ProcessedItem, Processor, Video
from quire.text.tokenizer import load_tokenizer

CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
CASES = {
    "Qwen2VL": {"min_pixels": 3136, "max_pixels": 40000, "patch_size": 14, **CLIP},
    "Qwen3VL": {"size": {"shortest_edge": 4096, "longest_edge": 50000}, "patch_size": 16, **HALF},
    "Glm4v": {"size": {"shortest_edge": 12544, "longest_edge": 90000}, "patch_size": 14, **CLIP},
}


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


def processor_of(family: str, base: Path, settings: Path | None = None) -> Processor:
    path, _ = made(family, base)
    media = read_checkpoint(path).facts.media
    assert media is not None
    processor: Processor = PROCESSORS[media.family](settings or path, media, load_tokenizer(path, "hf"))
    return processor


def pixels_of(processed: ProcessedItem) -> Any:
    return patches(processed.arrays).numpy()


@pytest.mark.parametrize("family", CASES)
def test_pixels_and_grid_equal_transformers(family: str, base: Path, tmp_path: Path) -> None:
    """Covers images of 50 sizes: with too few pixels, with too many, long and narrow, smaller than a
    patch."""
    import transformers

    (tmp_path / "preprocessor_config.json").write_text(json.dumps(CASES[family]))
    kind = "Glm4vImageProcessorPil" if family == "Glm4v" else "Qwen2VLImageProcessorPil"
    reference = getattr(transformers, kind).from_pretrained(tmp_path)
    actual = processor_of(family, base, tmp_path)
    draw = np.random.default_rng(5)
    sizes = [(1, 1), (1, 200), (9, 1400), (300, 300), *draw.integers(8, 400, (46, 2)).tolist()]
    for width, height in sizes:
        image = Image.fromarray(draw.integers(0, 256, (height, width, 3), np.uint8))
        expected = reference(image, return_tensors="np")
        got = actual.process("image", image, {})
        pixels = pixels_of(got)
        assert list(pixels.shape[:3]) == got.facts["grid"] == expected["image_grid_thw"][0].tolist()
        assert len(got.token_ids) == np.prod(pixels.shape[:3]) // 4 <= actual.max_vectors("image")
        np.testing.assert_allclose(
            pixels.reshape(expected["pixel_values"].shape), expected["pixel_values"], atol=1e-5
        )
    assert len(
        actual.process("image", Image.new("RGB", actual.largest("image")), {}).token_ids
    ) <= actual.max_vectors("image")


def test_request_arguments_are_checked(base: Path) -> None:
    processor, image = processor_of("Qwen2VL", base), Image.new("RGB", (64, 48))
    assert processor.process("image", image, {}).facts["grid"] == [1, 12, 16]
    assert processor.process("image", image, {"max_pixels": 1024}).facts["grid"] == [1, 6, 8]
    size = {"shortest_edge": 256, "longest_edge": 1024}
    assert processor.process("image", image, {"size": size}).facts["grid"] == [1, 6, 8]
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"max_pixels": -1}, "positive integer"),
        ({"max_pixel": 9}, "did you mean 'max_pixels'"),
        ({"size": {"height": 3}}, "longest_edge"),
        ({"min_pixels": 4096, "max_pixels": 2048}, "more than max_pixels"),
        ({"max_pixels": 4097}, "4096 at most"),
        ({"fps": "a"}, "positive number"),
        ({"fps": 1e9}, "1000 at most"),
        ({"num_frames": 10**400}, "positive integer"),
    ]
    for wrong, message in wrongs:
        with pytest.raises(RequestError, match=message):
            processor.process("image", image, wrong)
    with pytest.raises(RequestError, match="too narrow"):
        processor.process("image", Image.new("RGB", (2010, 10)), {})


def test_user_embeddings_are_checked(base: Path) -> None:
    processor, grid = processor_of("Qwen3VL", base), np.array([[1, 4, 6]])
    vectors = np.zeros((6, 96), np.float32)
    got = processor.process_embeds("image", {"embeds": vectors, "image_grid_thw": grid})
    assert (
        got.token_ids == [IMAGE] * 6
        and set(got.arrays or ()) == {"embeds"}
        and got.facts["grid"] == [1, 4, 6]
    )
    wrongs: list[Any] = [
        {"embeds": vectors},
        {"embeds": vectors[:5], "image_grid_thw": grid},
        {"embeds": vectors[:, :32], "image_grid_thw": grid},
        {"embeds": vectors, "image_grid_thw": [1, 3, 6]},
        {"embeds": vectors, "image_grid_thw": [np.nan, 4, 6]},
        {"embeds": vectors, "image_grid_thw": [np.inf, 4, 6]},
    ]
    for wrong in wrongs:
        with pytest.raises(RequestError, match="image_"):
            processor.process_embeds("image", wrong)


def test_video_frames_are_paired(base: Path) -> None:
    """The layout of frames is that of transformers, whose processor needs torchvision; an odd last frame is
    repeated."""
    frames = np.random.default_rng(1).integers(0, 256, (5, 16, 24, 3), np.uint8)
    got = processor_of("Qwen2VL", base).process("video", Video(frames), {})
    assert got.facts["grid"] == [3, 4, 6] and got.token_ids == [VIDEO] * 18
    video = torch.from_numpy(frames[[0, 1, 2, 3, 4, 4]]).permute(0, 3, 1, 2)[None] / 255
    mean, std = (torch.tensor(CLIP[key])[:, None, None] for key in ("image_mean", "image_std"))
    patches = ((video - mean) / std).view(1, 3, 2, 3, 2, 2, 4, 3, 2, 4)
    expected = patches.permute(0, 1, 4, 7, 5, 8, 3, 2, 6, 9).reshape(3, 4, 6, 96)
    np.testing.assert_allclose(pixels_of(got), expected.numpy(), atol=1e-5)


def test_frame_limit_counts_sampled_frames(base: Path) -> None:
    film = Video(np.zeros((2000, 8, 8, 3), np.uint8), indices=tuple(range(2000)))
    processor = processor_of("Qwen2VL", base)
    with pytest.raises(RequestError, match="2000 frames, and at most 768 are allowed"):
        processor.process("video", film, {})
    assert processor.process("video", film, {"num_frames": 4}).facts["grid"][0] == 2


@pytest.mark.parametrize("family", ["Qwen2VL", "Qwen3VL", "Glm4v", "Glm46V"])
def test_video_vector_count_is_predicted(base: Path, family: str) -> None:
    processor = processor_of(family, base)
    for frames, width, height, arguments in (
        (12, 24, 16, {}),
        (5, 90, 50, {}),
        (9, 64, 64, {"max_pixels": 64 * 16}),
    ):
        made = processor.process("video", Video(np.zeros((frames, height, width, 3), np.uint8)), arguments)
        count = sum(count for _, count in made.runs) or len(made.token_ids)
        assert processor.num_vectors(Video.black(frames, width, height), arguments) == count
    assert processor.num_vectors(Video.black(*processor.largest("video")), {}) <= processor.max_vectors(
        "video"
    )


def test_timestamps_are_between_frames(base: Path) -> None:
    frames = np.zeros((12, 16, 24, 3), np.uint8)
    processor = processor_of("Qwen3VL", base)
    assert processor.marks("video") == [BEGIN, VIDEO, END] and processor.marks("image") == [IMAGE]
    got = processor.process("video", Video(frames, fps=4.0), {})  # 2 per second: 0, 2, 4, 7, 9, 11
    words = load_tokenizer(made("Qwen3VL", base)[0], "hf")
    times = [words.encode(f"<{time} seconds>", add_special_tokens=False) for time in ("0.2", "1.4", "2.5")]
    assert got.token_ids == [token for time in times for token in (*time, BEGIN, *[VIDEO] * 6, END)]
    assert got.runs == [(len(times[0]) + 1 + i * (len(times[0]) + 8), 6) for i in range(3)]
    got = processor_of("Glm4v", base).process("video", Video(frames, fps=4.0), {})  # 8, of 4 seconds
    expected = [(BEGIN, *[IMAGE] * 6, END, *words.encode(time, add_special_tokens=False)) for time in "0122"]
    assert got.token_ids == [token for frame in expected for token in frame]
    got = processor_of("Glm46V", base).process("video", Video(frames, fps=4.0), {})  # all of them
    assert [words.decode(got.token_ids[8 + 19 * i : 19 + 19 * i]) for i in (0, 5)] == [
        "0.0 seconds",
        "2.5 seconds",
    ]
    seen = Video(frames[:3], indices=(0, 40, 80), source_fps=10.0, total_frames=120)
    got = processor.process("video", seen, {})
    assert got.facts["grid"] == [2, 4, 6] and words.decode(got.token_ids[:13]) == "<2.0 seconds>"


def _rope_index(
    model: Any, ids: list[int], items: list[MediaItem], facts: list[Any], steps: list[float]
) -> Any:
    kinds = np.zeros(len(ids), np.int32)
    for item in items:
        for first, count in item.places():
            kinds[first : first + count] = 1 if item.modality == "image" else 2
    grids = {
        modality: torch.tensor(
            [fact["grid"] for item, fact in zip(items, facts, strict=True) if item.modality == modality]
        )
        for modality in ("image", "video")
    }
    return model.model.get_rope_index(
        input_ids=torch.tensor([ids]),
        mm_token_type_ids=torch.from_numpy(kinds)[None],
        image_grid_thw=grids["image"] if len(grids["image"]) else None,
        video_grid_thw=grids["video"] if len(grids["video"]) else None,
        **({"second_per_grid_ts": steps} if hasattr(model.config.vision_config, "tokens_per_second") else {}),
    )


@pytest.mark.parametrize("family", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Glm4v"])
def test_positions_equal_transformers(family: str, base: Path) -> None:
    """Covers random layouts of text, images and videos."""
    model = made(family, base)[1]
    processor, draw = processor_of(family, base), np.random.default_rng(2)
    for _ in range(12):
        ids: list[int] = []
        items: list[MediaItem] = []
        facts: list[Any] = []
        steps: list[float] = []
        for _ in range(draw.integers(1, 5)):
            ids += draw.integers(3, 250, draw.integers(1, 9)).tolist()
            height, width, count = (int(n) for n in draw.integers(8, 40, 3))
            frames = draw.integers(0, 256, (count, height, width, 3), np.uint8)
            modality = "image" if draw.random() < 0.5 else "video"
            fps = float(draw.integers(1, 30))
            content = Image.fromarray(frames[0]) if modality == "image" else Video(frames, fps=fps)
            got = processor.process(modality, content, {})
            items.append(
                MediaItem(
                    modality=modality, key=b"", offset=len(ids), length=len(got.token_ids), runs=got.runs
                )
            )
            facts.append(got.facts)
            steps += [2 / fps] if modality == "video" else []
            ids += got.token_ids
        ids += draw.integers(3, 250, draw.integers(1, 9)).tolist()
        actual = processor.positions(ids, items, facts)
        expected, _ = _rope_index(model, ids, items, facts, steps)
        assert actual is not None
        np.testing.assert_array_equal(actual.numbers(), expected[:, 0].numpy())
    assert processor.positions(ids, [], []) is None
