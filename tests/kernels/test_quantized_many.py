"""Packed weights with many rows, which tasks take several groups of: values, and bits that stay the same."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels import native
from quire.kernels.linear import Product
from quire.kernels.quantized import TYPES, interleaves, pack, product_reference

pytestmark = pytest.mark.skipif(
    native.library() is None or not interleaves(), reason="this CPU multiplies no interleaved weights"
)
ROWS, COLUMNS = 1101, 1024
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q8_0": (0,),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q2_K": (80, 82),
    "Q6_K": (208,),
}
"""Where the float16 numbers of a block lie: one type of each form."""


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored(kind: str, rows: int, seed: int) -> Tensor:
    """Random bytes, with scales of a sensible size."""
    form, rng = TYPES[kind], np.random.default_rng(seed)
    blocks = COLUMNS // form.stored_columns
    content = rng.integers(0, 256, (rows, blocks, form.stored_bytes), dtype=np.uint8)
    for at in SCALES[kind]:
        scales = (rng.standard_normal((rows, blocks, 1)) * 0.05).astype(np.float16)
        content[:, :, at : at + 2] = scales.view(np.uint8)
    return torch.from_numpy(content.reshape(rows, -1))


def relative_error(ours: Tensor, expected: Tensor) -> float:
    return float((ours.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("kind", SCALES)
def test_matches_float64_and_has_the_same_bits_alone(kind: str) -> None:
    """Groups of a task that change places, the last one too wide; sums left from the group before."""
    file, x = stored(kind, ROWS, 6), random(143, COLUMNS, seed=7)
    product = Product([pack(file, kind, interleaved=True)], random(ROWS, seed=8))
    with threads(1):
        together = product(x)
    assert relative_error(together, product_reference(x, [(file, kind)], random(ROWS, seed=8))) < 2e-4
    for number in (1, 2, 3):
        with threads(number):
            for start, end in ((0, 143), (0, 1), (142, 143), (120, 124), (90, 103), (5, 45)):
                assert torch.equal(product(x[start:end]), together[start:end])


@pytest.mark.parametrize("kind", SCALES)
def test_a_row_of_the_weight_gives_the_same_bits_in_any_task(kind: str) -> None:
    """Results that depend on how many groups a task has."""
    file, x = stored(kind, ROWS, 9), random(37, COLUMNS, seed=10)
    whole = Product([pack(file, kind, interleaved=True)])(x)
    for start, end in ((0, 8), (8, 72), (512, 1101)):
        assert torch.equal(Product([pack(file[start:end], kind, interleaved=True)])(x), whole[:, start:end])


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e30])
def test_tiny_and_huge_rows_are_rounded_as_well_as_others(scale: float) -> None:
    """A scale of x that is lost, or a code that leaves its 14 bits where the largest number is rounded up."""
    file, x = stored("Q4_1", 64, 11), random(9, COLUMNS, seed=12)
    product = Product([pack(file, "Q4_1", interleaved=True)])
    expected = product_reference(x, [(file, "Q4_1")])
    assert relative_error(product(x * scale) / scale, expected) < 2e-4
    spikes = torch.full((4, COLUMNS), 8159.0) * torch.tensor([1.0, 0.1, 1 / 3, 0.7])[:, None]
    assert relative_error(product(spikes), product_reference(spikes, [(file, "Q4_1")])) < 1e-5
