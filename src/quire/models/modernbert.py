"""ModernBERT: pre-norm encoder with gated MLPs, RoPE, and local attention in most layers."""

from functools import cache

from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.kernels.reference.encoder import Spans
from quire.layers.embedding import TokenEmbedding
from quire.layers.encoder_attention import EncoderAttention, spans
from quire.layers.linear import WholeLinear
from quire.layers.mlp import MLP
from quire.layers.norm import norm_of
from quire.layers.rope import Rope
from quire.layers.scope import Scope


class Layer(nn.Module):
    """Pre-norm layer: attention, then MLP, each with a residual. The first layer has no attention norm."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope, *, first: bool) -> None:
        super().__init__()
        self.attention_norm = None if first else norm_of(facts, scope / "attn_norm")
        self.attention = EncoderAttention(facts, layer, scope / "attn", names=("Wqkv",), out="Wo", rope=rope)
        self.mlp_norm = norm_of(facts, scope / "mlp_norm")
        self.mlp = MLP(facts, scope / "mlp", names=("Wi", "Wo"))

    def forward(self, x: Tensor, residual: Tensor, batch: Batch, texts: Spans) -> tuple[Tensor, Tensor]:
        """Return (x, residual), [T, hidden] each, whose sum is the output of the layer; tokens attend within
        their text (a token range of `texts`)."""
        if self.attention_norm is not None:
            x = self.attention_norm.add_and_normalize(x, residual)
        x = self.mlp_norm.add_and_normalize(self.attention(x, batch, texts), residual)
        return self.mlp(x, batch), residual


class ModernBert(nn.Module):
    """ModernBERT encoder: embedding, layers, final norm."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__()
        assert facts.encoder is not None
        body = scope / facts.encoder.prefix
        self.embed = TokenEmbedding(facts.vocab, facts.hidden, body / "embeddings" / "tok_embeddings")
        self.embed_norm = norm_of(facts, body / "embeddings" / "norm")
        rope = cache(lambda rope: Rope(rope, scope))
        self.layers = nn.ModuleList(
            Layer(facts, layer, rope(layer.rope), body / "layers" / i, first=i == 0)
            for i, layer in enumerate(facts.layers)
        )
        self.norm = norm_of(facts, body / "final_norm")

    @property
    def token_embedding(self) -> TokenEmbedding:
        return self.embed

    def forward(self, batch: Batch) -> Tensor:
        """Return hidden states [T, hidden] after the final norm."""
        x = residual = self.embed_norm.normalize(self.embed(batch.token_ids, batch))
        texts = spans(batch)
        for layer in self.layers:
            x, residual = layer(x, residual, batch, texts)
        return self.norm.add_and_normalize(x, residual)


class ModernBertClassifier(nn.Module):
    """ModernBERT classifier: dense layer, activation, norm, output projection."""

    def __init__(self, facts: ArchFacts, num_labels: int, scope: Scope) -> None:
        super().__init__()
        assert facts.encoder is not None
        self.ops, self.activation = scope.ops, facts.encoder.classifier_activation
        head, bias = scope / "head", facts.encoder.classifier_bias
        self.dense = WholeLinear(facts.hidden, facts.hidden, head / "dense", bias=bias)
        self.norm = norm_of(facts, head / "norm")
        self.classifier = WholeLinear(facts.hidden, num_labels, scope / "classifier", bias=True)

    def forward(self, states: Tensor) -> Tensor:
        x = self.ops.activate(self.dense.product(states), self.activation)
        return self.classifier.product(self.norm.normalize(x))
