"""BERT, RoBERTa, XLM-R, ERNIE, DistilBERT and MPNet, with their classifiers."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.kernels.reference.encoder import Spans
from quire.layers.embedding import TokenEmbedding
from quire.layers.encoder_attention import EncoderAttention, spans
from quire.layers.linear import WholeLinear
from quire.layers.mlp import PlainMLP
from quire.layers.norm import norm_of
from quire.layers.scope import Scope, Target
from quire.parallel.group import ALONE
from quire.quant.sharding import divided


class BertNames(NamedTuple):
    """Checkpoint names of the layers and their parts."""

    stack: str
    qkv: tuple[str, str, str]
    out: str
    attention_norm: str
    mlp: tuple[str, str]
    mlp_norm: str


BERT = BertNames(
    "encoder.layer",
    ("self.query", "self.key", "self.value"),
    "output.dense",
    "attention.output.LayerNorm",
    ("intermediate.dense", "output.dense"),
    "output.LayerNorm",
)
DISTILBERT = BertNames(
    "transformer.layer",
    ("q_lin", "k_lin", "v_lin"),
    "out_lin",
    "sa_layer_norm",
    ("ffn.lin1", "ffn.lin2"),
    "output_layer_norm",
)
MPNET = BERT._replace(qkv=("attn.q", "attn.k", "attn.v"), out="attn.o", attention_norm="attention.LayerNorm")


class BertEmbeddings(nn.Module):
    """Sum of word, position, token type and task embeddings (as far as the model has them), and a norm."""

    def __init__(self, facts: ArchFacts, scope: Scope, norm: Scope | None = None) -> None:
        super().__init__()
        assert facts.encoder is not None
        self.first, self.padding = facts.encoder.first_position, facts.encoder.padding
        self.words = TokenEmbedding(facts.vocab, facts.hidden, scope / "word_embeddings")
        whole = replace(scope, group=ALONE)  # too small to shard
        self.positions: TokenEmbedding | None = None
        self.types: TokenEmbedding | None = None
        if count := facts.encoder.positions:
            self.positions = TokenEmbedding(count, facts.hidden, whole / "position_embeddings")
        if count := facts.encoder.token_types:
            self.types = TokenEmbedding(count, facts.hidden, whole / "token_type_embeddings")
        self.tasks: TokenEmbedding | None = None
        if count := facts.encoder.task_types:
            self.tasks = TokenEmbedding(count, facts.hidden, whole / "task_type_embeddings")
        self.norm = norm_of(facts, norm or scope / "LayerNorm")

    def forward(self, batch: Batch) -> Tensor:
        x: Tensor = self.words(batch.token_ids)
        if self.types is not None:
            types = torch.zeros_like(batch.token_ids) if batch.token_types is None else batch.token_types
            x = x + self.types(types)
        if self.positions is not None:
            x = x + self.positions(self._position_ids(batch))
        if self.tasks is not None:
            x = x + self.tasks(torch.zeros_like(batch.token_ids))
        return self.norm.alone(x)

    def _position_ids(self, batch: Batch) -> Tensor:
        """Return the position ids of tokens, not counting padding tokens."""
        position_ids = batch.positions + self.first
        if self.padding is None:
            return position_ids
        is_padding = batch.token_ids == self.padding
        count = is_padding.cumsum(0)
        starts = torch.arange(len(position_ids), device=position_ids.device) - batch.positions
        num_before = count - (count - is_padding.long())[starts]
        return torch.where(is_padding, self.first - 1, position_ids - num_before)


class Layer(nn.Module):
    """Post-norm layer: attention, then MLP, each followed by residual addition and norm."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, names: BertNames, scope: Scope) -> None:
        super().__init__()
        self.attention = EncoderAttention(facts, layer, scope / "attention", names=names.qkv, out=names.out)
        self.attention_norm = norm_of(facts, scope / names.attention_norm)
        self.mlp = PlainMLP(facts, scope, names=names.mlp)
        self.mlp_norm = norm_of(facts, scope / names.mlp_norm)

    def forward(self, x: Tensor, batch: Batch, texts: Spans, bias: Tensor | None) -> Tensor:
        x = self.attention_norm.added(self.attention(x, batch.positions, texts, bias), x)
        return self.mlp_norm.added(self.mlp(x), x)


class Bert(nn.Module):
    """BERT encoder: embeddings and layers."""

    names = BERT

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__()
        assert facts.encoder is not None
        body = scope / facts.encoder.prefix
        self.embeddings = BertEmbeddings(facts, body / "embeddings")
        self.layers = nn.ModuleList(
            Layer(facts, layer, self.names, body / self.names.stack / i)
            for i, layer in enumerate(facts.layers)
        )

    def forward(self, batch: Batch) -> Tensor:
        """Return hidden states [T, hidden]."""
        x: Tensor = self.embeddings(batch)
        texts, bias = spans(batch), self.bias(batch)
        for layer in self.layers:
            x = layer(x, batch, texts, bias)
        return x

    def bias(self, batch: Batch) -> Tensor | None:
        """Return the bias of the attention scores of all layers; None if there is none."""
        return None


class DistilBert(Bert):
    """DistilBERT encoder: BERT with other checkpoint names."""

    names = DISTILBERT


class RelativeAttentionBias(nn.Module):
    """Relative attention bias per head, by bucketed distance of two tokens as in T5: exact buckets for near
    tokens, logarithmic ones beyond, in both directions."""

    classes, farthest = 32, 128

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__()
        assert facts.encoder is not None
        self.shard = divided(scope.group, facts.heads)
        self.name = f"{scope.name}.weight"
        self.table = nn.Parameter(scope.empty(facts.encoder.distances, self.shard.size), requires_grad=False)

    def targets(self) -> Iterator[Target]:
        yield Target(self.name, self.table, 1, (self.shard,))

    def finish(self) -> None:
        """Keep the table as loaded."""

    def forward(self, length: int) -> Tensor:
        """Return the bias [heads, length, length]."""
        positions = torch.arange(length, device=self.table.device)
        offsets = positions[:, None] - positions
        half = self.classes // 2
        exact = half // 2
        distance = offsets.abs()
        growth = (distance.clamp(min=1) / exact).log() / math.log(self.farthest / exact)
        far = (exact + (growth * (half - exact)).long()).clamp(max=half - 1)
        buckets = half * (offsets < 0) + torch.where(distance < exact, distance, far)
        return self.table[buckets].permute(2, 0, 1).contiguous()


class MPNet(Bert):
    """MPNet encoder: BERT with a relative attention bias."""

    names = MPNET

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        assert facts.encoder is not None
        self.distances = RelativeAttentionBias(
            facts, scope / facts.encoder.prefix / "encoder" / "relative_attention_bias"
        )

    def bias(self, batch: Batch) -> Tensor | None:
        bias: Tensor = self.distances(batch.max_query_len)
        return bias


class DistilBertClassifier(nn.Module):
    """DistilBERT classifier: dense layer, ReLU, output projection."""

    def __init__(self, facts: ArchFacts, num_labels: int, scope: Scope) -> None:
        super().__init__()
        self.dense = WholeLinear(facts.hidden, facts.hidden, scope / "pre_classifier", bias=True)
        self.classifier = WholeLinear(facts.hidden, num_labels, scope / "classifier", bias=True)

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.dense(states).relu())
        return out


class BertClassifier(nn.Module):
    """BERT classifier: pooler (dense layer and tanh), output projection."""

    def __init__(self, facts: ArchFacts, num_labels: int, scope: Scope) -> None:
        super().__init__()
        assert facts.encoder is not None
        body = scope / facts.encoder.prefix
        self.pooler = WholeLinear(facts.hidden, facts.hidden, body / "pooler" / "dense", bias=True)
        self.classifier = WholeLinear(facts.hidden, num_labels, scope / "classifier", bias=True)

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.pooler(states).tanh())
        return out


class RobertaClassifier(nn.Module):
    """RoBERTa classifier: dense layer, tanh, output projection."""

    def __init__(self, facts: ArchFacts, num_labels: int, scope: Scope) -> None:
        super().__init__()
        head = scope / "classifier"
        self.dense = WholeLinear(facts.hidden, facts.hidden, head / "dense", bias=True)
        self.out = WholeLinear(facts.hidden, num_labels, head / "out_proj", bias=True)

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.out(self.dense(states).tanh())
        return out


class TokenClassifier(nn.Module):
    """Token classifier: one projection of every token."""

    def __init__(self, facts: ArchFacts, num_labels: int, scope: Scope) -> None:
        super().__init__()
        self.classifier = WholeLinear(facts.hidden, num_labels, scope / "classifier", bias=True)

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.classifier(states)
        return out
