"""Command R and Command A: attention and MLP in parallel after one norm."""

from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.norm import norm_of
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.models.decoder import Decoder, LayerFactory
from quire.models.llama import Attention, feed_forward


class Layer(nn.Module):
    """Parallel layer: attention and MLP read the same normed input, and their outputs are added."""

    Mixer: LayerFactory = Attention
    attention_name, norm_name = "self_attn", "input_layernorm"

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__()
        self.ops = scope.ops
        self.norm = norm_of(facts, scope / self.norm_name)
        self.attention = self.Mixer(facts, layer, rope, scope / self.attention_name)
        self.mlp = self.feed_forward(facts, layer, scope)

    def feed_forward(self, facts: ArchFacts, layer: LayerFacts, scope: Scope) -> nn.Module:
        return feed_forward(facts, layer, scope)

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.norm(x, residual)
        return self.ops.add(self.attention(x, batch), self.mlp(x)), residual


class Cohere(Decoder):
    """Command R and Command A decoder."""

    Layer = Layer
