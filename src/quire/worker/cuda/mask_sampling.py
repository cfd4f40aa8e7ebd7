"""Draws by masks: where what grammars allow lies on the device, for steps that were captured before anybody
knew it."""

from itertools import cycle
from mmap import mmap
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.data.plan import Ints, Masks
from quire.kernels.triton.sampling import FREE, LATER, ConstrainedDevice, sample
from quire.sampling.random import SamplingTensors
from quire.worker.cuda.host_signal import open_courier
from quire.worker.sleep import pin, unpin

_NUM_PAGES = 3
"""One more than there are steps under way."""
_ALIGNED = 4
"""Numbers: kernels are compiled for aligned pointers, and once."""
_MOST_KEPT = 8
"""Pieces of the planner's memory that the device reads by itself."""


def draw(logits: Tensor, asked: SamplingTensors, constrained: ConstrainedDevice | None = None) -> Tensor:
    return sample(logits, *asked, constrained)


class MaskedSampling:
    """The masks of one step after the other. They travel on a stream of their own, while the layers still
    compute, and are all that the draw of a captured step waits for."""

    def __init__(self, max_rows: int, max_draws: int, vocab: int, device: torch.device) -> None:
        self.device = device
        self.later = torch.full((max_draws,), FREE, dtype=torch.int32, device=device)
        """Of each draw, LATER if tokens are not sampled in passing."""
        self._is_later = False
        self._max_words = max_rows * -(-vocab // 32)
        self._max_draws = max_draws
        self._placed = b""
        """Which masks the device has in which place."""

    def hold(self, is_later: bool) -> None:
        """Whether tokens of the next step are sampled once its masks are there, and not in passing."""
        if is_later != self._is_later:
            self._is_later = is_later
            self.later.fill_(LATER if is_later else FREE)

    def sampled_in_graph(self, count: int) -> ConstrainedDevice | None:
        """What draws in passing look at; None: there are more than ever wait."""
        later = self.later[:count]
        return None if count > self._max_draws else ConstrainedDevice(later, later, later)

    def open(self) -> None:
        """Before anything is captured."""
        self._width_at = -(-self._max_draws // _ALIGNED) * _ALIGNED
        self._page = torch.full((self._width_at + 1,), FREE, dtype=torch.int32, device=self.device)
        """Of each draw which mask it has; then how wide they are."""
        self._bits = torch.zeros(self._max_words, dtype=torch.int32, device=self.device)
        self._pages = cycle(torch.empty(_NUM_PAGES, *self._page.shape, dtype=torch.int32).pin_memory())
        self._host = HostMemory()
        self._stream, self._main = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        self._sent, self._applied = torch.cuda.Event(), torch.cuda.Event()
        self._host_signal = open_courier(self._stream)
        self._placed = b""

    def constrained(self, count: int) -> ConstrainedDevice:
        """What so many draws of a captured step look at."""
        return ConstrainedDevice(self._page[:count], self._page[self._width_at :], self._bits)

    def send(self, masks: Masks, places: Ints) -> bool:
        """Have them there before what is launched next, which is held up until they are filled; `places`
        [max_rows] are those of rows in the batch. False: they are too many."""
        if masks.bits.size > len(self._bits):
            return False
        at = places[masks.rows] + masks.draws if len(masks.draws) else places[masks.rows]
        width = masks.bits.shape[1]
        placed = at.tobytes() + width.to_bytes(4, "little")
        self._applied.wait(self._stream)
        if placed != self._placed:
            with torch.cuda.stream(self._stream):
                self._place(at, width)
            self._placed = placed
        self._bring(masks)
        self._sent.record(self._stream)
        self._sent.wait(self._main)
        return True

    def _bring(self, masks: Masks) -> None:
        if self._host_signal is not None and self._host.has(masks.bits):
            if masks.coming is not None:
                masks.coming.then(self._host_signal.hold())
            self._host_signal.bring(self._host.of(masks.bits), self._bits)
        elif masks.bits.size:
            masks.wait()  # to pin memory may take what a stream waits for
            with torch.cuda.stream(self._stream):
                self._bits[: masks.bits.size].copy_(self._host.of(masks.bits), non_blocking=True)

    def _place(self, at: Ints, width: int) -> None:
        page = next(self._pages)
        array = page.numpy()
        array[:] = FREE
        array[self._width_at] = width
        array[at] = np.arange(len(at))
        self._page.copy_(page, non_blocking=True)

    def applied(self) -> None:
        """What looks at them is launched."""
        self._applied.record(self._main)


class HostMemory:
    """Memory that masks come in again and again, as the device reads it by itself; for others, a copy."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}
        """By where it is."""
        self._seen: dict[int, tuple[NDArray[np.uint32], Tensor]] = {}
        """The arrays that came last, which mostly come again, by their identity."""
        finalize(self, _let_go, self._kept).atexit = False

    def has(self, bits: NDArray[np.uint32]) -> bool:
        """Whether they were here before, in the same place at least."""
        return id(bits) in self._seen or bits.ctypes.data in self._kept

    def of(self, bits: NDArray[np.uint32]) -> Tensor:
        """[words] of all masks, one after the other."""
        if (seen := self._seen.get(id(bits))) is not None:
            return seen[1]
        memory, at = _owner(bits), bits.ctypes.data
        if memory is not None and at not in self._kept:
            self._keep(memory)
        kept = self._kept.get(at)
        if kept is None:
            return torch.from_numpy(bits.reshape(-1).view(np.int32)).pin_memory()
        if len(self._seen) >= _MOST_KEPT:
            self._seen.clear()
        self._seen[id(bits)] = bits, kept[: bits.size]
        return kept[: bits.size]

    def _keep(self, memory: mmap) -> None:
        if len(self._kept) >= _MOST_KEPT:
            self._seen.clear()
            _let_go(self._kept)
        words = torch.frombuffer(memory, dtype=torch.int32)
        if pin(words.view(torch.uint8)):
            self._kept[words.data_ptr()] = words


def _owner(bits: NDArray[np.uint32]) -> mmap | None:
    """Pages of its own that an array lies in, if it does."""
    base = bits.base
    while isinstance(base, np.ndarray):
        base = base.base
    memory = base.obj if isinstance(base, memoryview) else base
    return memory if isinstance(memory, mmap) else None


def _let_go(kept: dict[int, Tensor]) -> None:
    if kept:
        torch.cuda.synchronize()
    while kept:
        unpin(kept.popitem()[1])
