"""Tests of SSM mixers: their state sizes, and that their decodes can be taped."""

import pytest
import torch
from oracle import make_batch

from quire.attention.torch_sdpa import TorchSDPA
from quire.checkpoint.facts import StateFacts
from quire.kernels.cpu import native
from quire.kernels.cpu.tape import record
from quire.kernels.ops import choose
from quire.layers.scope import Loads, Scope
from quire.layers.ssm import GatedDelta, Mamba2Mixer, SSMMixer, ungrouped_order

HIDDEN = 24
FACTS = StateFacts(heads=4, head_dim=8, state=16, groups=2, conv=4)
SCOPE = Scope(
    torch.float32,
    torch.device("cpu"),
    TorchSDPA(),
    64,
    ops=choose(torch.device("cpu"), torch.float32),
    name="mixer",
)
MIXERS = {
    "mamba": lambda: Mamba2Mixer(HIDDEN, FACTS, 1e-6, SCOPE),
    "delta": lambda: GatedDelta(HIDDEN, FACTS, 1e-6, SCOPE, grouped=True),
}


def made(kind: str) -> SSMMixer:
    torch.manual_seed(0)
    mixer = MIXERS[kind]()
    with torch.no_grad():
        for layer in mixer.modules():
            if isinstance(layer, Loads):
                for target in layer.targets():
                    target.tensor.normal_(std=0.3)
                layer.finish()
    mixer.bind(*(torch.zeros(4, *shape, dtype=dtype) for shape, dtype in mixer.state_shapes))
    return mixer


def test_state_size_of_a_row() -> None:
    inputs, state = made("mamba").state_shapes
    assert inputs == ((4 * 8 + 2 * 2 * 16, 3), torch.float32)
    assert state == ((4, 8, 16), torch.float32)
    inputs, state = made("delta").state_shapes
    assert inputs == ((4 * 8 + 2 * 2 * 16, 3), torch.float32)
    assert state == ((4, 16, 8), torch.float32)


def test_interleaved_groups_are_split() -> None:
    """Check two groups of one a and two b each: a b b a b b."""
    assert ungrouped_order(2, 2, 4).tolist() == [0, 3, 1, 2, 4, 5]


@pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")
@pytest.mark.parametrize("kind", MIXERS)
@torch.inference_mode()
def test_decode_is_one_tape(kind: str) -> None:
    """Check that no torch operation runs between the kernels."""
    mixer, x = made(kind), torch.randn(2, HIDDEN)
    batch = make_batch([([1], 4), ([1], 0)], [[0, 1], [2]], 4)
    with record() as tape:
        out = mixer(x, batch)
    assert tape.refused is None and tape.complete
    before = [tensor.clone() for tensor in mixer.bound]
    x.normal_()
    tape.replay()
    for tensor, old in zip(mixer.bound, before, strict=True):
        tensor.copy_(old)
    torch.testing.assert_close(out, mixer(x, batch))
