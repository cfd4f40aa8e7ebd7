"""Classifiers and projections of pooled hidden states."""

import torch
from torch import Tensor, nn

from quire.checkpoint.facts import ArchFacts
from quire.layers.linear import WholeLinear
from quire.layers.scope import Scope


class ClassifierHead(nn.Module):
    """Classifier of a decoder: one projection."""

    name, bias = "score", False

    def __init__(self, facts: ArchFacts, size: int, scope: Scope) -> None:
        super().__init__()
        self.product = WholeLinear(facts.hidden, size, scope / self.name, bias=self.bias)

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.product(states)
        return out


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
        out: Tensor = self.out(self.activate(self.dense(states)))
        return out


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
