"""What models share that draft on the states of another one."""

from typing import Protocol

from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.layers.embedding import TokenEmbedding


class Speaks(Protocol):
    """A target: what a draft borrows where it has none of its own."""

    embed: TokenEmbedding | None
    embed_scale: float

    def logits(self, hidden: Tensor) -> Tensor: ...


class DraftHead(nn.Module):
    """A model whose input are a token and what the target, or it itself, made of the one before."""

    embed: TokenEmbedding | None
    """None: the target's."""

    def __init__(self) -> None:
        super().__init__()
        self._target: list[Speaks] = []
        """None of its modules."""

    def adopt(self, target: Speaks) -> None:
        """Called once, when both are loaded."""
        self._target = [target]

    def embedded(self, token_ids: Tensor) -> Tensor:
        target = self._target[0]
        embed = target.embed if self.embed is None else self.embed
        assert embed is not None, "the target's first layers are elsewhere"
        x: Tensor = embed(token_ids)
        return x if target.embed_scale == 1 else x * target.embed_scale

    def states(self, taken: Tensor) -> Tensor:
        """[T, hidden] of what was taken from the target."""
        return taken

    def forward(self, batch: Batch, states: Tensor) -> tuple[Tensor, Tensor]:
        """[T, hidden] each: what `logits` wants, and the states for the tokens behind these."""
        raise NotImplementedError

    def logits(self, x: Tensor) -> Tensor:
        """[N, hidden] -> [N, tokens that it knows]"""
        return self._target[0].logits(x)

    def names(self, ids: Tensor) -> Tensor:
        """What tokens of its own are called by the target."""
        return ids
