"""Copies of KV cache blocks between a GPU and pinned host memory, on a stream beside the steps."""

import threading
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.host_memory import host_memory, pin
from quire.worker.kv_tiers import CachePages, CopiedBlocks


class PinnedBlocks:
    """Blocks on their way to pinned memory."""

    def __init__(self, contents: Tensor, copied: torch.cuda.Event) -> None:
        self._contents, self._copied = contents, copied

    def wait(self) -> NDArray[np.uint8]:
        self._copied.synchronize()
        return self._contents.numpy()


class CudaBlockCopies:
    """Copies of a cache on a GPU.

    Blocks are gathered on the stream of the steps, so that the next step may overwrite them, and copied to
    the host on another stream. Blocks from the host are scattered on the other stream: no step uses them
    yet."""

    def __init__(self, pages: CachePages, device: torch.device) -> None:
        self.pages, self.device = pages, device
        self._main = torch.cuda.current_stream(device)
        self._beside = torch.cuda.Stream(device)
        self._lock = threading.Lock()
        """Held while work is enqueued on the second stream."""

    def new_slots(self, count: int) -> Tensor:
        memory = host_memory((count + 1) * self.pages.block_bytes)
        pin(memory)  # copies to memory that cannot be pinned are slower
        return memory.view(count + 1, -1)

    def start_out(self, ids: Sequence[int], slots: Tensor | None, rows: Sequence[int]) -> CopiedBlocks:
        places = torch.tensor(ids).pin_memory().to(self.device, non_blocking=True)
        gathered = self.pages.gather(places)
        contents = torch.empty(gathered.shape, dtype=torch.uint8, pin_memory=True)
        copied = torch.cuda.Event()
        with self._lock, torch.cuda.stream(self._beside):
            self._beside.wait_stream(self._main)
            gathered.record_stream(self._beside)
            contents.copy_(gathered, non_blocking=True)
            for at, row in enumerate(rows):
                if slots is not None and row:
                    slots[row].copy_(gathered[at], non_blocking=True)
            copied.record()
        return PinnedBlocks(contents, copied)

    def copy_in(self, ids: Sequence[int], contents: Sequence[NDArray[np.uint8] | Tensor]) -> None:
        copied = torch.cuda.Event()
        with self._lock, torch.cuda.stream(self._beside):
            self._beside.wait_stream(self._main)  # steps that used these blocks before
            staging = torch.empty((len(ids), self.pages.block_bytes), dtype=torch.uint8, device=self.device)
            for row, part in zip(staging, contents, strict=True):
                row.copy_(torch.as_tensor(part), non_blocking=True)
            self.pages.scatter(torch.tensor(ids).to(self.device), staging)
            copied.record()
        copied.synchronize()
