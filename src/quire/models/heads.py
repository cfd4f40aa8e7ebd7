"""Classifiers and projections of pooled hidden states."""

from collections.abc import Iterator
from dataclasses import replace
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
    """Classifier of a decoder: one projection."""

    name, bias = "score", False

    def __init__(self, facts: ArchFacts, size: int, scope: Scope) -> None:
        super().__init__()
        self.product = WholeLinear(facts.hidden, size, scope / self.name, bias=self.bias)

    def forward(self, states: Tensor) -> Tensor:
        return self.product(states)


class EachScore(ClassifierHead):
    """Token classifier of a decoder: one projection with a bias."""

    bias = True


class Value(ClassifierHead):
    """Value head of a reward model: one projection to the reward of a token."""

    name = "v_head"


class TokenClassifier(ClassifierHead):
    """Token classifier of BERT: one projection of every token."""

    name, bias = "classifier", True


class Projection(ClassifierHead):
    """Projection of hidden states to smaller embeddings."""

    name, bias = "embedding_proj_layer", True


class Reward(nn.Module):
    """Reward head: dense layer, ReLU, projection to the reward of a token."""

    dense_name, out_name, activate = "score.0", "score.2", staticmethod(torch.relu)
    in_body = False
    """Whether the dense layer belongs to the body of an encoder."""

    def __init__(self, facts: ArchFacts, size: int, scope: Scope) -> None:
        super().__init__()
        body = facts.encoder.prefix if self.in_body and facts.encoder is not None else ""
        self.dense = WholeLinear(facts.hidden, facts.hidden, scope / body / self.dense_name, bias=True)
        self.out = WholeLinear(facts.hidden, size, scope / self.out_name, bias=True)

    def forward(self, states: Tensor) -> Tensor:
        return self.out(self.activate(self.dense(states)))


class DistilBertClassifier(Reward):
    """DistilBERT classifier: dense layer, ReLU, output projection."""

    dense_name, out_name = "pre_classifier", "classifier"


class RobertaClassifier(Reward):
    """RoBERTa classifier: dense layer, tanh, output projection."""

    dense_name, out_name, activate = "classifier.dense", "classifier.out_proj", staticmethod(torch.tanh)


class BertClassifier(Reward):
    """BERT classifier: pooler (dense layer and tanh), output projection."""

    dense_name, out_name, activate = "pooler.dense", "classifier", staticmethod(torch.tanh)
    in_body = True


# ---- output layers of one task


class TaskLinear(nn.Module):
    """Output layer of one task: a projection of each hidden state."""

    def __init__(self, facts: ArchFacts, head: TaskHead, body: Any, scope: Scope) -> None:
        super().__init__()
        scope = replace(scope, adapters=None)
        self.product = WholeLinear(facts.hidden, head.size, scope / head.name, bias=head.bias)

    def forward(self, states: Tensor) -> Tensor:
        return self.product(states)


class MaskedLMNames(NamedTuple):
    """Checkpoint names of the head of a masked language model."""

    dense: str
    norm: str
    decoder: str
    """Output projection; the embedding if it is not stored."""
    bias: str
    activation: str | None = None
    """Activation, if it is not that of the body."""


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
"""Names by architecture."""


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
        x = self.norm.alone(self.ops.activate(self.dense(states), self.activation))
        logits: Tensor = self.decoder(x) + self.bias
        return logits.relu().log1p()
