"""The two ends of a model: token ids and positions to vectors, vectors to logits."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quire.errors import ConfigError
from quire.layers.scope import Scope


class _Table(nn.Module):
    """A vector for each token of the vocabulary."""

    def __init__(self, vocab: int, hidden: int, scope: Scope, *, bias: bool = False) -> None:
        super().__init__()
        self.name = scope.name
        self.sizes_out = (vocab,)
        self.dtype = scope.dtype
        self.method = scope.linear((scope.name,))
        self.method.create(self, hidden, self.sizes_out, bias=bias, dtype=scope.dtype, device=scope.device)

    def targets(self) -> Iterator[tuple[str, Tensor]]:
        (tensors,) = self.method.parts(self, self.sizes_out)
        yield from ((f"{self.name}.{suffix}", tensor) for suffix, tensor in tensors.items())

    def finish(self) -> None:
        self.method.finish(self)


class Embedding(_Table):
    """The vectors of token ids."""

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.method.rows(self, token_ids, self.dtype)


class Positions(nn.Module):
    """The learned vectors of positions; the checkpoint has those of the first in row `first`."""

    def __init__(self, max_len: int, hidden: int, scope: Scope, *, first: int = 0) -> None:
        super().__init__()
        if scope.max_len > max_len:
            raise ConfigError(
                f"max_model_len {scope.max_len} is more than the {max_len} positions that the checkpoint has"
            )
        self.name = f"{scope.name}.weight"
        self.ops = scope.ops
        self.first = first
        self.weight = nn.Parameter(scope.empty(first + max_len, hidden), requires_grad=False)

    def forward(self, positions: Tensor) -> Tensor:
        return self.ops.embed(positions, self.weight[self.first :])

    def targets(self) -> Iterator[tuple[str, Tensor]]:
        yield self.name, self.weight

    def finish(self) -> None:
        """The vectors are used as they were loaded."""


class Head(nn.Module):
    """Logits of the whole vocabulary; `tied` is the embedding whose weight it shares."""

    def __init__(
        self, vocab: int, hidden: int, scope: Scope, *, tied: Embedding | None = None, bias: bool = False
    ) -> None:
        super().__init__()
        self.tied = tied is not None
        self.table: _Table = tied or _Table(vocab, hidden, scope, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.table.method.apply(self.table, x)

    def rows(self, token_ids: list[int]) -> Tensor:
        """[len(token_ids), hidden]: the weights of these tokens."""
        ids = torch.tensor(token_ids, device=next(self.table.parameters()).device)
        return self.table.method.rows(self.table, ids, self.table.dtype)
