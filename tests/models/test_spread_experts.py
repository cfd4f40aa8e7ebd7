"""Models whose experts are spread over devices say what one device says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import load_tiny, make_tiny, random_prompts, run_paged
from threads import groups, run_threads
from torch import Tensor

from quire.comm.dispatch import open_dispatch
from quire.comm.group import ALONE
from quire.comm.world import World
from quire.config.ranks import Rank

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
