"""Tests of grammar masks in C against the numpy reference."""

import pytest
import torch

from quire.kernels.cpu import native
from quire.kernels.cpu.masks import apply_masks
from quire.sampling.constrain import apply_masks as reference

pytestmark = pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("vocab", "words"), [(3, 1), (32, 1), (4097, 129), (9001, 3), (100, 9), (8192, 256), (8191, 0)]
)
def test_tokens_outside_the_mask_are_minus_infinity(vocab: int, words: int, dtype: torch.dtype) -> None:
    """Check masks shorter and longer than the vocabulary, for some rows in any order."""
    logits = torch.randn(7, vocab + 5).to(dtype)[:, :vocab]
    packed = torch.randint(-(2**31), 2**31, (4, 1 + words), dtype=torch.int64).int()
    packed[1, 1 : words // 2] = -1
    packed[2, words // 3 :] = 0
    packed[:, 0] = torch.tensor([6, 0, 3, 5])
    logits[6, ::3] = torch.nan
    expected, bits = logits.clone(), torch.int32 if dtype == torch.float32 else torch.int16
    reference(expected, packed)
    before = torch.get_num_threads()
    for threads in (1, 3):
        actual = logits.clone()
        torch.set_num_threads(threads)
        apply_masks(actual, packed)
        torch.set_num_threads(before)
        assert torch.equal(actual.view(bits), expected.view(bits))
        assert torch.equal(actual[[1, 2, 4]], logits[[1, 2, 4]])
    apply_masks(actual, packed[:0])
    assert torch.equal(actual.view(bits), expected.view(bits))
