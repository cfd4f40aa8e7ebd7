"""Classifiers and projections of pooled hidden states."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.task_heads import TaskHead
from quire.errors import ConfigError
from quire.layers.embedding import Head
from quire.layers.linear import WholeLinear
from quire.layers.norm import norm_of
from quire.layers.scope import LoadedModule, Scope, Target
from quire.quant.weight import frozen_parameter


class ClassifierHead(nn.Module):
    """Classifier: one projection, which is `name` in checkpoints."""

    def __init__(
        self, facts: ArchFacts, size: int, scope: Scope, *, name: str = "score", bias: bool = False
    ) -> None:
        super().__init__()
        self.product = WholeLinear(facts.hidden, size, scope / name, bias=bias)

    def forward(self, states: Tensor) -> Tensor:
        return self.product(states)


TokenScoreHead = partial(ClassifierHead, bias=True)
"""Token classifier of a decoder."""
ValueHead = partial(ClassifierHead, name="v_head")
"""Value head of a reward model: one projection to the reward of a token."""
TokenClassifier = partial(ClassifierHead, name="classifier", bias=True)
"""Token classifier of BERT: one projection of every token."""
Projection = partial(ClassifierHead, name="embedding_proj_layer", bias=True)
"""Projection of hidden states to smaller embeddings."""


class Reward(nn.Module):
    """Reward head: dense layer, activation, projection to the reward of a token or to classes. `dense` and
    `out` are names in checkpoints; with `in_body` the dense layer belongs to the body of an encoder."""

    def __init__(
        self,
        facts: ArchFacts,
        size: int,
        scope: Scope,
        *,
        dense: str = "score.0",
        out: str = "score.2",
        activate: Callable[[Tensor], Tensor] = torch.relu,
        in_body: bool = False,
    ) -> None:
        super().__init__()
        body = facts.encoder.prefix if in_body and facts.encoder is not None else ""
        self.activate = activate
        self.dense = WholeLinear(facts.hidden, facts.hidden, scope / body / dense, bias=True)
        self.out = WholeLinear(facts.hidden, size, scope / out, bias=True)

    def forward(self, states: Tensor) -> Tensor:
        return self.out.product(self.activate(self.dense.product(states)))


DistilBertClassifier = partial(Reward, dense="pre_classifier", out="classifier")
RobertaClassifier = partial(Reward, dense="classifier.dense", out="classifier.out_proj", activate=torch.tanh)
BertClassifier = partial(Reward, dense="pooler.dense", out="classifier", activate=torch.tanh, in_body=True)
"""Sequence classifier of BERT: the pooler (dense layer and tanh), then a projection to the classes."""


# ---- output layers of one task


class TaskLinear(ClassifierHead):
    """Output layer of one task of a pooling model: a projection of each hidden state."""

    def __init__(self, facts: ArchFacts, head: TaskHead, body: Any, scope: Scope) -> None:
        scope = replace(scope, adapters=None)
        super().__init__(facts, head.size, scope, name=head.name, bias=head.bias)


class MaskedLMNames(NamedTuple):
    """Checkpoint names of the head of a masked language model."""

    dense: str
    norm: str
    decoder: str
    """Name of the output projection; if the checkpoint does not store it, the token embedding is used."""
    bias: str
    activation: str | None = None
    """Activation function; None for that of the encoder."""


_ROBERTA = MaskedLMNames("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias", "gelu")
_BERT = MaskedLMNames(
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder",
    "cls.predictions.bias",
)
_MASKED_LM = {
    "BertModel": _BERT,
    "DistilBertModel": MaskedLMNames(
        "vocab_transform", "vocab_layer_norm", "vocab_projector", "vocab_projector.bias"
    ),
    "ErnieModel": _BERT,
    "ModernBertModel": MaskedLMNames("head.dense", "head.norm", "decoder", "decoder.bias"),
    "RobertaModel": _ROBERTA,
    "XLMRobertaModel": _ROBERTA,
}
"""Checkpoint names of the masked language model head, by the architecture of the encoder."""


class MaskedLM(LoadedModule):
    """Head of a masked language model: log(1 + relu(logits)) of each token of the vocabulary (SPLADE)."""

    def __init__(self, facts: ArchFacts, head: TaskHead, body: Any, scope: Scope) -> None:
        super().__init__()
        if facts.architecture not in _MASKED_LM:
            raise ConfigError(
                f"SPLADE is not supported for {facts.architecture}; supported: {', '.join(_MASKED_LM)}"
            )
        names, encoder = _MASKED_LM[facts.architecture], facts.encoder
        assert encoder is not None
        scope = replace(scope, adapters=None)
        self.ops, self.activation = scope.ops, names.activation or facts.activation
        has_bias = True
        if facts.architecture == "ModernBertModel":
            self.activation, has_bias = encoder.classifier_activation, encoder.classifier_bias
        self.dense = WholeLinear(facts.hidden, facts.hidden, scope / names.dense, bias=has_bias)
        self.norm = norm_of(facts, scope / names.norm)
        is_stored = scope.is_stored(f"{names.decoder}.weight")
        tied = None if is_stored else body.token_embedding
        self.decoder = Head(facts.vocab, facts.hidden, scope / names.decoder, tied=tied)
        both = (f"{names.decoder}.bias", names.bias)
        self.bias_name = next(filter(scope.is_stored, both), names.bias)
        self.bias = frozen_parameter(scope.empty(facts.vocab))

    def targets(self) -> Iterator[Target]:
        yield Target(self.bias_name, self.bias)

    def forward(self, states: Tensor) -> Tensor:
        """Return the weights [N, vocab] of hidden states [N, hidden]."""
        x = self.norm.normalize(self.ops.activate(self.dense(states), self.activation))
        logits: Tensor = self.decoder(x) + self.bias
        return logits.relu().log1p()
