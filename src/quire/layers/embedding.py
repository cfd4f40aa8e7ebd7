"""The two ends of a model: token ids and positions to vectors, vectors to logits."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from quire.errors import ConfigError
from quire.layers.scope import Scope, Target
from quire.quant.weight import LinearShape, Text


class _Table(nn.Module):
    """A vector for each token of the vocabulary."""

    multiply: Callable[[Tensor], Tensor]
    """[T, hidden] -> [T, vocab]; there after `finish`."""

    def __init__(self, vocab: int, hidden: int, scope: Scope, *, bias: bool = False) -> None:
        super().__init__()
        self.name = scope.name
        shape = LinearShape(
            hidden, (scope.group.share(vocab),), bias, scope.dtype, scope.device, narrows=False
        )
        self.weight = scope.linear((scope.name,), shape)

    def targets(self) -> Iterator[Target]:
        (part,) = self.weight.parts()
        for suffix, piece in part.items():
            yield Target(
                f"{self.name}.{suffix}", piece.tensor, piece.outputs, is_text=isinstance(piece, Text)
            )

    def begin(self) -> None:
        self.weight.begin()

    def finish(self) -> None:
        self.weight.finish()
        self.equip()

    def equip(self) -> None:
        self.multiply = self.weight.product


class Embedding(_Table):
    """The vectors of token ids."""

    rows: Callable[[Tensor], Tensor]
    """There after `finish`."""

    def equip(self) -> None:
        super().equip()
        assert self.weight.rows is not None, "a format without rows is not one for embeddings"
        self.rows = self.weight.rows

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.rows(token_ids)


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

    def targets(self) -> Iterator[Target]:
        yield Target(self.name, self.weight)

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
        return self.table.multiply(x)

    def rows(self, token_ids: list[int]) -> Tensor:
        """[len(token_ids), hidden]: the weights of these tokens."""
        weight = self.table.weight
        assert weight.rows is not None
        return weight.rows(torch.tensor(token_ids, device=weight.shape.device))
