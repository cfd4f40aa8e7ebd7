"""The two ends of a model: token ids to vectors, vectors to logits."""

from collections.abc import Iterator

from torch import Tensor, nn

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
