"""RMSNorm, with the residual addition that always comes before it."""

from collections.abc import Iterator

from torch import Tensor, nn

from quire.layers.scope import Scope


class RMSNorm(nn.Module):
    """RMS norm, with the residual added in where there is one."""

    def __init__(self, size: int, eps: float, scope: Scope) -> None:
        super().__init__()
        self.name = scope.name
        self.ops = scope.ops
        self.eps = eps
        self.weight = nn.Parameter(scope.empty(size), requires_grad=False)

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual), the latter in the memory of `residual` or x."""
        if residual is None:
            return self.ops.norm(x, self.weight, self.eps), x
        return self.ops.add_norm(x, residual, self.weight, self.eps), residual

    def targets(self) -> Iterator[tuple[str, Tensor]]:
        yield f"{self.name}.weight", self.weight

    def finish(self) -> None:
        """The weight is used as it was loaded."""
