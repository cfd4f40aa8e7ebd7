"""Rows that follow a grammar: what it does not allow is out of the question."""

from itertools import cycle

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.data.plan import Masks
from quire.kernels import masks as kernel
from quire.kernels import native
from quire.sampling.rows import Ints
from quire.sampling.transfer import to_device

_NUM_BUFFERS = 3
"""Host buffers: enough that the oldest has been read when its turn comes again, mostly."""


def pack(masks: Masks, places: Ints, into: NDArray[np.int32]) -> None:
    """Masks as the kernels read them: `into` [masks, 1 + words], of each its place in the batch, then its
    bits. `places` [max_rows] of the rows in this batch."""
    into[:, 0] = places[masks.rows]
    if len(masks.draws):
        into[:, 0] += masks.draws
    into[:, 1:] = masks.bits.view(np.int32)


def apply_masks(logits: Tensor, packed: Tensor) -> None:
    """Take out of `logits` [N, V], in place, what is not in the masks, on a CPU without native kernels. Row
    by row, so that only one mask at a time is more than bits."""
    vocab, kind = logits.shape[1], torch.int32 if logits.dtype == torch.float32 else torch.int16
    never = torch.tensor(-torch.inf, dtype=logits.dtype).view(kind).item()
    rows = logits.view(kind).numpy()
    for place, octets in zip(packed[:, 0].tolist(), packed[:, 1:].numpy().view(np.uint8), strict=True):
        row, count = rows[place], min(vocab, len(octets) * 8)
        allowed = np.unpackbits(octets, count=count, bitorder="little").view(np.bool_)
        if np.count_nonzero(allowed) < vocab // 2:
            few = np.flatnonzero(allowed)
            kept = row[few]
            row[:] = never
            row[few] = kept
        else:
            row[np.flatnonzero(~allowed)] = never
            row[count:] = never


class HostConfiner:
    """Confines rows where their logits are on the host."""

    def __init__(self) -> None:
        self._is_native = native.library() is not None

    def __call__(self, logits: Tensor, masks: Masks, places: Ints) -> Tensor:
        """Takes out of `logits` [N, V], in place, what each row's mask does not have."""
        packed = torch.empty((len(masks.rows), 1 + masks.bits.shape[1]), dtype=torch.int32)
        pack(masks, places, packed.numpy())
        if self._is_native and logits.dtype in kernel.DTYPES:
            kernel.apply_masks(logits, packed)
        else:
            apply_masks(logits, packed)
        return packed


class CudaConfiner:
    """Confines rows on a GPU. Masks travel on a stream of their own, while the layers still compute."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._buffers = cycle([_Pinned() for _ in range(_NUM_BUFFERS)])

    def __call__(self, logits: Tensor, masks: Masks, places: Ints) -> Tensor:
        from quire.kernels.triton.masks import apply_masks

        buffer = next(self._buffers)
        memory = buffer.take(len(masks.rows), 1 + masks.bits.shape[1])
        pack(masks, places, memory.numpy())
        here = torch.cuda.current_stream()
        with torch.cuda.stream(self._stream):
            packed = memory.to(self._device, non_blocking=True)
            buffer.read.record()
        here.wait_stream(self._stream)
        packed.record_stream(here)
        apply_masks(logits, packed)
        return packed


class _Pinned:
    """Host memory that the device reads by itself; grows as needed."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.int32)
        self.read = torch.cuda.Event()
        """When the device is done with it."""

    def take(self, rows: int, width: int) -> Tensor:
        self.read.synchronize()
        if len(self._memory) < rows * width:
            self._memory = torch.empty(2 * rows * width, dtype=torch.int32, pin_memory=True)
        return self._memory[: rows * width].view(rows, width)


Confiner = HostConfiner | CudaConfiner


def open_confiner(device: torch.device) -> Confiner:
    return CudaConfiner(device) if device.type == "cuda" else HostConfiner()


class Kept:
    """Confined rows of a batch as their grammars left them, of those who ask for still less."""

    def __init__(self, logits: Tensor, at: NDArray[np.intp]) -> None:
        self._index = to_device(at, logits.device)
        self._logits = logits.index_select(0, self._index)

    def revive(self, logits: Tensor) -> None:
        """Rows that were left without a token have those of their grammar."""
        now = logits.index_select(0, self._index)
        empty = now.amax(dim=-1, keepdim=True) == -torch.inf
        logits.index_copy_(0, self._index, torch.where(empty, self._logits, now))
