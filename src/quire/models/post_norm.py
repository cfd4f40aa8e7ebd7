"""Decoders with norms after attention and MLP: GLM-4, Trinity, HyperCLOVA X, OLMo 2 and 3, EXAONE 4."""

from torch import Tensor

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.linear import ColumnLinear
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.models import llama
from quire.models.decoder import decoder_of
from quire.models.gemma import SandwichLayer

Glm4 = decoder_of(SandwichLayer, after_norms=("post_self_attn_layernorm", "post_mlp_layernorm"))


class GatedOutput(llama.Attention):
    """Llama attention with an elementwise gate on its output."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        self.ops = scope.ops
        self.gate = ColumnLinear(facts.hidden, facts.heads * facts.head_dim, scope / "gate_proj")

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        gate: Tensor = self.gate(x, batch)
        return self.out(self.ops.weigh(self.mix(x, self.qkv, batch), gate), batch)


class ScaledSandwichLayer(SandwichLayer):
    """Layer with norms before and after attention and MLP, and scaled outputs."""

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_norm(x, residual)
        x = self._scaled(self.attended_norm.normalize(self.attention(x, batch)))
        x, residual = self.mlp_norm(x, residual)
        return self._scaled(self.fed_norm.normalize(self.mlp(x, batch))), residual


Afmoe = decoder_of(
    llama.layer_with(GatedOutput, SandwichLayer),
    norms=("input_layernorm", "pre_mlp_layernorm"),
    after_norms=("post_attention_layernorm", "post_mlp_layernorm"),
)
"""AfMoE decoder (Trinity)."""
HyperCLOVAX = decoder_of(ScaledSandwichLayer, after_norms=("post_norm1", "post_norm2"))
"""HyperCLOVA X decoder with post-norms."""


class PostNormLayer(llama.Layer):
    """Attention, then MLP; the output of each is normed before the residual addition."""

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x = x if residual is None else self.ops.add(residual, x)
        x = self.ops.add(x, self.attention_norm.normalize(self.attention(x, batch)))
        return self.mlp_norm.normalize(self.mlp(x, batch)), x


Olmo2 = decoder_of(PostNormLayer, norms=("post_attention_layernorm", "post_feedforward_layernorm"))
"""Decoder of OLMo 2 and 3, FlexOlmo and EXAONE 4."""
