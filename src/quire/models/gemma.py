"""Gemma 2 and 3: norms before and after attention and MLP."""

from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.norm import norm_of
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.models import llama
from quire.models.decoder import decoder_of


class SandwichLayer(llama.Layer):
    """Attention, then MLP or experts, each with a norm before and after and a residual."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        attended, fed = scope.names.after_norms
        self.attended_norm, self.fed_norm = norm_of(facts, scope / attended), norm_of(facts, scope / fed)

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.run(x, residual, batch, self.attention)

    def run(
        self, x: Tensor, residual: Tensor | None, batch: Batch, attention: nn.Module
    ) -> tuple[Tensor, Tensor]:
        """Run the layer with this attention."""
        x, residual = self.attention_norm(x, residual)
        x, residual = self.mlp_norm(self.attended_norm.normalize(attention(x, batch)), residual)
        return self.fed_norm.normalize(self.mlp(x, batch)), residual


GemmaModel = decoder_of(
    SandwichLayer,
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    after_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
)
