"""Rows that follow a grammar: what it does not allow is out of the question."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.data.plan import Masks
from quire.sampling.rows import Ints
from quire.sampling.transfer import to_device


class Confined:
    """The confined rows of a batch, as they were before anything else changed them."""

    def __init__(self, logits: Tensor, masks: Masks, places: Ints) -> None:
        """Takes out of `logits` [N, V], in place, what each row's mask does not have. `places` [max_rows] of
        the rows in this batch, -1 for none."""
        at = places[masks.rows]
        self._index = to_device(at[at >= 0].astype(np.int64), logits.device)
        allowed = _unpacked(masks.bits[at >= 0], logits.shape[1], logits.device)
        self._logits = logits.index_select(0, self._index).masked_fill_(allowed.logical_not_(), -torch.inf)
        logits.index_copy_(0, self._index, self._logits)

    def revive(self, logits: Tensor) -> None:
        """Rows that were left without a token, by what else they ask for, have those of their grammar."""
        now = logits.index_select(0, self._index)
        empty = now.amax(dim=-1, keepdim=True) == -torch.inf
        logits.index_copy_(0, self._index, torch.where(empty, self._logits, now))


def _unpacked(bits: NDArray[np.uint32], vocab: int, device: torch.device) -> Tensor:
    """[rows, vocab] bool. On a GPU the bits travel packed."""
    octets = bits.astype("<u4", copy=False).view(np.uint8)
    if octets.shape[1] * 8 < vocab:
        octets = np.pad(octets, ((0, 0), (0, -(-vocab // 8) - octets.shape[1])))
    if device.type == "cpu":
        return torch.from_numpy(np.unpackbits(octets, axis=1, count=vocab, bitorder="little").view(np.bool_))
    packed = to_device(octets, device)[:, :, None]
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    return (packed >> shifts).bitwise_and_(1).flatten(1)[:, :vocab].bool()
