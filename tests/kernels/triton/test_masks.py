"""Tests of the grammar mask kernel against the reference."""

import pytest
import torch

from quire.kernels.triton.masks import apply_masks
from quire.sampling.constrain import apply_masks as reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("vocab", "words"), [(3, 1), (4097, 129), (9001, 3), (100, 9), (8192, 256)])
def test_tokens_outside_the_mask_are_minus_infinity(vocab: int, words: int, dtype: torch.dtype) -> None:
    """Check masks shorter and longer than the vocabulary, for some rows in any order."""
    logits = torch.randn(7, vocab + 5).to(dtype)[:, :vocab]
    packed = torch.randint(-(2**31), 2**31, (3, 1 + words), dtype=torch.int64).int()
    packed[:, 0] = torch.tensor([6, 0, 3])
    expected, actual = logits.clone(), logits.to(DEVICE)
    reference(expected, packed)
    apply_masks(actual, packed.to(DEVICE))
    assert torch.equal(actual.cpu(), expected)
    assert torch.equal(expected[[1, 2, 4, 5]], logits[[1, 2, 4, 5]])
    for place, *bits in packed.tolist():
        allowed = [t for t in range(vocab) if t // 32 < words and bits[t // 32] >> t % 32 & 1]
        assert torch.nonzero(expected[place] > -torch.inf).flatten().tolist() == allowed
    apply_masks(actual, packed[:0].to(DEVICE))
    assert torch.equal(actual.cpu(), expected)
