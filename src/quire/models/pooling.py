"""PoolingModel: a model's body, and what makes classes of the states that are pooled from it."""

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn import functional as F

from quire.attention.batch import Batch
from quire.config.facts import ArchFacts
from quire.config.pooling import PoolingFacts
from quire.layers.embedding import Head
from quire.layers.linear import WholeLinear
from quire.layers.scope import Scope
from quire.models import CLASSIFIERS, MODELS


class Score(nn.Module):
    """The classifier of a decoder: one product."""

    def __init__(self, facts: ArchFacts, num_labels: int, scope: Scope) -> None:
        super().__init__()
        self.score = WholeLinear(facts.hidden, num_labels, scope / "score")

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.score(states)
        return out


class Projection(nn.Module):
    """What makes small vectors of states: one product."""

    def __init__(self, facts: ArchFacts, size: int, scope: Scope) -> None:
        super().__init__()
        self.product = WholeLinear(facts.hidden, size, scope / "embedding_proj_layer", bias=True)

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.product(states)
        return out


class TokenScore(nn.Module):
    """A classifier out of the output head: the logits of some tokens, or of two how much the second is
    above the first."""

    def __init__(self, head: Head, token_ids: list[int], *, two_way: bool) -> None:
        super().__init__()
        self.head: Head | None = head
        self.token_ids = token_ids
        self.two_way = two_way
        self.weight: Tensor | None = None

    def settle(self) -> None:
        """The weights are loaded: keep the rows of these tokens."""
        assert self.head is not None
        rows = self.head.rows(self.token_ids)
        self.weight, self.head = (rows[1:] - rows[:1] if self.two_way else rows), None

    def forward(self, states: Tensor) -> Tensor:
        assert self.weight is not None, "settle() comes first"
        return F.linear(states, self.weight)


class PoolingModel(nn.Module):
    """A body without its output head, and a classifier or another product where one is asked for."""

    def __init__(
        self, facts: ArchFacts, scope: Scope, *, pooling: PoolingFacts, label_ids: list[int]
    ) -> None:
        super().__init__()
        self.hidden = facts.hidden
        self.body: nn.Module = MODELS[facts.architecture](facts, scope)
        head = _take_head(self.body)
        self.classifier: nn.Module | None = None
        if label_ids:
            assert head is not None, "only a model with an output head has logits of tokens"
            self.classifier = TokenScore(head, label_ids, two_way=pooling.two_way)
        elif pooling.task == "classify":
            known = facts.architecture in CLASSIFIERS
            make = CLASSIFIERS[facts.architecture] if known else Score
            self.classifier = make(facts, pooling.size, scope)
        elif pooling.projection:
            self.classifier = Projection(facts, pooling.size, scope)

    def settle(self) -> None:
        """Called once after loading."""
        if isinstance(self.classifier, TokenScore):
            self.classifier.settle()

    def forward(self, batch: Batch) -> Tensor:
        """[T, hidden]"""
        out: Tensor = self.body(batch)
        return out

    def vectors(self, states: Tensor) -> Tensor:
        """[N, hidden] pooled states -> [N, size]."""
        return states if self.classifier is None else self.classifier(states)


def _take_head(model: nn.Module) -> Head | None:
    """The output head, no longer part of the model."""
    found: Iterator[str] = (name for name, child in model.named_children() if isinstance(child, Head))
    if (name := next(found, None)) is None:
        return None
    head: Head = getattr(model, name)
    delattr(model, name)
    return head
