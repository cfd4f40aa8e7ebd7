"""GLM-4-0414: Llama with additional norms after attention and MLP."""

from torch import Tensor

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.norm import norm_of
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.models import llama
from quire.models.decoder import Decoder


class Layer(llama.Layer):
    """Attention, then MLP, each with a norm before and after and a residual."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        self.attended_norm = norm_of(facts, scope / "post_self_attn_layernorm")
        self.fed_norm = norm_of(facts, scope / "post_mlp_layernorm")

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_norm(x, residual)
        x, residual = self.mlp_norm(self.attended_norm.alone(self.attention(x, batch)), residual)
        return self.fed_norm.alone(self.mlp(x)), residual


class Glm4(Decoder):
    """GLM-4 decoder."""

    Layer = Layer
