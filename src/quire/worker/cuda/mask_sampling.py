"""Sampling under grammar masks in captured steps: the masks arrive on the device after the capture."""

from itertools import cycle
from mmap import mmap
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.data.step_plan import Ints, Masks
from quire.kernels.host_memory import pin, unpin
from quire.kernels.triton.sampling import FREE, LATER, ConstrainedDevice, sample
from quire.sampling.random import SamplingTensors
from quire.worker.cuda.host_signal import open_host_signal

_NUM_BUFFERS = 3
"""Number of host buffers: one more than steps in flight."""
_ALIGNED = 4
"""Number of elements to which each array in the buffer is aligned: kernels are compiled once, for aligned
pointers."""
_MAX_PINNED = 8
"""Maximum number of the scheduler's shared-memory regions that stay pinned; beyond it, all are unpinned."""


def sample_tokens(
    logits: Tensor, params: SamplingTensors, constrained: ConstrainedDevice | None = None
) -> Tensor:
    return sample(logits, *params, constrained)


class MaskedSampling:
    """Copies the grammar masks of each step to the device on a separate stream, while the layers still
    compute. Only the captured sampling waits for the masks."""

    def __init__(self, max_rows: int, max_samples: int, vocab: int, device: torch.device) -> None:
        self.device = device
        self.later = torch.full((max_samples,), FREE, dtype=torch.int32, device=device)
        """[max_samples]: LATER everywhere if the next step is sampled after its masks arrive and not within
        the forward pass, otherwise FREE (no mask)."""
        self._is_later = False
        self._max_words = max_rows * -(-vocab // 32)
        self._max_samples = max_samples
        self._assignment_bytes = b""
        """Bytes of the assignment of masks to sampled positions that was last copied to the device."""

    def set_later(self, is_later: bool) -> None:
        """Set whether the next step is sampled after its masks arrive, not within the forward pass."""
        if is_later != self._is_later:
            self._is_later = is_later
            self.later.fill_(LATER if is_later else FREE)

    def later_constraints(self, count: int) -> ConstrainedDevice | None:
        """Return the constraints for sampling `count` positions within the forward pass: none, or that
        sampling is skipped because the masks arrive later. Return None if there are more positions than the
        buffer has room for."""
        later = self.later[:count]
        return None if count > self._max_samples else ConstrainedDevice(later, later, later)

    def open(self) -> None:
        """Allocate buffers and streams; must be called before graphs are captured."""
        self._width_at = -(-self._max_samples // _ALIGNED) * _ALIGNED
        self._assignment = torch.full((self._width_at + 1,), FREE, dtype=torch.int32, device=self.device)
        """The mask index of each sampled position, followed by the number of words of a mask."""
        self._bits = torch.zeros(self._max_words, dtype=torch.int32, device=self.device)
        self._host_assignments = cycle(
            torch.empty(_NUM_BUFFERS, *self._assignment.shape, dtype=torch.int32).pin_memory()
        )
        self._host = HostMemory()
        self._stream, self._step_stream = (
            torch.cuda.Stream(self.device),
            torch.cuda.current_stream(self.device),
        )
        self._sent, self._applied = torch.cuda.Event(), torch.cuda.Event()
        self._host_signal = open_host_signal(self._stream)
        self._assignment_bytes = b""

    def mask_constraints(self, count: int) -> ConstrainedDevice:
        """Return the constraints that the captured sampling of `count` positions reads."""
        return ConstrainedDevice(self._assignment[:count], self._assignment[self._width_at :], self._bits)

    def send(self, masks: Masks, places: Ints) -> bool:
        """Copy grammar masks to the device; later launches of the step wait for the copy. `places` [max_rows]
        is the index of each row's first sample. Return False if there are too many masks."""
        if masks.bits.size > len(self._bits):
            return False
        at = places[masks.rows] + masks.sample_index if len(masks.sample_index) else places[masks.rows]
        width = masks.bits.shape[1]
        assignment_bytes = at.tobytes() + width.to_bytes(4, "little")
        self._applied.wait(self._stream)
        if assignment_bytes != self._assignment_bytes:
            with torch.cuda.stream(self._stream):
                self._copy_assignment(at, width)
            self._assignment_bytes = assignment_bytes
        self._copy_bits(masks)
        self._sent.record(self._stream)
        self._sent.wait(self._step_stream)
        return True

    def _copy_bits(self, masks: Masks) -> None:
        if self._host_signal is not None and self._host.has(masks.bits):
            if masks.pending is not None:
                masks.pending.then(self._host_signal.block())
            self._host_signal.copy(self._host.of(masks.bits), self._bits)
        elif masks.bits.size:
            masks.wait_for_bits()  # pinning may block while a stream waits for the host
            with torch.cuda.stream(self._stream):
                self._bits[: masks.bits.size].copy_(self._host.of(masks.bits), non_blocking=True)

    def _copy_assignment(self, at: Ints, width: int) -> None:
        host_assignment = next(self._host_assignments)
        array = host_assignment.numpy()
        array[:] = FREE
        array[self._width_at] = width
        array[at] = np.arange(len(at))
        self._assignment.copy_(host_assignment, non_blocking=True)

    def applied(self) -> None:
        """Record an event after the launch of the kernel that reads the masks: their buffers may be
        overwritten once it has run."""
        self._applied.record(self._step_stream)


class HostMemory:
    """Pins the memory regions in which the scheduler writes grammar masks again and again, so that masks are
    copied to the device from there. Masks in other memory are first copied to a pinned buffer."""

    def __init__(self) -> None:
        self._pinned: dict[int, Tensor] = {}
        """Pinned memory by address."""
        self._recent: dict[int, tuple[NDArray[np.uint32], Tensor]] = {}
        """Recent mask arrays with their pinned words, by identity: most arrays are reused."""
        finalize(self, _unpin_all, self._pinned).atexit = False

    def has(self, bits: NDArray[np.uint32]) -> bool:
        """Whether the memory of the masks is already pinned."""
        return id(bits) in self._recent or bits.ctypes.data in self._pinned

    def of(self, bits: NDArray[np.uint32]) -> Tensor:
        """Return the words of all masks in pinned memory, one mask after the other."""
        if (recent := self._recent.get(id(bits))) is not None:
            return recent[1]
        memory, at = _owner(bits), bits.ctypes.data
        if memory is not None and at not in self._pinned:
            self._pin(memory)
        pinned = self._pinned.get(at)
        if pinned is None:
            return torch.from_numpy(bits.reshape(-1).view(np.int32)).pin_memory()
        if len(self._recent) >= _MAX_PINNED:
            self._recent.clear()
        self._recent[id(bits)] = bits, pinned[: bits.size]
        return pinned[: bits.size]

    def _pin(self, memory: mmap) -> None:
        if len(self._pinned) >= _MAX_PINNED:
            self._recent.clear()
            _unpin_all(self._pinned)
        words = torch.frombuffer(memory, dtype=torch.int32)
        if pin(words.view(torch.uint8)):
            self._pinned[words.data_ptr()] = words


def _owner(bits: NDArray[np.uint32]) -> mmap | None:
    """Return the memory map that contains an array, if there is one."""
    base = bits.base
    while isinstance(base, np.ndarray):
        base = base.base
    memory = base.obj if isinstance(base, memoryview) else base
    return memory if isinstance(memory, mmap) else None


def _unpin_all(pinned: dict[int, Tensor]) -> None:
    if pinned:
        torch.cuda.synchronize()
    while pinned:
        unpin(pinned.popitem()[1])
