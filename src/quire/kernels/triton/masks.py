"""Grammar masks on a GPU: the logits of tokens that are not allowed become -inf."""

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import launch

_TILE = tl.constexpr(4096)


@triton.jit(do_not_specialize=["width"])
def _apply_masks(
    logits: tl.tensor, packed: tl.tensor, vocab: tl.tensor, stride: tl.tensor, width: tl.tensor
) -> None:
    """Set the logits of disallowed ids in one tile to -inf, without reading logits. Grid: (masks, tiles)."""
    packed += tl.program_id(0).to(tl.int64) * width
    place = tl.load(packed).to(tl.int64)
    ids = tl.program_id(1) * _TILE + tl.arange(0, _TILE)
    words = tl.load(packed + 1 + ids // 32, mask=ids // 32 < width - 1, other=0)
    allowed = (words >> (ids % 32)) & 1
    tl.store(logits + place * stride + ids, float("-inf"), mask=(ids < vocab) & (allowed == 0))


def apply_masks(logits: Tensor, packed: Tensor) -> None:
    """Set the logits [N, V] of disallowed tokens to -inf in place. A row of `packed` [masks, 1 + words] int32
    is a mask: the index of its row of logits, then one bit per token. The reference is
    `sampling.constrain.apply_masks`."""
    vocab, tiles = logits.shape[1], triton.cdiv(logits.shape[1], _TILE.value)
    if len(packed):
        launch(_apply_masks, len(packed), tiles)(
            logits, packed, vocab, logits.stride(0), packed.shape[1], num_warps=8
        )
