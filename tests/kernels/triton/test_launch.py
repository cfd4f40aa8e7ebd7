"""Tests of launching kernels and compiling them ahead."""

from typing import Any

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.checkpoint.facts import Routing
from quire.kernels.triton import matmul, moe_topk
from quire.kernels.triton.launch import allocate_indices, compiling, launch
from quire.kernels.triton.ops import TritonOps

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Kernel:
    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def run(self, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        assert warmup
        self.compiled.append((*args, *options.values()))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.launched.append((grid, *args, *options.values()))


def test_launch_passes_grid_and_arguments() -> None:
    kernel = Kernel()
    launch(kernel, 2, 3)(7, WIDTH=1)
    assert kernel.launched == [((2, 3), 7, 1)]
    assert not kernel.compiled


def test_uninitialized_expert_positions_are_valid_indices() -> None:
    """Check that expert positions are zeros where kernels are only compiled, so that no index is out of
    bounds.
    """
    kind = {"dtype": torch.int32, "device": torch.device("cpu")}
    with compiling():
        assert not any(allocate_indices(1 << 16, **kind).any() for _ in range(3))
    assert allocate_indices(4, 5, **kind).shape == (4, 5)


def test_uninitialized_expert_ids_are_valid_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_topk, "_route", Kernel())
    how = Routing(8, "softmax", renormalized=True, scale=1.0)
    with compiling():
        for _ in range(8):
            torch.full((512, 8), -1, dtype=torch.int32)  # memory that the ids may be allocated in
            ids, _ = moe_topk.route(torch.zeros(512, 16), how)
            assert not ids.any()


def test_each_specialization_is_compiled_once_and_not_run() -> None:
    kernel, other = Kernel(), Kernel()
    x = torch.zeros(64)
    calls: list[tuple[Any, ...]] = [
        (x, 32, None),
        (x, 48, None),  # same as the first
        (x[1:], 32, None),  # another alignment
        (x, 7, None),
        (x, 1, None),
        (x.to(torch.int32), 32, None),
        (x, 32, x),
        ((x, x), 32, None),
        ((x, x[1:]), 32, None),
        (TensorDescriptor(x, [8, 8], [8, 1], [4, 8]), 32, None),
        (TensorDescriptor(x, [8, 8], [8, 1], [8, 8]), 32, None),
    ]
    with compiling():
        for args in calls:
            launch(kernel, 1)(*args, WIDTH=1)
        launch(kernel, 1)(x, 32, None, WIDTH=2)
        launch(other, 1)(x, 32, None, WIDTH=1)
    assert len(kernel.compiled) == len(calls) - 1 + 1
    assert len(other.compiled) == 1
    assert not kernel.launched + other.launched
    launch(kernel, 1)(x)
    assert len(kernel.launched) == 1


def test_failure_ends_compiling() -> None:
    with pytest.raises(ValueError, match="no"), compiling():
        raise ValueError("no")
    kernel = Kernel()
    launch(kernel, 1)(7)
    assert kernel.launched


@pytest.mark.gpu
@on_gpu
def test_compiled_ahead_on_the_gpu() -> None:
    x = torch.randn(16, 256, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    norm = torch.ones(256, device="cuda", dtype=torch.bfloat16)
    residual = x.clone()
    with compiling():
        for _ in range(3):
            TritonOps().add_norm(x, residual, norm, 1e-5)
            matmul.linear(x, weight)
    assert torch.equal(x, residual), "the kernel ran"
    torch.testing.assert_close(matmul.linear(x, weight), x @ weight.t(), rtol=0.02, atol=0.02)
