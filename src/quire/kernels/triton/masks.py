"""Masks on a GPU: what a grammar does not allow is out of the question."""

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import launch

_TILE = tl.constexpr(4096)


@triton.jit(do_not_specialize=["width"])
def _remove(
    logits: tl.tensor, packed: tl.tensor, vocab: tl.tensor, stride: tl.tensor, width: tl.tensor
) -> None:
    """Grid (masks, tiles). Nothing is read but bits, and nothing written but what is not allowed."""
    packed += tl.program_id(0).to(tl.int64) * width
    place = tl.load(packed).to(tl.int64)
    ids = tl.program_id(1) * _TILE + tl.arange(0, _TILE)
    words = tl.load(packed + 1 + ids // 32, mask=ids // 32 < width - 1, other=0)
    allowed = (words >> (ids % 32)) & 1
    tl.store(logits + place * stride + ids, float("-inf"), mask=(ids < vocab) & (allowed == 0))


def apply_masks(logits: Tensor, packed: Tensor) -> None:
    """As `sampling.constrain.apply_masks`."""
    vocab, tiles = logits.shape[1], triton.cdiv(logits.shape[1], _TILE.value)
    if len(packed):
        launch(_remove, len(packed), tiles)(
            logits, packed, vocab, logits.stride(0), packed.shape[1], num_warps=8
        )
