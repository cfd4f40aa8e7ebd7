"""PoolingModel: a model's body, and the classifier or projection of the pooled hidden states."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.pooling import PoolingFacts
from quire.checkpoint.sentence_transformers import DenseFacts
from quire.layers.embedding import Head
from quire.layers.scope import LoadedModule, Scope, Target
from quire.models import CLASSIFIERS, MODELS, TOKEN_CLASSIFIERS, heads
from quire.quant.weight import frozen_parameter

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "identity": lambda x: x,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "tanh": torch.tanh,
}


class Dense(LoadedModule):
    """Dense module of sentence-transformers: a linear layer and an activation, in float32."""

    def __init__(self, facts: DenseFacts, device: torch.device) -> None:
        super().__init__()
        self.name = f"{facts.folder}.linear"
        self.activate = _ACTIVATIONS[facts.activation]
        empty = torch.empty(facts.size_out, facts.size_in, dtype=torch.float32, device=device)
        self.weight = frozen_parameter(empty)
        self.bias = frozen_parameter(empty[:, 0].clone()) if facts.bias else None

    def targets(self) -> Iterator[Target]:
        yield Target(f"{self.name}.weight", self.weight)
        if self.bias is not None:
            yield Target(f"{self.name}.bias", self.bias)

    def forward(self, states: Tensor) -> Tensor:
        return self.activate(F.linear(states, self.weight, self.bias))


class TokenScore(nn.Module):
    """Classifier that uses the LM head: the scores are the logits of some tokens or, with `two_way`, the
    logit of the second token minus that of the first."""

    def __init__(self, head: Head, token_ids: list[int], *, two_way: bool) -> None:
        super().__init__()
        self.head: Head | None = head
        self.token_ids = token_ids
        self.two_way = two_way
        self.weight: Tensor | None = None

    def finalize(self) -> None:
        """Replace the LM head by its rows for the scored tokens, or by their difference, once after
        loading."""
        assert self.head is not None
        rows = self.head.rows(self.token_ids)
        self.weight, self.head = (rows[1:] - rows[:1] if self.two_way else rows), None

    def forward(self, states: Tensor) -> Tensor:
        assert self.weight is not None, "finalize() comes first"
        return F.linear(states, self.weight)


class PoolingModel(nn.Module):
    """A model's body without the LM head, with an optional classifier or projection."""

    def __init__(
        self, facts: ArchFacts, scope: Scope, *, pooling: PoolingFacts, label_ids: list[int]
    ) -> None:
        super().__init__()
        self.hidden, self.dtype = facts.size_out, scope.dtype
        self.temperature = pooling.temperature
        self.dense = nn.ModuleList(Dense(dense, scope.device) for dense in pooling.dense)
        self.body: nn.Module = MODELS[facts.architecture](facts, scope)
        head = _take_head(self.body)
        self.classifier: nn.Module | None = None
        if label_ids:
            assert head is not None, "only a model with an LM head has token logits"
            self.classifier = TokenScore(head, label_ids, two_way=pooling.two_way)
        elif pooling.task == "classify":
            self.classifier = _build_classifier(facts, pooling, scope)
        elif pooling.projection:
            self.classifier = heads.Projection(facts, pooling.size, scope)
        self.task_heads = nn.ModuleDict()
        for task_head in pooling.task_heads:
            if task_head.kind:
                make = _TASK_HEADS[task_head.kind]
                self.task_heads[task_head.task] = make(facts, task_head, self.body, scope)

    def finalize(self) -> None:
        """Prepare the classifier once after loading."""
        if isinstance(self.classifier, TokenScore):
            self.classifier.finalize()

    def forward(self, batch: Batch) -> Tensor:
        """Return hidden states [T, hidden]."""
        return self.body(batch)

    def vectors(self, states: Tensor, task: str) -> Tensor:
        """Return the embeddings or classifier scores [N, size] of pooled hidden states [N, hidden], in
        float32 or the model's dtype. A `task` with an output layer of its own uses this layer."""
        if task in self.task_heads:
            return self.task_heads[task](states.to(self.dtype))
        if self.classifier is None:
            for dense in self.dense:
                states = dense(states.float())
            return states
        out: Tensor = self.classifier(states.to(self.dtype))
        return out if self.temperature == 1 else out / self.temperature


def _build_classifier(facts: ArchFacts, pooling: PoolingFacts, scope: Scope) -> nn.Module:
    table = TOKEN_CLASSIFIERS if pooling.head == "tokens" else CLASSIFIERS
    if pooling.head in _HEADS and facts.architecture not in table:
        classifier: nn.Module = _HEADS[pooling.head](facts, pooling.size, scope)
    else:
        classifier = table[facts.architecture](facts, pooling.size, scope)
    return classifier


_TASK_HEADS: dict[str, Callable[..., nn.Module]] = {"linear": heads.TaskLinear, "masked_lm": heads.MaskedLM}
"""Output layers of single tasks, by `TaskHead.kind`."""
_HEADS: dict[str, Callable[..., nn.Module]] = {
    "": heads.ClassifierHead,
    "tokens": heads.TokenScoreHead,
    "reward": heads.Reward,
    "value": heads.ValueHead,
}
"""Classifier heads of decoders, by `PoolingFacts.head`."""


def _take_head(model: nn.Module) -> Head | None:
    """Remove the LM head from the model and return it; None if there is none."""
    names: Iterator[str] = (name for name, child in model.named_children() if isinstance(child, Head))
    if (name := next(names, None)) is None:
        return None
    head: Head = getattr(model, name)
    delattr(model, name)
    return head
