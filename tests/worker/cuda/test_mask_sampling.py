"""Tests of the transfer of grammar masks to a captured sampling graph, without a GPU."""

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from quire.data.async_value import AsyncValue
from quire.data.step_plan import Masks
from quire.kernels.triton.sampling import FREE, LATER
from quire.sched.grammar import _MaskBuffer
from quire.worker.cuda import mask_sampling as module
from quire.worker.cuda.mask_sampling import MaskedSampling

ROWS, DRAWS, VOCAB = 12, 30, 200


class NoStream:
    """A stream that completes everything at once."""

    def __init__(self, *device: Any) -> None: ...
    def wait(self, stream: Any) -> None: ...
    def record(self, stream: Any) -> None: ...


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> Iterator[MaskedSampling]:
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, NoStream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone())
    monkeypatch.setattr(module, "pin", lambda memory: True)
    monkeypatch.setattr(module, "unpin", lambda memory: None)
    made = MaskedSampling(ROWS, DRAWS, VOCAB, torch.device("cpu"))
    made.open()
    yield made
    module._unpin_all(made._host._pinned)


def test_every_sampled_position_gets_its_mask(draws: MaskedSampling) -> None:
    """Check rows in any order, without masks or with several positions.

    The masks are in the planner's memory, which is reused, or in new memory.
    """
    rng, buffers = np.random.default_rng(0), [_MaskBuffer() for _ in range(3)]
    for step in range(40):
        rows = rng.permutation(ROWS)[: rng.integers(1, ROWS)].astype(np.int32)
        num_samples = rng.integers(1, 3) if step % 2 else 1
        places = np.full(ROWS, -1, np.int32)
        places[rows] = np.arange(len(rows)) * num_samples
        chosen = np.repeat(rows[rng.random(len(rows)) < 0.6], num_samples)
        which = np.tile(np.arange(num_samples, dtype=np.int32), len(chosen) // num_samples)
        width = int(rng.integers(1, VOCAB // 64))
        bits = buffers[step % 3].take(len(chosen), width)
        bits[:] = rng.integers(2**32, size=bits.shape, dtype=np.uint32)
        mask_bits = bits if step % 5 else bits.copy()
        assert draws.send(Masks(chosen, mask_bits, which if num_samples > 1 else which[:0]), places)
        mask_of, found_width, actual = draws.mask_constraints(DRAWS)
        assert found_width.item() == width
        expected = dict(zip((places[chosen] + which).tolist(), bits, strict=True))
        for place, mask in enumerate(mask_of.tolist()):
            if place not in expected:
                assert mask == FREE
            else:
                words = actual[mask * width : (mask + 1) * width].numpy().view(np.uint32)
                assert (words == expected[place]).all(), f"step {step}, draw {place}"


class BlockedStream:
    """A stream that waits for the host and records its waits."""

    def __init__(self) -> None:
        self.blocked = 0
        self.resumed: list[int] = []

    def block(self) -> Callable[[], None]:
        self.blocked += 1
        return partial(self.resumed.append, self.blocked)

    def copy(self, source: torch.Tensor, into: torch.Tensor) -> None:
        into[: len(source)] = source


def test_pending_masks_hold_the_stream_and_not_the_host(draws: MaskedSampling) -> None:
    """Check that the host waits if the memory has to be pinned first, since pinning may wait for
    the stream.
    """
    stream = BlockedStream()
    draws._host_signal = stream  # type: ignore[assignment]
    rows, buffer = np.arange(2, dtype=np.int32), _MaskBuffer()
    first = Masks(rows, buffer.take(2, 3), pending=AsyncValue())
    assert first.pending is not None
    filling = threading.Timer(0.01, first.pending.arrive)
    filling.start()
    assert draws.send(first, rows) and first.pending is None and not stream.blocked
    for number, count in enumerate((2, 1, 2), 1):
        pending = AsyncValue()
        assert draws.send(Masks(rows[:count], buffer.take(count, 3), pending=pending), rows)
        assert stream.blocked == number and len(stream.resumed) == number - 1
        pending.arrive()
        assert stream.resumed[-1] == number
    filling.join(60)


def test_masks_without_space_are_not_sent(draws: MaskedSampling) -> None:
    rows = np.arange(ROWS, dtype=np.int32)
    assert draws.send(Masks(rows, np.zeros((ROWS, -(-VOCAB // 32)), np.uint32)), rows)
    assert not draws.send(Masks(rows, np.zeros((ROWS, -(-VOCAB // 32) + 1), np.uint32)), rows)


def test_fused_sampling_waits_only_if_masks_follow(draws: MaskedSampling) -> None:
    looked_at = draws.later_constraints(5)
    assert looked_at is not None and draws.later_constraints(DRAWS + 1) is None
    for is_later in (False, True, True, False):
        draws.set_later(is_later)
        assert looked_at.mask_of.tolist() == [LATER if is_later else FREE] * 5
