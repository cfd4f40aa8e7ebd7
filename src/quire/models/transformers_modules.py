"""Modules of transformers that compute with Quire's kernels: linear layers and RMS norms."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.kernels.cpu import native
from quire.kernels.ops import Ops
from quire.quant.unquantized import product_of

_NORM_TOLERANCE = 0.02
"""Largest accepted error of a norm relative to its largest output: rounding in bfloat16."""


def use_fast_modules(model: nn.Module, ops: Ops) -> None:
    """Let linear layers and RMS norms of a model use Quire's kernels. A norm keeps its own code if this
    computes something else on random inputs, such as a norm with another weight."""
    for module in model.modules():
        if type(module) is nn.Linear and _has_fast_product(module):
            setattr(module, "forward", _FastLinear(module))  # noqa: B010
        elif type(module).__name__.endswith("RMSNorm") and (norm := _fast_norm(module, ops)) is not None:
            setattr(module, "forward", norm)  # noqa: B010


def _has_fast_product(layer: nn.Linear) -> bool:
    """Whether to use Quire's bfloat16 kernels for a layer. On a CPU without bfloat16 instructions, torch's
    kernels are far slower."""
    weight = layer.weight
    is_bfloat16 = weight.is_contiguous() and weight.dtype == torch.bfloat16
    return is_bfloat16 and native.serves(weight.device, torch.bfloat16)


class _FastLinear:
    """Forward pass of a linear layer of transformers by Quire's kernels, which read the same weight."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        self.address = 0
        self.product: Callable[[Tensor], Tensor] = nn.Identity()

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.layer.weight, self.layer.bias
        if x.dtype != weight.dtype:
            return F.linear(x, weight, bias)
        if self.address != weight.data_ptr():  # the kernels keep the address of the weight
            self.product, self.address = product_of(weight, bias, weight.dtype), weight.data_ptr()
        return self.product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], len(weight))


class _FastNorm:
    """Forward pass of an RMS norm of transformers by Quire's kernel, which replaces seven operations."""

    def __init__(self, norm: nn.Module, weight: Tensor, eps: float, ops: Ops) -> None:
        self._plain, self._weight, self._eps, self._ops = norm.forward, weight, eps, ops

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != self._weight.dtype:
            plain: Tensor = self._plain(x)
            return plain
        rows = x.reshape(-1, x.shape[-1])
        return self._ops.norm(rows, self._weight, self._eps).view(x.shape)


def _fast_norm(norm: nn.Module, ops: Ops) -> _FastNorm | None:
    """Return the forward pass that replaces a norm, or None if it would compute something else."""
    (weight, *others), eps = [*norm.parameters(), None], _epsilon_of(norm)
    if weight is None or others != [None] or weight.dim() != 1 or eps is None:
        return None
    fast = _FastNorm(norm, weight, eps, ops)
    x = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    try:
        expected = norm(x).float()
    except (TypeError, ValueError):  # it has further arguments
        return None
    if expected.shape != x.shape:
        return None
    error = (fast(x).float() - expected).abs().max()
    return fast if bool(error <= _NORM_TOLERANCE * expected.abs().max()) else None


def _epsilon_of(norm: nn.Module) -> float | None:
    for name in ("variance_epsilon", "eps"):
        if isinstance(eps := getattr(norm, name, None), float):
            return eps
    return None
