"""Tests of decodes of whole models on a CPU tape: no torch operations, and new tokens give new logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import BLOCK_SIZE, load_tiny, make_batch, make_tiny, on_rows
from torch import Tensor
from zoo import UNTAPED, ZOO

from quire.attention.cpu_attn import CPUAttention
from quire.kernels.cpu import native
from quire.kernels.cpu.tape import record
from quire.layers.attention import attention_layers, caching_layers

pytestmark = pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")


class Memory:
    """A copy of a model's caches."""

    def __init__(self, model: Any) -> None:
        names = ("k_cache", "v_cache", "cache", "conv_state", "state")
        layers = caching_layers(model.modules())
        self.kept = [
            kept for layer in layers for name in names if (kept := getattr(layer, name, None)) is not None
        ]
        for tensor in self.kept:
            tensor.normal_()
        self.copies = [tensor.clone() for tensor in self.kept]

    def restore(self) -> None:
        for tensor, copy in zip(self.kept, self.copies, strict=True):
            tensor.copy_(copy)


@pytest.mark.parametrize("architecture", ZOO)
@torch.inference_mode()
def test_decode_is_taped_and_follows_its_tokens(architecture: str, tmp_path: Path) -> None:
    """Check for torch operations, which prevent recording, and for experts of the recorded step."""
    model = load_tiny(make_tiny(architecture, tmp_path)[0])
    for layer in attention_layers(model.modules()):
        layer.backend = CPUAttention()
    memory = Memory(model)
    chunks, tables = [([5], 6), ([9], 2), ([7], 13)], [[1, 2], [3], [4, 5, 6, 7]]
    batch = on_rows(make_batch(chunks, tables, BLOCK_SIZE), [4, 0, 2])

    def step() -> Tensor:
        memory.restore()
        return model.logits(model(batch))

    memory.restore()
    with record() as tape:
        logits = model.logits(model(batch))
    assert tape.refused == UNTAPED.get(architecture)
    if architecture in UNTAPED:
        return
    for _ in range(2):
        batch.token_ids.copy_(torch.randint(3, 128, (3,)))
        memory.restore()
        tape.replay()
        assert torch.equal(logits, step())
