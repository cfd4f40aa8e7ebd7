"""Tests of models with SSM states against transformers in float32: rows full of NaN, chunks of all sizes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import load_tiny, random_prompts, run_hf
from state_oracle import VARIANTS, bind_states, make_twins, run_from_checkpoint, run_rows
from torch import Tensor

from quire.kernels.cpu import native
from quire.kernels.cpu.ssm import CPUStateOps
from quire.kernels.reference.ssm import StateOps, StateReference
from quire.layers.ssm import state_layers


@pytest.fixture(scope="module", params=VARIANTS)
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("model")
    return path, make_twins(request.param, path)


def load(path: Path, ops: StateOps) -> Any:
    model = load_tiny(path)
    for layer in state_layers(model.modules()):
        layer.ops = ops
    bind_states(model)
    return model


def near(actual: list[Tensor], expected: list[Tensor]) -> None:
    for logits, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(logits, reference, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("ops", [StateReference(), CPUStateOps()], ids=["torch", "c"])
def test_logits_match_transformers_with_reused_rows(twins: tuple[Path, Any], ops: StateOps) -> None:
    """Check for states lost between chunks, mixed between sequences, or left by an earlier request."""
    if isinstance(ops, CPUStateOps) and native.library() is None:
        pytest.skip("there are no native kernels here")
    path, hf_model = twins
    prompts = random_prompts(23, 9, 80)
    expected = [run_hf(hf_model, ids) for ids in prompts]
    model = load(path, ops)
    near(run_rows(model, prompts, [[23, 9, 80]], [3, 0, 4]), expected)
    chunked = [[10, 0, 17], [1, 4, 56], [1, 1, 1], [1, 3, 1], [10, 0, 5], [0, 1, 0]]
    near(run_rows(model, prompts, chunked, [4, 3, 0]), expected)


def test_every_chunk_size(twins: tuple[Path, Any]) -> None:
    path, hf_model = twins
    ids = random_prompts(19)[0]
    model, expected = load(path, StateReference()), run_hf(hf_model, ids)
    for size in range(1, 10):
        steps = [[min(size, 19 - at)] for at in range(0, 19, size)]
        near(run_rows(model, [ids], steps, [2]), [expected])


def test_row_continues_from_the_checkpoint_of_another(twins: tuple[Path, Any]) -> None:
    path, hf_model = twins
    (ids,) = random_prompts(23)
    model, expected = load(path, StateReference()), run_hf(hf_model, ids)
    for num_cached in (1, 16, 22):
        near([run_from_checkpoint(model, ids, num_cached)], [expected[num_cached:]])
