"""Adapters beside weights of any format, and the memory of slots."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from lora_oracle import Adapted, slots_for
from oracle import make_tiny

from quire.checkpoint.quant import ONLINE
from quire.kernels.reference.ops import Reference
from quire.layers.linear import Linear
from quire.layers.lora_layers import LoRAFactors
from quire.quant.plain import PlainWeight


@pytest.mark.parametrize("method", ["int8", "fp8"])
def test_the_weight_may_be_in_any_format(method: str, tmp_path: Path) -> None:
    """A product of a format that goes past the adapters."""
    path, _ = make_tiny("llama", tmp_path)
    ours = Adapted(path, slots_for(2, 4), quant=ONLINE[method])
    assert {type(module.weight) for module in ours.modules() if isinstance(module, Linear)} != {PlainWeight}
    tokens = torch.tensor([0, -1, 1, 1, 0], dtype=torch.int32)
    for module in ours.modules():
        if not isinstance(module, Linear):
            continue
        point = module.point
        assert point is not None
        for each in (point.a, point.b):
            each.normal_()
        x = torch.randn(5, point.size_in)
        plain = module.multiply(x)
        with ours.slots.using(ours.slots.plan(tokens)):
            adapted = module.multiply(x)
        expected = Reference().lora(plain.clone(), x, point.a, point.b, point.part_sizes, tokens)
        torch.testing.assert_close(adapted, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(module.multiply(x), plain)


def test_a_slot_holds_one_adapter(tmp_path: Path) -> None:
    """What is left of an adapter with more ranks or other layers; a neighbour that is written over."""
    path, _ = make_tiny("llama", tmp_path)
    ours = Adapted(path, slots_for(3, 4))
    slots, names = ours.slots, list(ours.slots.layers)
    for slot, rank in ((1, 4), (0, 3), (2, 2)):
        full = {
            name: LoRAFactors(*(each.fill_(rank) for each in both))
            for name, both in slots.room(dict.fromkeys(names, rank)).items()
        }
        slots.put(slot, full)
    slots.put(
        1,
        {
            name: LoRAFactors(*(each.fill_(9) for each in both))
            for name, both in slots.room({names[1]: 1}).items()
        },
    )
    for name, point in slots.layers.items():
        assert point.b[1].unique().tolist() == ([0, 9] if name == names[1] else [0])
        assert [set(point.b[slot].unique().tolist()) for slot in (0, 2)] == [{0, 3}, {0, 2}]
        assert (point.b[0] == 3).sum() == 3 * point.b[0, :, 0].numel()


def test_a_step_without_draws_has_no_adapters_for_them(tmp_path: Path) -> None:
    """A chunk in the middle of a prompt: kernels have no work to sort there."""
    path, _ = make_tiny("llama", tmp_path)
    slots = Adapted(path, slots_for(2, 4)).slots
    tokens = torch.tensor([0, 1, -1], dtype=torch.int32)
    step = slots.plan(tokens, tokens[:0])
    assert step.tokens is tokens and step.logit_tokens is None and step.logit_assigned is None
    assert slots.plan(tokens, tokens[2:]).logit_tokens is not None


def test_released_slots_hold_no_memory(tmp_path: Path) -> None:
    """A layer that keeps a view of the slots while the engine sleeps."""
    path, _ = make_tiny("llama", tmp_path)
    slots = Adapted(path, slots_for(2, 4)).slots
    memory = weakref.ref(slots._memory)
    slots.release()
    gc.collect()
    assert memory() is None and not any("_slots_memory" in vars(layer) for layer in slots.layers.values())
