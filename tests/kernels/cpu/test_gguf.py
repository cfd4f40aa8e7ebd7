"""Tests of packed weights: dequantization and matmuls against the gguf package, and batch invariance."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packed import HALVES, stored
from torch import Tensor
from torch_threads import torch_threads

from quire.kernels.cpu import native
from quire.kernels.cpu.gguf import TYPES, GGUFRows, interleaves, pack, product_reference, unpack_reference
from quire.kernels.cpu.linear import LinearProduct, Matrix

pytestmark = pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")
KINDS = sorted(TYPES)
LAYOUTS = [False, True] if interleaves() else [False]
ONE_OF_EACH_FORM = (
    *("Q4_0", "Q4_1", "Q8_0", "Q5_1", "Q4_K", "Q2_K", "Q6_K", "MXFP4"),
    *("IQ2_XXS", "IQ3_XXS", "IQ4_XS", "NVFP4"),
)
MANY, COLUMNS = 1101, 1024
"""Rows of a weight of which a task takes several groups."""
needs_interleaving = pytest.mark.skipif(
    not interleaves(), reason="this CPU multiplies no interleaved weights"
)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("interleaved", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_dequantizes_exactly(kind: str, interleaved: bool) -> None:
    """Check for swapped rows, columns, scales or minima, and for double rounding."""
    file = stored(kind, 29, 768, 0)
    ids = torch.tensor([3, 28, 0, 8, 3, 15, 16])
    lookup = GGUFRows(pack(file, kind, interleaved=interleaved))
    expected = unpack_reference(file, kind)[ids]
    assert torch.equal(lookup(ids, torch.float32), expected)
    assert torch.equal(lookup(ids, torch.bfloat16), expected.bfloat16())


@example(
    kinds=["IQ2_XXS"], interleaved=False, num_rows=1, rows=1, supers=1, num_threads=1, with_bias=False, seed=0
)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    interleaved=st.sampled_from(LAYOUTS),
    num_rows=st.integers(1, 150),
    rows=st.integers(1, 60),
    supers=st.integers(1, 9),
    num_threads=st.sampled_from([1, 2, 3]),
    with_bias=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=100, deadline=None)
def test_matches_float64_on_random_shapes(
    kinds: list[str],
    interleaved: bool,
    num_rows: int,
    rows: int,
    supers: int,
    num_threads: int,
    with_bias: bool,
    seed: int,
) -> None:
    columns = supers * max(TYPES[kind].stored_columns for kind in kinds)
    files = [stored(kind, rows + i, columns, seed + i) for i, kind in enumerate(kinds)]
    matrices = [pack(file, kind, interleaved=interleaved) for file, kind in zip(files, kinds, strict=True)]
    bias = random(sum(map(len, files)), seed=seed) if with_bias else None
    x = random(num_rows, columns, seed=seed)
    with torch_threads(num_threads):
        actual = LinearProduct(matrices, bias)(x)
    expected = product_reference(x, list(zip(files, kinds, strict=True)), bias)
    weights = torch.cat([unpack_reference(*part) for part in zip(files, kinds, strict=True)])
    usual = x.norm(dim=1)[:, None] * weights.norm(dim=1) / columns**0.5
    assert ((actual - expected).abs() <= (2e-3 if interleaved else 1e-5) * usual + 1e-6).all()
    if actual.numel() > 1000:
        assert relative_error(actual, expected) < (2e-4 if interleaved else 1e-6)


@pytest.mark.parametrize("interleaved", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_batch_or_threads(kind: str, interleaved: bool) -> None:
    product = LinearProduct([pack(stored(kind, 45, 2304, 1), kind, interleaved=interleaved)])
    x = random(131, 2304, seed=2)
    together = product(x)
    spans = ((0, 1), (130, 131), (3, 5), (62, 65), (60, 64), (10, 15), (50, 57), (40, 51), (20, 36), (7, 90))
    for start, end in spans:
        assert torch.equal(product(x[start:end]), together[start:end])
    for number in (1, 3):
        with torch_threads(number):
            assert torch.equal(product(x), together)
            assert torch.equal(product(x[:1]), together[:1])


@needs_interleaving
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("equal_heads", [2, 3, 4, 12])
def test_shared_scales_change_no_bit(kind: str, equal_heads: int) -> None:
    """Check the offsets of scales and codes: in the kernels of few and of many rows, and in row lookup."""
    columns, head_bytes = 768, TYPES[kind].head_bytes
    content = stored(kind, 45, columns, 3).view(45, columns // 32, -1).clone()
    for start in range(0, columns // 32, equal_heads):
        content[:, start : start + equal_heads, :head_bytes] = content[:, start : start + 1, :head_bytes]
    plain, shared = (pack(content.flatten(1), kind, runs, interleaved=True) for runs in (1, equal_heads))
    library = native.library()
    shares = kind != "Q8_0" and library is not None and library.quire_shares_heads()
    assert shared.head_shift == ({2: 1, 3: 0, 4: 2, 12: 2}[equal_heads] if shares else 0)
    assert (shared.row_bytes < plain.row_bytes) == (shared.head_shift > 0)
    for num_rows in (1, 2, 3, 4, 13, 40):
        x = random(num_rows, columns, seed=num_rows)
        assert torch.equal(LinearProduct([shared])(x), LinearProduct([plain])(x))
    ids = torch.tensor([0, 44, 17])
    assert torch.equal(GGUFRows(shared)(ids, torch.float32), GGUFRows(plain)(ids, torch.float32))


@needs_interleaving
@pytest.mark.parametrize("kind", ONE_OF_EACH_FORM)
def test_small_batches_match_single_rows_bitwise(kind: str) -> None:
    """Check each kernel for few rows: order of summation, skipped rows, writes beyond the last row."""
    product = LinearProduct([pack(stored(kind, 21, 768, 13), kind, interleaved=True)], random(21, seed=14))
    x = random(19, 768, seed=15)
    alone = torch.cat([product(row[None]) for row in x])
    for num_rows in range(2, 20):
        assert torch.equal(product(x[:num_rows]), alone[:num_rows]), num_rows


@pytest.mark.parametrize("kind", KINDS)
def test_packed_and_unpacked_weights_match_bitwise_in_float(kind: str) -> None:
    file = stored(kind, 45, 1280, 1)
    packed = LinearProduct([pack(file, kind, interleaved=False)])
    plain = LinearProduct([Matrix.plain(unpack_reference(file, kind).contiguous())])
    for num_rows in (1, 3, 50):
        x = random(num_rows, 1280, seed=num_rows)
        assert torch.equal(packed(x), plain(x))


@pytest.mark.parametrize("interleaved", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_largest_codes_do_not_overflow(kind: str, interleaved: bool) -> None:
    """Check integer sums with all codes at their limits."""
    form = TYPES[kind]
    for byte in (0xFF, 0x80, 0x7F, 0x00):
        file = torch.full((8, 2, form.stored_bytes), byte, dtype=torch.uint8)
        if kind == "MXFP4":
            file[:, :, 0] = 127
        for at in HALVES.get(kind, (0,)):
            file[:, :, at : at + 2] = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8)
        if kind == "MXFP4":
            file[:, :, 0] = 128
        if kind == "NVFP4":
            file[:, :, :4] = 0x38
        flat = file.flatten(1)
        product = LinearProduct([pack(flat, kind, interleaved=interleaved)])
        for value in (1.0, -1.0, 3e-20):
            x = torch.full((5, 2 * form.stored_columns), value)
            actual, expected = product(x), product_reference(x, [(flat, kind)])
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=abs(value) * 1e-2)


@pytest.mark.parametrize("num_rows", [1, 4, 40])
@pytest.mark.parametrize("interleaved", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_zeros_give_zero_and_nan_stays_in_its_row(kind: str, interleaved: bool, num_rows: int) -> None:
    """Check division by a scale of 0, and that NaN neither spreads nor vanishes."""
    product = LinearProduct([pack(stored(kind, 12, 512, 2), kind, interleaved=interleaved)])
    assert not product(torch.zeros(num_rows, 512)).any()
    for broken in (torch.nan, torch.inf, -torch.inf):
        x = random(num_rows, 512, seed=3)
        x[num_rows // 2, 40] = broken
        out = product(x)
        assert not out[num_rows // 2].isfinite().any()
        assert out.isfinite().all(dim=1).sum() == num_rows - 1


@pytest.mark.parametrize("interleaved", LAYOUTS)
def test_bfloat16_activations_are_widened_exactly(interleaved: bool) -> None:
    product = LinearProduct(
        [pack(stored("Q4_1", 40, 96, 5), "Q4_1", interleaved=interleaved)], torch.ones(40)
    )
    for num_rows in (1, 3, 70):
        x = random(num_rows, 96, seed=4, dtype=torch.bfloat16)
        assert torch.equal(product(x), product(x.float()).bfloat16())


@needs_interleaving
@pytest.mark.parametrize("kind", ONE_OF_EACH_FORM)
def test_many_rows_match_float64_and_single_rows_bitwise(kind: str) -> None:
    """Check for swapped groups of a task, a last group that is too wide, and stale sums."""
    file, x = stored(kind, MANY, COLUMNS, 6), random(143, COLUMNS, seed=7)
    product = LinearProduct([pack(file, kind, interleaved=True)], random(MANY, seed=8))
    with torch_threads(1):
        together = product(x)
    assert relative_error(together, product_reference(x, [(file, kind)], random(MANY, seed=8))) < 2e-4
    for number in (1, 2, 3):
        with torch_threads(number):
            for start, end in ((0, 143), (0, 1), (142, 143), (120, 124), (90, 103), (5, 45)):
                assert torch.equal(product(x[start:end]), together[start:end])


@needs_interleaving
@pytest.mark.parametrize("kind", ONE_OF_EACH_FORM)
def test_weight_row_gives_the_same_bits_in_any_task(kind: str) -> None:
    """Check that results do not depend on the number of groups of a task."""
    file, x = stored(kind, MANY, COLUMNS, 9), random(37, COLUMNS, seed=10)
    full = LinearProduct([pack(file, kind, interleaved=True)])(x)
    for start, end in ((0, 8), (8, 72), (512, 1101)):
        assert torch.equal(
            LinearProduct([pack(file[start:end], kind, interleaved=True)])(x), full[:, start:end]
        )


@needs_interleaving
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e30])
def test_tiny_and_huge_rows_are_rounded_accurately(scale: float) -> None:
    """Check for a lost activation scale, and a code above 14 bits where the largest number is rounded up."""
    file, x = stored("Q4_1", 64, COLUMNS, 11), random(9, COLUMNS, seed=12)
    product = LinearProduct([pack(file, "Q4_1", interleaved=True)])
    expected = product_reference(x, [(file, "Q4_1")])
    assert relative_error(product(x * scale) / scale, expected) < 2e-4
    spikes = torch.full((4, COLUMNS), 8159.0) * torch.tensor([1.0, 0.1, 1 / 3, 0.7])[:, None]
    assert relative_error(product(spikes), product_reference(spikes, [(file, "Q4_1")])) < 1e-5
