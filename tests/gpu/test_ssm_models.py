"""Tests of models with SSM states on a GPU against transformers in float32, with captured decodes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import BLOCK_SIZE, make_batch, random_prompts, run_hf
from state_oracle import (
    MAX_ROWS,
    VARIANTS,
    bind_states,
    make_twins,
    on_rows,
    run_from_checkpoint,
    run_rows,
)
from torch import Tensor

from quire.attention.triton_attn import TritonAttention
from quire.checkpoint.model import read_checkpoint
from quire.layers.attention import attention_layers
from quire.layers.moe import MoE
from quire.loader import load_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=VARIANTS)
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    path = tmp_path_factory.mktemp("model")
    return load(path, make_twins(request.param, path))


def load(path: Path, hf_model: Any) -> tuple[Any, Any]:
    model = load_model(
        read_checkpoint(path),
        dtype=torch.float32,
        device=torch.device("cuda"),
        backend=TritonAttention(),
        max_model_len=256,
        show_progress=False,
    )
    for layer in attention_layers(model.modules()):
        shape = (64, BLOCK_SIZE, layer.spec.kv_heads, layer.spec.head_dim)
        layer.bind(*(torch.zeros(shape, device="cuda") for _ in range(2)))
    bind_states(model)
    return model, hf_model


def near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.cpu(), expected, atol=2e-3, rtol=2e-3)


def test_logits_match_transformers(twins: tuple[Any, Any]) -> None:
    model, hf_model = twins
    prompts = random_prompts(23, 9, 80)
    for steps in ([[23, 9, 80]], [[10, 0, 17], [1, 4, 56], [1, 1, 1], [1, 3, 1], [10, 0, 5], [0, 1, 0]]):
        for actual, ids in zip(run_rows(model, prompts, steps, [4, 3, 0], "cuda"), prompts, strict=True):
            near(actual, run_hf(hf_model, ids))


def test_row_continues_from_the_checkpoint_of_another(twins: tuple[Any, Any]) -> None:
    model, hf_model = twins
    (ids,) = random_prompts(80)
    for num_cached in (1, 16, 64, 79):
        near(run_from_checkpoint(model, ids, num_cached, "cuda"), run_hf(hf_model, ids)[num_cached:])


@torch.inference_mode()
def test_captured_decode_continues_from_its_rows_states(twins: tuple[Any, Any]) -> None:
    """Check for rows or positions read at capture, and for padding that changes a state."""
    model, hf_model = twins
    if any(isinstance(module, MoE) for module in model.modules()):
        pytest.skip("experts have graphs in tests of their own")
    (ids,) = random_prompts(12)
    expected, pad = run_hf(hf_model, ids), MAX_ROWS
    padded = make_batch([([1], 11), ([1], 0)], [[1, 2, 3], [0]], BLOCK_SIZE)
    batch = on_rows(padded, [2, pad], "cuda")
    backends = {layer.backend for layer in attention_layers(model.modules())}

    def step() -> Tensor:
        for backend in backends:
            backend.plan(batch)
        out: Tensor = model.logits(model(batch))
        return out

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()
    tables = [4, 5, 6]
    batch.block_tables[1, :3] = torch.tensor(tables, dtype=torch.int32, device="cuda")
    for position, token in enumerate(ids):
        slot = tables[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for tensor, value in (
            (batch.token_ids, token),
            (batch.positions, position),
            (batch.slots, slot),
            (batch.seq_lens, position + 1),
            (batch.rows, 1),
        ):
            tensor[0] = value
        graph.replay()
        near(logits[0], expected[position])
