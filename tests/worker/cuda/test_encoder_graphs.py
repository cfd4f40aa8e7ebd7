"""Tests of CUDA graphs for batches of a vision encoder with recurring shapes."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.attention.torch_sdpa import TorchSDPA
from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.qwen import qwen2_5_vl
from quire.checkpoint.reader import ConfigReader
from quire.config.vllm_names import translate
from quire.kernels.ops import choose
from quire.layers.scope import Loads, Scope
from quire.models.towers import GraphableTower
from quire.models.towers.qwen_vl import Qwen2_5VL
from quire.worker.cuda import encoder_graphs
from quire.worker.cuda.encoder_graphs import MAX_GRAPHS, MOST_VECTORS, TIMES, Run, TowerGraphs

GRIDS = [(1, 4, 6), (2, 8, 4), (1, 2, 2), (1, 16, 12)]


def tower_on(device: torch.device, dtype: torch.dtype) -> Qwen2_5VL:
    """Return an encoder of two layers, one of which has windowed attention."""
    vision = {"out_hidden_size": 64, "hidden_size": 64, "num_heads": 2, "depth": 2, "intermediate_size": 96}
    vision |= {"patch_size": 4, "in_chans": 3, "window_size": 16, "fullatt_block_indexes": [1]}
    media = qwen2_5_vl(
        ConfigReader("dummy", {"hidden_size": 64, "num_attention_heads": 2, "vision_config": vision})
    )[1]
    facts = ArchFacts("", 8, 64, 8, 2, 2, 32, 1e-6, (), media=media)
    tower = Qwen2_5VL(facts, Scope(dtype, device, TorchSDPA(), 64, ops=choose(device, dtype)))
    for parameter in tower.parameters():
        parameter.normal_(std=0.1)
    for layer in tower.modules():
        if isinstance(layer, Loads):
            layer.finish()
    return tower


@pytest.fixture
def cpu() -> Iterator[Qwen2_5VL]:
    with torch.inference_mode():
        yield tower_on(torch.device("cpu"), torch.float32)


def stand_in(run: Run, pool: Any) -> tuple[list[Tensor], Callable[[], None]]:
    """Replace a graph with a function that writes the same outputs to the same tensors."""
    outputs = run()

    def play() -> None:
        for output, made in zip(outputs, run(), strict=True):
            output.copy_(made)

    return outputs, play


def batch(tower: Qwen2_5VL, *grids: tuple[int, ...]) -> tuple[list[dict[str, Tensor]], int]:
    """Return random pixels and the number of their output vectors."""
    size = tower.patches.weight.shape[1]
    items = [{"pixels": torch.randn(*grid, size, device=tower.device)} for grid in grids]
    return items, sum(item["pixels"].shape[:3].numel() for item in items) // 4


def check(tower: Qwen2_5VL, graphs: TowerGraphs, turns: int) -> None:
    """Run batches of a few shapes in any order and check that no output is overwritten by the next."""
    chance, before = random.Random(0), list[tuple[Tensor, Tensor]]()
    for _ in range(turns):
        items, num_vectors = batch(tower, *chance.choice([GRIDS[:1], GRIDS[1:3], GRIDS[3:], GRIDS]))
        actual = graphs.encode("image", items, num_vectors)
        before += zip(actual, tower.encode("image", items), strict=True)
    for output, expected in before:
        torch.testing.assert_close(output, expected, atol=0, rtol=0)


def test_replayed_graph_matches_eager(cpu: Qwen2_5VL) -> None:
    graphs = TowerGraphs(cpu, stand_in)
    assert isinstance(cpu, GraphableTower)
    check(cpu, graphs, TIMES)
    assert not len(graphs), "without a memory limit no graph is kept"
    graphs.max_bytes = 1
    check(cpu, graphs, 40)
    assert len(graphs) == 4
    graphs.forget()
    check(cpu, graphs, 5)
    assert len(graphs) < 4


def test_number_of_captured_graphs_is_bounded(cpu: Qwen2_5VL, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = TowerGraphs(cpu, stand_in)
    graphs.max_bytes = 100
    for width in range(2, 2 * MAX_GRAPHS + 6, 2):
        for _ in range(TIMES + 1):
            graphs.encode("image", *batch(cpu, (1, 2, width)))
    assert len(graphs) == MAX_GRAPHS
    items, _ = batch(cpu, (1, 2, 40))
    for _ in range(TIMES + 1):
        graphs.encode("image", items, MOST_VECTORS + 1)
    assert len(graphs) == MAX_GRAPHS and max(key[1][0][0][1][2] for key in graphs._graphs) < 40
    taken = iter(range(0, 10_000, 60))
    monkeypatch.setattr(encoder_graphs, "_taken_bytes", lambda: next(taken))
    graphs.forget()
    num_seen = []
    for width in range(2, 12, 2):
        for _ in range(TIMES):
            graphs.encode("image", *batch(cpu, (1, 2, width)))
        num_seen.append(len(graphs))
    assert num_seen == [1, 0, 1, 0, 1], "the second graph exceeds the limit"


def test_encoder_that_cannot_be_captured_runs_eagerly(cpu: Qwen2_5VL) -> None:
    def refuse(run: Run, pool: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = TowerGraphs(cpu, refuse)
    graphs.max_bytes = 1
    check(cpu, graphs, 30)
    assert not len(graphs) and not graphs.max_bytes


def test_encoder_graphs_use_vllms_option() -> None:
    assert translate({"compilation_config": {"cudagraph_mm_encoder": True}}) == {"cudagraph_mm_encoder": True}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@torch.inference_mode()
def test_replay_on_gpu_matches_eager() -> None:
    tower = tower_on(torch.device("cuda"), torch.bfloat16)
    graphs = TowerGraphs(tower)
    graphs.max_bytes = 1 << 30
    check(tower, graphs, 40)
    assert len(graphs) == 4 and 0 < graphs._num_bytes < 1 << 28
