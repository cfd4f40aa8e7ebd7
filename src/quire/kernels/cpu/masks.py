"""Token masks of constrained sampling in C (`csrc/masks.c`). The reference is `sampling/constrain.py`."""

import torch
from torch import Tensor

from quire.kernels.cpu.native import TYPES, Kernel

_mask = Kernel("quire_mask", "x packed", "num_masks num_words vocab stride bf16")


def apply_masks(logits: Tensor, packed: Tensor) -> None:
    """Set the logits [N, V] of disallowed tokens to minus infinity, in place. A row of `packed` [masks, 1 +
    words] int32 is a mask: the index of its row of logits, then one bit per token, 1 for allowed tokens."""
    assert logits.dtype in TYPES and logits.stride(1) == 1 and packed.is_contiguous()
    num_words, is_bf16 = packed.shape[1] - 1, logits.dtype == torch.bfloat16
    _mask((logits, packed), len(packed), num_words, logits.shape[1], logits.stride(0), is_bf16)
