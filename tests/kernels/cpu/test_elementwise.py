"""Tests of torch operations in tapes: replays with new values give torch's results."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.cpu import native
from quire.kernels.cpu.tape import record, torch_recorded

pytestmark = pytest.mark.skipif(native.library() is None, reason="there are no native kernels here")
DTYPES = [torch.float32, torch.bfloat16]
WEIGHT = torch.randn(70, 40, generator=torch.Generator().manual_seed(1))
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda x, y: F.silu(x),
    "gelu": lambda x, y: F.gelu(x),
    "gelu_tanh": lambda x, y: F.gelu(x, approximate="tanh"),
    "relu": lambda x, y: F.relu(x),
    "neg": lambda x, y: -x,
    "square": lambda x, y: x.pow(2),
    "cube": lambda x, y: x.pow(3.0),
    "mean": lambda x, y: (x.float().pow(2).mean(-1, keepdim=True) * y).to(x.dtype),
    "stack": lambda x, y: torch.stack((-y[..., 1::2], x.type_as(y)[..., ::2]), -1).flatten(-2),
    "repeated": lambda x, y: x.repeat_interleave(2, dim=-1),
    "layer_norm": lambda x, y: F.layer_norm(x, (40,), WEIGHT[0].to(x.dtype), WEIGHT[1].to(x.dtype)),
    "constant": lambda x, y: F.dropout(x, 0.5, training=False) * torch.ones(40, dtype=x.dtype),
    "rsqrt": lambda x, y: torch.rsqrt(x * x + 0.5),
    "tanh": lambda x, y: torch.tanh(x),
    "sigmoid": lambda x, y: torch.sigmoid(x),
    "cos": lambda x, y: x.cos(),
    "sin": lambda x, y: x.sin(),
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / (y * y + 1),
    "number": lambda x, y: x * 0.3 + 2,
    "broadcast": lambda x, y: x * y[:, :1] + y[0],
    "transposed": lambda x, y: (
        x.view(5, 7, 2, 20).transpose(1, 2) * y.view(5, 7, 2, 20).transpose(1, 2)
    ).flatten(2),
    "halves": lambda x, y: torch.cat((-x[..., 20:], x[..., :20]), -1),
    "heads": lambda x, y: torch.cat((x.view(5, 7, 40), y.view(5, 7, 40)), 1).transpose(0, 1).flatten(1),
    "float32": lambda x, y: (x.float() * y).to(x.dtype),
    "linear": lambda x, y: F.linear(x, WEIGHT.to(x.dtype)),
    "copies": lambda x, y: x.t().contiguous().clone() * 2,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_replays_match_torch(name: str, dtype: torch.dtype) -> None:
    """Check numbers of operations, strides, broadcasting, types and rounding."""
    compute = OPERATIONS[name]
    x, y = torch.randn(2, 35, 40).to(dtype).unbind(0)
    with torch.inference_mode():
        with record() as tape, torch_recorded():
            out = compute(x, y)
        assert tape.complete, tape.refused
        for seed in range(2):
            for tensor in (x, y):
                tensor.copy_(3 * torch.randn(35, 40, generator=torch.Generator().manual_seed(seed)))
            tape.replay()
            expected = compute(x, y)
            assert out.dtype == expected.dtype and out.stride() == expected.stride()
            torch.testing.assert_close(
                out, expected, atol=1e-5, rtol=0.01 if dtype == torch.bfloat16 else 1e-5
            )


def test_embeddings_and_positions() -> None:
    table, ids = torch.randn(50, 24).bfloat16(), torch.tensor([[3, 0, 49]])
    frequencies = torch.rand(8)
    with torch.inference_mode():
        with record() as tape, torch_recorded():
            rows, angles = F.embedding(ids, table), ids[..., None].float() * frequencies
        assert tape.complete, tape.refused
        ids.copy_(torch.tensor([[7, 7, 1]]))
        tape.replay()
    assert torch.equal(rows, table[ids]) and torch.equal(angles, ids[..., None].float() * frequencies)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x.softmax(-1),
        lambda x: x.add_(1),
        lambda x: x + x.sum().item(),
        lambda x: torch.add(x, x, alpha=2),
        lambda x: x.long() + 1,
        lambda x: x.pow(4),
        lambda x: x.mean(0),
        lambda x: x.double() + 1,
    ],
)
def test_other_operations_are_refused(compute: Callable[[Tensor], Tensor]) -> None:
    with torch.inference_mode(), record() as tape, torch_recorded():
        compute(torch.randn(3, 40))
    assert not tape.complete


def test_operations_are_refused_outside_the_context() -> None:
    x = torch.randn(3)
    with torch.inference_mode(), record() as tape:
        x * 2
    assert not tape.complete
