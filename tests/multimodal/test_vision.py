"""Tests of vision families against transformers: pixels, placeholders, embeddings."""

import numpy as np
import pytest
import torch
from finished import finished
from seeing import FAMILIES, Twin, close, picture, sizes
from tiny_seeing import Stand

from quire.checkpoint.weights import count_parameters
from quire.errors import RequestError

PAIRS = [(40, 20), (28, 28), (90, 61)]


@pytest.fixture(scope="module", params=FAMILIES)
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return Twin(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("count", [20, pytest.param(50, marks=pytest.mark.slow)])
def test_pixels_equal_transformers(twin: Twin, count: int) -> None:
    """Covers images of many sizes. Catches a wrong filter, rounding or crop."""
    if isinstance(twin.processor, Stand) and not twin.processor.pixels(picture(5, 5)):
        pytest.skip("transformers resizes these with torchvision alone")
    if twin.media.family == "lighton_ocr":
        with pytest.raises(RequestError, match="7 x 40 pixels is resized .* and 14 x 14 are the minimum"):
            twin.ours.process("image", picture(7, 40), {})
    for width, height in sizes(count, least=twin.least):
        image = picture(width, height)
        actual = twin.ours.process("image", image, {})
        result = finished(actual.arrays)
        if isinstance(twin.processor, Stand):
            expected = twin.processor.pixels(image)
            assert expected.keys() == result.keys()
            for name, item in expected.items():
                close(result[name].numpy().reshape(item.shape), item)
            continue
        pixels = result["pixels"].numpy()
        reference = twin.inputs(twin.mark, [image])["pixel_values"]
        close(pixels.reshape(-1, *pixels.shape[-3:]), np.asarray(reference).reshape(-1, *pixels.shape[-3:]))


def test_placeholders_equal_transformers(twin: Twin) -> None:
    """Covers placeholders at both ends of a prompt, next to each other, and next to tokens with which spans
    begin and end."""
    images = [picture(*size) for size in PAIRS]
    mark = twin.mark
    for text in (f"{mark}ab\n{mark}\n\ncd {mark}", f"user\n{mark}{mark}x{mark}\n"):
        expected = twin.inputs(text, images)["input_ids"][0].tolist()
        assert twin.token_ids(text, images) == expected


@torch.no_grad()
def test_image_embeddings_equal_transformers(twin: Twin) -> None:
    """Catches a missing layer or norm, and items that are mixed up in a batch."""
    images = [picture(*size) for size in PAIRS]
    inputs = twin.inputs(twin.mark * len(images), images)
    ids = inputs.pop("input_ids")
    for name in ("attention_mask", "token_type_ids"):
        inputs.pop(name, None)
    expected = twin.features(inputs)
    items = [twin.ours.process("image", image, {}) for image in images]
    arrays = [finished(item.arrays) for item in items if item.arrays is not None]
    tower = twin.tower()
    vectors = tower.encode("image", arrays)
    torch.testing.assert_close(torch.cat(vectors), expected, atol=1e-4, rtol=1e-4)
    assert int(torch.isin(ids, torch.tensor([*twin.image_ids])).sum()) == len(expected)
    for item, vector in zip(items, vectors, strict=True):
        assert len(vector) == sum(count for _, count in item.runs or [(0, len(item.token_ids))])
    costs = [
        tower.cost("image", {name: tuple(entry.shape) for name, entry in item.items()}) for item in arrays
    ]
    assert all(cost > 0 for cost in costs)
    numbers = sum(parameter.numel() for parameter in tower.parameters())
    assert count_parameters(twin.checkpoint.facts).tower == pytest.approx(numbers, rel=0.06)
    (blank,) = tower.encode("image", [tower.blank("image", twin.ours.max_vectors("image"))])
    assert len(blank) == pytest.approx(twin.ours.max_vectors("image"), rel=0.03)
