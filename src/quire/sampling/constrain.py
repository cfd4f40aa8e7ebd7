"""Grammar constraints: tokens that a grammar does not allow are masked."""

from itertools import cycle

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.data.step_plan import Masks
from quire.kernels.cpu import masks as kernel
from quire.kernels.cpu import native
from quire.sampling.rows import Ints
from quire.sampling.transfer import to_device

_NUM_BUFFERS = 3
"""Number of mask buffers that are used in turn: enough that the masks in the oldest buffer have usually been
applied when it is used again."""


def pack(masks: Masks, places: Ints, into: NDArray[np.int32]) -> None:
    """Write grammar masks in the format of the kernels to `into` [masks, 1 + words]: for each mask the index
    of its row of logits, then one bit per token. `places` is the result of `SamplingRows.places`."""
    into[:, 0] = places[masks.rows]
    if len(masks.sample_index):
        into[:, 0] += masks.sample_index
    into[:, 1:] = masks.bits.view(np.int32)


def apply_masks(logits: Tensor, packed: Tensor) -> None:
    """Set the logits [N, V] of tokens that the masks `packed` (see `pack`) disallow to -inf in place, on a
    CPU without native kernels. Only one mask at a time is unpacked, to save memory."""
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


class HostMasks:
    """Applies grammar masks to logits on the host."""

    def __call__(self, logits: Tensor, masks: Masks, places: Ints) -> Tensor:
        """Set the logits [N, V] of disallowed tokens to -inf in place; return the packed masks. For `places`
        and the format see `pack`."""
        packed = torch.empty((len(masks.rows), 1 + masks.bits.shape[1]), dtype=torch.int32)
        pack(masks, places, packed.numpy())
        if native.serves(logits.device, logits.dtype):
            kernel.apply_masks(logits, packed)
        else:
            apply_masks(logits, packed)
        return packed


class CudaMasks:
    """Applies grammar masks on a GPU. Masks are copied on a separate stream, while the layers still
    compute."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._buffers = cycle([_Buffer(self._stream) for _ in range(_NUM_BUFFERS)])

    def __call__(self, logits: Tensor, masks: Masks, places: Ints) -> Tensor:
        from quire.kernels.triton.masks import apply_masks

        buffer = next(self._buffers)
        buffer.make_room(len(masks.rows), 1 + masks.bits.shape[1])
        pack(masks, places, buffer.array)
        with torch.cuda.stream(self._stream):
            buffer.packed.copy_(buffer.memory, non_blocking=True)
            buffer.sent.record()
        buffer.sent.wait()
        apply_masks(logits, buffer.packed)
        buffer.applied.record()
        return buffer.packed


class _Buffer:
    """A pinned host buffer and a device buffer for masks. Both are reused, since allocating them in each step
    would take longer than the copy."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        """Stream of the copies."""
        self._whole: list[Tensor] = []
        self.memory = self.packed = torch.empty((0, 0), dtype=torch.int32)
        self.array: NDArray[np.int32] = self.memory.numpy()
        self.sent, self.applied = torch.cuda.Event(), torch.cuda.Event()

    def make_room(self, rows: int, width: int) -> None:
        """Resize the buffers to `rows` masks of `width` int32 elements, after the previous masks have been
        applied."""
        self.applied.synchronize()
        if self.memory.shape == (rows, width):
            return
        size = rows * width
        if not self._whole or len(self._whole[0]) < size:
            self._whole = [torch.empty(size, dtype=torch.int32, pin_memory=True)]
            with torch.cuda.stream(self._stream):
                self._whole.append(torch.empty(size, dtype=torch.int32, device=self._stream.device))
        self.memory, self.packed = (buffer[:size].view(rows, width) for buffer in self._whole)
        self.array = self.memory.numpy()


MaskApplier = HostMasks | CudaMasks


def open_masks(device: torch.device) -> MaskApplier:
    return CudaMasks(device) if device.type == "cuda" else HostMasks()


class ConstrainedRows:
    """Copy of the rows of logits after grammar masks. Further restrictions, such as bad words, may leave no
    token of a row; then `restore` brings the copied row back."""

    def __init__(self, logits: Tensor, at: NDArray[np.intp]) -> None:
        self._index = to_device(at, logits.device)
        self._logits = logits.index_select(0, self._index)

    def restore(self, logits: Tensor) -> None:
        """Restore the copied logits of rows in which the further restrictions left no token."""
        now = logits.index_select(0, self._index)
        empty = now.amax(dim=-1, keepdim=True) == -torch.inf
        logits.index_copy_(0, self._index, torch.where(empty, self._logits, now))
