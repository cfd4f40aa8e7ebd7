"""Masks applied in C against the reference in numpy."""

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
def test_what_is_not_in_a_mask_is_gone(vocab: int, words: int, dtype: torch.dtype) -> None:
    """Masks shorter and longer than the vocabulary, of some rows in any order, others left alone."""
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
        found = logits.clone()
        torch.set_num_threads(threads)
        apply_masks(found, packed)
        torch.set_num_threads(before)
        assert torch.equal(found.view(bits), expected.view(bits))
        assert torch.equal(found[[1, 2, 4]], logits[[1, 2, 4]])
    apply_masks(found, packed[:0])
    assert torch.equal(found.view(bits), expected.view(bits))
