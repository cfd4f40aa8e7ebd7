"""Models whose experts are spread over devices say what one device says."""

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
from torch import Tensor

from quire.checkpoint.model import read_checkpoint
from quire.config.expert_placement import balance
from quire.config.parallel import Rank
from quire.layers.moe import Experts
from quire.parallel.all2all import open_dispatch
from quire.parallel.group import ALONE
from quire.parallel.world import World
from quire.worker.eplb import move

STEPS = [[10, 0, 17], [1, 4, 6], [1, 1, 1]]
"""Parts of prompts, then decodes."""
PROMPTS = random_prompts(12, 5, 24)
OTHERS = [list(reversed(ids)) for ids in PROMPTS]


def worlds(tp: int, dp: int = 1) -> list[World]:
    """As `join` makes them."""
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
    """Of each device, of each prompt; engines have prompts of their own."""
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


def compare(found: list[list[Tensor]], right: list[list[Tensor]], made: list[World]) -> None:
    for world, ours in zip(made, found, strict=True):
        for one, other in zip(ours, right[world.rank.dp], strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


MODELS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {},
    "Qwen3MoeForCausalLM": {},
    "DeepseekV3ForCausalLM": {},
    "GptOssForCausalLM": {},
    "GraniteMoeSharedForCausalLM": {},
    "Llama4ForCausalLM": {},
    "Step3p5ForCausalLM": {},
    "NemotronHForCausalLM": {"moe_latent_size": 24, "mlp_bias": True, "use_bias": True},
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_one_device(name: str, tmp_path: Path) -> None:
    """An expert that no device has or two add, or with the bias of another; shared ones added twice; a token
    that comes back to another, or not at all."""
    path, _ = make_tiny(name, tmp_path, **MODELS[name])
    right = expected(path)
    for strategy in ("linear", "round_robin"):
        made = worlds(2)
        compare(logits(path, made, strategy=strategy), right, made)
    for backend in ("allgather_reducescatter", "all2all"):
        made = worlds(1, 2)
        compare(logits(path, made, backend=backend), right, made)


@pytest.mark.parametrize("backend", ["allgather_reducescatter", "all2all"])
def test_experts_that_do_not_divide(backend: str, tmp_path: Path) -> None:
    path, _ = make_tiny("MixtralForCausalLM", tmp_path)
    right, made = expected(path), worlds(1, 3)
    compare(logits(path, made, backend=backend), [*right, right[1]], made)


def test_devices_that_share_layers_of_several_engines(tmp_path: Path) -> None:
    """A token that two devices of one engine send, or neither; experts with copies, which both compute."""
    path, _ = make_tiny("DeepseekV3ForCausalLM", tmp_path)
    right = expected(path)
    for backend in ("allgather_reducescatter", "all2all"):
        made = worlds(2, 2)
        compare(logits(path, made, backend=backend, redundant=4), right, made)


def shuffled(model: torch.nn.Module, world: World) -> None:
    """Experts on other devices, with their weights."""
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
def test_experts_in_every_format_and_on_their_way(name: str, tmp_path: Path) -> None:
    """A scale that stays behind, or is another's; a kernel that reads where an expert was."""
    path, options = stored(name, tmp_path)
    right = expected(path, **options)
    made = worlds(1, 2)
    for how in ({}, {"redundant": 2, "then": shuffled}):
        for ours, theirs in zip(logits(path, made, **how, **options), right, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                # Some kernels round what they are given to 8 bits.
                assert (one - other).norm() < 1e-3 * other.norm()
