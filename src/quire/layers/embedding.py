"""The two ends of a model: token ids to vectors, vectors to logits."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional as F

from quire.layers.scope import Scope


class Embedding(nn.Module):
    def __init__(self, vocab: int, hidden: int, scope: Scope) -> None:
        super().__init__()
        self.name = scope.name
        self.weight = nn.Parameter(scope.empty(vocab, hidden), requires_grad=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)

    def targets(self) -> Iterator[tuple[str, Tensor]]:
        yield f"{self.name}.weight", self.weight

    def finish(self) -> None:
        """The weight is used as it was loaded."""


class Head(nn.Module):
    """Logits of the whole vocabulary; `tied` is the embedding whose weight it shares."""

    def __init__(self, vocab: int, hidden: int, scope: Scope, *, tied: Embedding | None = None) -> None:
        super().__init__()
        self.name = scope.name
        self.tied = tied is not None
        self.weight = tied.weight if tied else nn.Parameter(scope.empty(vocab, hidden), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).float()

    def targets(self) -> Iterator[tuple[str, Tensor]]:
        if not self.tied:
            yield f"{self.name}.weight", self.weight

    def finish(self) -> None:
        """The weight is used as it was loaded."""
