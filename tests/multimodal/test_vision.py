"""Families that see, against transformers: pixels, spans, vectors."""

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


def test_pixels_are_those_of_transformers(twin: Twin) -> None:
    """Images of 50 sizes: another filter, another rounding, another crop."""
    if isinstance(twin.processor, Stand) and not twin.processor.pixels(picture(5, 5)):
        pytest.skip("transformers resizes these with torchvision alone")
    if twin.least > 5:
        with pytest.raises(RequestError, match="7 x 40 pixels is resized .* and 14 x 14 are the minimum"):
            twin.ours.process("image", picture(7, 40), {})
    for width, height in sizes(least=twin.least):
        image = picture(width, height)
        ours = twin.ours.process("image", image, {})
        found = finished(ours.arrays)
        if isinstance(twin.processor, Stand):
            expected = twin.processor.pixels(image)
            assert expected.keys() == found.keys()
            for name, each in expected.items():
                close(found[name].numpy().reshape(each.shape), each)
            continue
        pixels = found["pixels"].numpy()
        theirs = twin.inputs(twin.mark, [image])["pixel_values"]
        close(pixels.reshape(-1, *pixels.shape[-3:]), np.asarray(theirs).reshape(-1, *pixels.shape[-3:]))


def test_spans_are_those_of_transformers(twin: Twin) -> None:
    """Marks at both ends, next to each other, and beside what their spans begin and end with."""
    images = [picture(*size) for size in PAIRS]
    mark = twin.mark
    for text in (f"{mark}ab\n{mark}\n\ncd {mark}", f"user\n{mark}{mark}x{mark}\n"):
        theirs = twin.inputs(text, images)["input_ids"][0].tolist()
        assert twin.token_ids(text, images) == theirs


@torch.no_grad()
def test_vectors_are_those_of_transformers(twin: Twin) -> None:
    """A layer left out, a norm forgotten, items mixed up in a batch."""
    images = [picture(*size) for size in PAIRS]
    inputs = twin.inputs(twin.mark * len(images), images)
    ids = inputs.pop("input_ids")
    for name in ("attention_mask", "token_type_ids"):
        inputs.pop(name, None)
    theirs = twin.features(inputs)
    items = [twin.ours.process("image", image, {}) for image in images]
    arrays = [finished(item.arrays) for item in items if item.arrays is not None]
    tower = twin.tower()
    vectors = tower.encode("image", arrays)
    torch.testing.assert_close(torch.cat(vectors), theirs, atol=1e-4, rtol=1e-4)
    assert int(torch.isin(ids, torch.tensor([*twin.image_ids])).sum()) == len(theirs)
    for item, each in zip(items, vectors, strict=True):
        assert len(each) == sum(count for _, count in item.runs or [(0, len(item.token_ids))])
    costs = [tower.cost("image", {name: tuple(each.shape) for name, each in item.items()}) for item in arrays]
    assert all(cost > 0 for cost in costs)
    numbers = sum(each.numel() for each in tower.parameters())
    assert count_parameters(twin.checkpoint.facts).tower == pytest.approx(numbers, rel=0.06)
    (blank,) = tower.encode("image", [tower.blank("image", twin.ours.most_vectors("image"))])
    assert len(blank) == pytest.approx(twin.ours.most_vectors("image"), rel=0.03)
