"""Tests of LoRA with weights of any format, and of the memory of slots."""

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lora_oracle import Adapted, slots_for
from oracle import make_tiny

from quire.attention.batch import LoRATokens
from quire.checkpoint.quant import ONLINE
from quire.kernels.reference.ops import Reference
from quire.layers.linear import Linear
from quire.layers.lora_layers import LoRAFactors
from quire.quant.unquantized import PlainWeight


@pytest.mark.parametrize("method", ["int8", "fp8"])
def test_lora_with_weights_of_any_format(method: str, tmp_path: Path) -> None:
    """Check that no format's matmul bypasses the adapters."""
    path, _ = make_tiny("llama", tmp_path)
    actual = Adapted(path, slots_for(2, 4), quant=ONLINE[method])
    assert {type(module.weight) for module in actual.modules() if isinstance(module, Linear)} != {PlainWeight}
    tokens = torch.tensor([0, -1, 1, 1, 0], dtype=torch.int32)
    for module in actual.modules():
        if not isinstance(module, Linear):
            continue
        lora_layer = module.lora_layer
        assert lora_layer is not None
        for item in (lora_layer.a, lora_layer.b):
            item.normal_()
        x = torch.randn(5, lora_layer.size_in)
        batch: Any = SimpleNamespace(lora=actual.slots.plan(LoRATokens(tokens)))
        plain, adapted = module.product(x), module.multiply(x, batch)
        expected = Reference().lora(
            plain.clone(), x, lora_layer.a, lora_layer.b, lora_layer.part_sizes, tokens
        )
        torch.testing.assert_close(adapted, expected, atol=1e-4, rtol=1e-4)
        no_adapters: Any = SimpleNamespace(lora=None)
        assert torch.equal(module.multiply(x, no_adapters), plain)


def test_slot_holds_one_adapter(tmp_path: Path) -> None:
    """Check for remains of an adapter with more ranks or other layers, and for writes to other slots."""
    path, _ = make_tiny("llama", tmp_path)
    actual = Adapted(path, slots_for(3, 4))
    slots, names = actual.slots, list(actual.slots.layers)
    for slot, rank in ((1, 4), (0, 3), (2, 2)):
        full = {
            name: LoRAFactors(*(item.fill_(rank) for item in both))
            for name, both in slots.room(dict.fromkeys(names, rank)).items()
        }
        slots.put(slot, full)
    slots.put(
        1,
        {
            name: LoRAFactors(*(item.fill_(9) for item in both))
            for name, both in slots.room({names[1]: 1}).items()
        },
    )
    for name, lora_layer in slots.layers.items():
        assert lora_layer.b[1].unique().tolist() == ([0, 9] if name == names[1] else [0])
        assert [set(lora_layer.b[slot].unique().tolist()) for slot in (0, 2)] == [{0, 3}, {0, 2}]
        assert (lora_layer.b[0] == 3).sum() == 3 * lora_layer.b[0, :, 0].numel()


def test_step_without_samples_has_no_adapters_for_the_head(tmp_path: Path) -> None:
    """Check a chunk in the middle of a prompt, for which kernels have no rows to sort."""
    path, _ = make_tiny("llama", tmp_path)
    slots = Adapted(path, slots_for(2, 4)).slots
    tokens = torch.tensor([0, 1, -1], dtype=torch.int32)
    assert slots.plan(LoRATokens(tokens[:0])) is None and slots.plan(None) is None
    planned = slots.plan(LoRATokens(tokens[2:]))
    assert planned is not None and planned.assigned is not None


def test_layer_with_adapters_refuses_a_call_without_batch(tmp_path: Path) -> None:
    """Check for a model that does not pass the batch on, whose adapters would be ignored."""
    path, _ = make_tiny("llama", tmp_path)
    adapted = Adapted(path, slots_for(2, 4))
    linear = next(module for module in adapted.modules() if isinstance(module, Linear))
    with pytest.raises(AssertionError, match="needs the batch"):
        linear.multiply(torch.randn(5, linear.inputs.size))


def test_released_slots_hold_no_memory(tmp_path: Path) -> None:
    """A layer that keeps a view of the slots while the engine sleeps."""
    path, _ = make_tiny("llama", tmp_path)
    slots = Adapted(path, slots_for(2, 4)).slots
    memory = weakref.ref(slots._memory)
    slots.release()
    gc.collect()
    assert memory() is None and not any("_slots_memory" in vars(layer) for layer in slots.layers.values())
