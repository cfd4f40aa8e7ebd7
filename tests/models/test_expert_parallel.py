"""Tests that models with expert parallelism match one device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from formats import SIZES, STORED, gpt_oss
from gguf_files import make_tiny_gguf
from oracle import load_tiny, make_tiny, random_prompts, run_paged
from requantized import requantize
from threads import groups, run_threads
from tiny import open_tiny
from torch import Tensor

from quire.checkpoint.model import read_checkpoint
from quire.config.expert_placement import balance
from quire.config.parallel import Rank
from quire.errors import ConfigError
from quire.kernels import batch_invariant
from quire.layers.moe import Experts
from quire.parallel.all2all import open_dispatch
from quire.parallel.group import ALONE
from quire.parallel.world import World
from quire.worker import loaded_model
from quire.worker.eplb import move

STEPS = [[10, 0, 17], [1, 4, 6], [1, 1, 1]]
"""Prompt chunks, then decodes."""
PROMPTS = random_prompts(12, 5, 24)
OTHERS = [list(reversed(ids)) for ids in PROMPTS]


def worlds(tp: int, dp: int = 1) -> list[World]:
    """Return the ranks' groups as `join` makes them."""
    shared = [groups(tp) if tp > 1 else [ALONE] for _ in range(dp)]
    return [
        World(Rank(dp=index // tp, tp=index % tp), tp=shared[index // tp][index % tp], ep=ep)
        for index, ep in enumerate(groups(tp * dp))
    ]


def logits(
    path: Path,
    made: list[World],
    *,
    backend: str = "",
    strategy: Any = "linear",
    redundant: int = 0,
    then: Callable[[Any, World], None] | None = None,
    **options: Any,
) -> list[list[Tensor]]:
    """Return the logits of each rank and prompt; engines have their own prompts."""
    models = [
        load_tiny(
            path,
            world=world,
            ep=open_dispatch(world, backend, strategy=strategy, num_redundant=redundant),
            **options,
        )
        for world in made
    ]

    def run(world: World) -> list[Tensor]:
        if then is not None:
            then(models[made.index(world)], world)
        prompts = OTHERS if world.rank.dp else PROMPTS
        return run_paged(models[made.index(world)], prompts, STEPS)

    return run_threads(len(made), run, worlds=lambda _: made)


def expected(path: Path, **options: Any) -> list[list[Tensor]]:
    model = load_tiny(path, **options)
    return [run_paged(model, prompts, STEPS) for prompts in (PROMPTS, OTHERS)]


def compare(actual: list[list[Tensor]], right: list[list[Tensor]], made: list[World]) -> None:
    for world, rank_logits in zip(made, actual, strict=True):
        for one, other in zip(rank_logits, right[world.rank.dp], strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


MODELS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {},
    "Qwen3MoeForCausalLM": {},
    "DeepseekV3ForCausalLM": {},
    "GptOssForCausalLM": {},
    "GraniteMoeSharedForCausalLM": {},
    "Llama4ForCausalLM": {},
    "Step3TextForCausalLM": {},
    "Step3p5ForCausalLM": {},
    "NemotronHForCausalLM": {"moe_latent_size": 24, "mlp_bias": True, "use_bias": True},
}


@pytest.mark.parametrize("name", MODELS)
def test_expert_parallel_logits_match_one_device(name: str, tmp_path: Path) -> None:
    """Check for missing or duplicate experts, wrong biases, doubled shared experts and lost or swapped
    tokens.
    """
    path, _ = make_tiny(name, tmp_path, **MODELS[name])
    right = expected(path)
    for strategy in ("linear", "round_robin"):
        made = worlds(2)
        compare(logits(path, made, strategy=strategy), right, made)
    for backend in ("allgather_reducescatter", "all2all"):
        made = worlds(1, 2)
        compare(logits(path, made, backend=backend), right, made)


@pytest.mark.parametrize("is_fixed", [False, True])
def test_batch_invariant_mode_gathers_tokens(
    is_fixed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check for outputs that are sent back and then added in any order."""

    def fail(world: World, backend: str, **options: Any) -> None:
        raise ConfigError(f"this would open {backend}")

    monkeypatch.setattr(batch_invariant, "_switch", {"on": False})
    monkeypatch.setattr(loaded_model, "open_dispatch", fail)
    with pytest.raises(ConfigError, match="allgather_reducescatter" if is_fixed else "all2all"):
        open_tiny(make_tiny("llama", tmp_path)[0], all2all_backend="all2all", batch_invariant=is_fixed)


@pytest.mark.parametrize("backend", ["allgather_reducescatter", "all2all"])
def test_number_of_experts_not_divisible_by_ranks(backend: str, tmp_path: Path) -> None:
    path, _ = make_tiny("MixtralForCausalLM", tmp_path)
    right, made = expected(path), worlds(1, 3)
    compare(logits(path, made, backend=backend), [*right, right[1]], made)


def test_tensor_and_data_parallel_ranks_share_experts(tmp_path: Path) -> None:
    """Check for tokens sent twice or never by ranks of one engine, and replicated experts."""
    path, _ = make_tiny("DeepseekV3ForCausalLM", tmp_path)
    right = expected(path)
    for backend in ("allgather_reducescatter", "all2all"):
        made = worlds(2, 2)
        compare(logits(path, made, backend=backend, redundant=4), right, made)


def shuffled(model: torch.nn.Module, world: World) -> None:
    """Move experts with their weights to other ranks."""
    for number, layer in enumerate(module for module in model.modules() if isinstance(module, Experts)):
        assert layer.places is not None
        before = layer.places.placement
        loads = [((expert + number) * 7) % 5 for expert in range(layer.num_experts)]
        after = balance(loads, world.ep.size, before.num_slots)
        assert after != before
        move(layer, world.ep, before, after)
        layer.places.set(after)


def stored(name: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    if name == "gguf":
        return make_tiny_gguf("qwen3_moe", folder, "Q4_0")[0], {"packed": True}
    if name == "mxfp4":
        path, _ = gpt_oss(folder)
    elif name == "plain, biased":
        return make_tiny("gpt_oss", folder)[0], {}
    else:
        path, _ = requantize("qwen3_moe", folder, *STORED[name], **SIZES["qwen3_moe"])
    return path, {"quant": read_checkpoint(path).quant}


FORMATS = [
    "fp8 tensor",
    "fp8 block",
    "int8 channel",
    "awq",
    "gptq act-order",
    "nf4",
    "mxfp4",
    "gguf",
    "plain, biased",
]


@pytest.mark.parametrize("name", FORMATS)
def test_experts_in_every_format_and_during_rebalancing(name: str, tmp_path: Path) -> None:
    """Check that scales move with their experts, and that no kernel reads the old place."""
    path, options = stored(name, tmp_path)
    right = expected(path, **options)
    made = worlds(1, 2)
    for how in ({}, {"redundant": 2, "then": shuffled}):
        for actual, reference in zip(logits(path, made, **how, **options), right, strict=True):
            for one, other in zip(actual, reference, strict=True):
                # Some kernels quantize activations to 8 bits.
                assert (one - other).norm() < 1e-3 * other.norm()
