"""Tests of LoRA adapters against PEFT: many in one batch, in every kind of layer."""

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lora_oracle import PLAIN, Adapted, save_adapter, slots_for
from oracle import make_tiny, random_prompts, run_hf
from threads import run_threads, tp_worlds
from torch import Tensor

from quire.attention.cpu_attn import CPUAttention
from quire.attention.torch_sdpa import TorchSDPA
from quire.errors import ConfigError
from quire.kernels.cpu import native
from quire.kernels.ops import Ops
from quire.layers.linear import GateUpLinear, QKVLinear
from quire.layers.scope import Scope
from quire.models.transformers_backend import TransformersModel
from quire.parallel.world import World

PROMPTS = random_prompts(9, 7, 11)
SLOT_OF = [0, 1, PLAIN]
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "target_modules": [*PROJECTIONS, "embed_tokens"],
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 3},
        "alpha_pattern": {"k_proj": 5},
    },
    "gpt2": {"target_modules": ["c_attn", "c_proj", "c_fc", "wte"], "fan_in_fan_out": True},
    "cohere": {"target_modules": ["q_proj", "k_proj", "v_proj"]},
    "gpt_neox": {"target_modules": ["query_key_value", "dense_4h_to_h", "lm_head"]},
    "gpt_oss": {"target_modules": ["o_proj"], "target_parameters": EXPERTS},
    "deepseek_v3": {
        "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
        "target_parameters": EXPERTS,
    },
    "qwen3_next": {
        "target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"],
        "target_parameters": EXPERTS[:1],
    },
    "opt": {"target_modules": [*PROJECTIONS[:3], "out_proj", "fc1", "fc2", "embed_tokens", "lm_head"]},
    "granitemoehybrid": {"target_modules": ["in_proj", "out_proj", "input_linear"]},
}
"""Interleaved and half-split RoPE, fused and split projections, a tied head, transposed weights, experts,
MLA and SSM states.
"""

SHARED = ["opt", "gpt_oss", "granitemoehybrid"]
"""Models that are tested with tensor parallelism."""


def peft_logits(hf: Any, folder: Path, **settings: Any) -> list[Tensor]:
    """Return logits of the prompts with the saved adapters of ranks 4 and 8, then without."""
    expected, plain = [], run_hf(hf, PROMPTS[2])
    for number, prompt in enumerate(PROMPTS[:2]):
        rank = 4 * (number + 1)
        lora_config = {"r": rank, "lora_alpha": 16, "use_rslora": bool(number)} | settings
        # A copy, since PEFT does not remove fully trained modules.
        adapted = save_adapter(copy.deepcopy(hf), folder / str(number), number, **lora_config)
        expected.append(run_hf(adapted, prompt))
    return [*expected, plain]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in SHARED])
def test_each_row_matches_peft(family: str, tmp_path: Path) -> None:
    """Check for adapters of another row or part, and for wrong scales or ranks."""
    path, hf = make_tiny(family, tmp_path)
    expected = peft_logits(hf, tmp_path, **FAMILIES[family])
    backend = CPUAttention() if native.library() is not None else None
    actual = Adapted(path, slots_for(2, 8), backend=backend)
    for slot in (1, 0):
        actual.put(slot, tmp_path / str(slot))
    result = actual.run(PROMPTS, SLOT_OF)
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-4)
    if backend is not None:
        for prompt, slot, together in zip(PROMPTS, SLOT_OF, result, strict=True):
            assert torch.equal(actual.run([prompt], [slot])[0], together), "different from the output alone"


@pytest.mark.parametrize("family", SHARED)
def test_tensor_parallel_adapters(family: str, tmp_path: Path) -> None:
    """Check shards of inputs and outputs, and additions before and after an all-reduce."""
    path, hf = make_tiny(family, tmp_path, vocab_size=129)
    expected = peft_logits(hf, tmp_path, **FAMILIES[family])
    worlds = tp_worlds(2)
    models = [Adapted(path, slots_for(2, 8), world=world) for world in worlds]
    for model in models:
        for slot in (0, 1):
            model.put(slot, tmp_path / str(slot))
    check_ranks(models, worlds, expected)


def check_ranks(models: list[Adapted], worlds: list[World], expected: list[Tensor]) -> None:
    for actual in run_threads(
        len(worlds), lambda world: models[world.tp.rank].run(PROMPTS, SLOT_OF), worlds=lambda _: worlds
    ):
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, atol=2e-4, rtol=1e-4)


def test_fully_sharded_adapters(tmp_path: Path) -> None:
    """Check shards of ranks, ranks that are no multiple of the devices, and doubled outputs.

    No rank may keep an unsharded half.
    """
    path, hf = make_tiny("llama", tmp_path, num_key_value_heads=1)
    expected = peft_logits(hf, tmp_path, target_modules=PROJECTIONS, rank_pattern={"k_proj": 3})
    worlds = tp_worlds(2)
    full, parts = (
        [
            Adapted(path, slots_for(2, 9, fully_sharded=fully_sharded, only=PROJECTIONS), world=world)
            for world in worlds
        ]
        for fully_sharded in (False, True)
    )
    for model in (*full, *parts):
        for slot in (0, 1):
            model.put(slot, tmp_path / str(slot))
    check_ranks(parts, worlds, expected)
    for one, other in zip(parts[0].slots.layers.values(), full[0].slots.layers.values(), strict=True):
        assert one.size < 0.8 * other.size, one.name
        halves = zip(one.slot_shapes, other.slot_shapes, strict=True)
        assert sum(math.prod(small) <= 0.6 * math.prod(large) for small, large in halves) == 1


WHOLE = {
    "llama": {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["embed_tokens"]},
    "gpt_neox": {"target_modules": ["dense_4h_to_h"], "modules_to_save": ["embed_in", "lm_head"]},
    "gemma2": {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}
"""Embedding or head with an adapter of the other, by other names, and a tied head."""


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", WHOLE)
def test_adapters_with_full_embeddings_or_heads(family: str, size: int, tmp_path: Path) -> None:
    """Check for modules of another adapter or of the model, rows of another rank, and stale modules."""
    path, hf = make_tiny(family, tmp_path, vocab_size=129)
    expected = peft_logits(hf, tmp_path, **WHOLE[family])
    worlds = tp_worlds(size)
    both = ("embed_tokens", "lm_head")
    models = [Adapted(path, slots_for(2, 8, whole_modules=both), world=world) for world in worlds]
    for model in models:
        for slot, number in ((1, 0), (0, 0), (1, 1)):
            model.put(slot, tmp_path / str(number))
    check_ranks(models, worlds, expected)
    plain = tmp_path / "plain"
    save_adapter(hf, plain, 3, r=2, lora_alpha=4, target_modules=WHOLE[family]["target_modules"][:1])
    for model in models:
        model.put(0, plain)
        assert not any(table.has_table[0] for table in model.slots.tables.values())  # type: ignore[attr-defined]


def test_steps_without_adapters_run_the_same_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a step without adapters has no extra cost."""
    path, hf = make_tiny("llama", tmp_path)
    peft_logits(hf, tmp_path, target_modules=PROJECTIONS)
    actual = Adapted(path, slots_for(1, 8))
    actual.put(0, tmp_path / "0")
    used: list[str] = []
    for module in actual.modules():
        if isinstance(module, QKVLinear):
            monkeypatch.setattr(module, "entered", lambda x, entry: used.append("entered"))
        if isinstance(module, GateUpLinear):
            gated = partial(_noted, used, module.weight.product, module.ops)
            monkeypatch.setattr(module, "gated", gated)
    monkeypatch.setattr(type(actual.slots.layers["lm_head"].ops), "lora", lambda *_: used.append("lora"))
    actual.run(PROMPTS, [PLAIN] * 3)
    assert set(used) == {"entered", "gated"}


def _noted(used: list[str], product: Callable[[Tensor], Tensor], ops: Ops, x: Tensor) -> Tensor:
    used.append("gated")
    return ops.gated(product(x), "silu")


def test_transformers_backend_rejects_adapters() -> None:
    facts: Any = SimpleNamespace(borrowed=object(), architecture="Odd")
    scope = Scope(torch.float32, torch.device("cpu"), TorchSDPA(), 8, adapters=slots_for(1, 8))
    with pytest.raises(ConfigError, match="enable_lora is not supported with Odd"):
        TransformersModel(facts, scope)
