"""DraftHead: the base of draft models that read the hidden states of a target model."""

from typing import Protocol

from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.layers.embedding import TokenEmbedding


class TargetModel(Protocol):
    """The target model: provides the embedding and LM head that a draft model does not have."""

    embed: TokenEmbedding | None
    embed_scale: float

    def logits(self, hidden: Tensor) -> Tensor: ...


class DraftHead(nn.Module):
    """A draft model that reads a token and the hidden state of the token before, from the target or from
    itself."""

    embed: TokenEmbedding | None
    """Token embedding; None to use the target's."""

    def __init__(self) -> None:
        super().__init__()
        self._target: list[TargetModel] = []
        """Target model, in a list so that it is not registered as a submodule."""

    def adopt(self, target: TargetModel) -> None:
        """Set the target model, once after both are loaded."""
        self._target = [target]

    def embedded(self, token_ids: Tensor) -> Tensor:
        target = self._target[0]
        embed = target.embed if self.embed is None else self.embed
        assert embed is not None, "the target's embedding is on another pipeline stage"
        x: Tensor = embed(token_ids)
        return x if target.embed_scale == 1 else x * target.embed_scale

    def states(self, taken: Tensor) -> Tensor:
        """Return the input states [T, hidden] from the target's hidden states."""
        return taken

    def forward(self, batch: Batch, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of `logits` and the states for the next tokens, [T, hidden] each."""
        raise NotImplementedError

    def logits(self, x: Tensor) -> Tensor:
        """Return logits [N, draft vocabulary] of x [N, hidden]."""
        return self._target[0].logits(x)

    def names(self, ids: Tensor) -> Tensor:
        """Map ids of the draft vocabulary to ids of the target."""
        return ids
