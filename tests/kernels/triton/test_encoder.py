"""Attention in both directions: the tiles of a GPU against one sequence after the other."""

import numpy as np
import pytest
import torch

from quire.kernels.encoder import Spans, attend, tiles_of
from quire.kernels.triton import encoder

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, *([torch.float16, torch.bfloat16] if CUDA else [])])
@pytest.mark.parametrize(("heads", "dim"), [(2, 16), (3, 24), (1, 64)])
@pytest.mark.parametrize("window", [None, 5, 64])
def test_ragged_sequences(heads: int, dim: int, window: int | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    lens = np.array([1, 130, 7, 64, 65], np.int32)
    qkv = torch.randn(int(lens.sum()), 3, heads, dim, device=DEVICE).to(dtype)
    spans = Spans(lens.tolist(), torch.from_numpy(tiles_of(lens)).to(DEVICE))
    ours = encoder.attend(*qkv.unbind(1), spans, window)
    theirs = attend(*qkv.unbind(1), spans, window)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
