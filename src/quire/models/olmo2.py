"""OLMo 2 and 3, EXAONE 4: norms after attention and MLP in place of norms before them."""

from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.norm import norm_of
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.models.decoder import Decoder
from quire.models.llama import Attention, feed_forward


class Layer(nn.Module):
    """Attention, then MLP; the output of each is normed before the residual addition."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__()
        self.ops = scope.ops
        self.attention = Attention(facts, layer, rope, scope / "self_attn")
        self.attention_norm = norm_of(facts, scope / "post_attention_layernorm")
        self.mlp = feed_forward(facts, layer, scope)
        self.mlp_norm = norm_of(facts, scope / "post_feedforward_layernorm")

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x = x if residual is None else self.ops.add(residual, x)
        x = self.ops.add(x, self.attention_norm.alone(self.attention(x, batch)))
        return self.mlp_norm.alone(self.mlp(x)), x


class Olmo2(Decoder):
    """OLMo 2 and 3 decoder."""

    Layer = Layer
