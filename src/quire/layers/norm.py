"""RMSNorm, with the residual addition that always comes before it."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quire.layers.scope import Scope


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computed in float32 and rounded before the weight is applied, as transformers does."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, scope: Scope) -> None:
        super().__init__()
        self.name = scope.name
        self.eps = eps
        self.weight = nn.Parameter(scope.empty(size), requires_grad=False)

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual)."""
        residual = x if residual is None else x + residual
        return self.plain(residual), residual

    def plain(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def targets(self) -> Iterator[tuple[str, Tensor]]:
        yield f"{self.name}.weight", self.weight

    def finish(self) -> None:
        """The weight is used as it was loaded."""
