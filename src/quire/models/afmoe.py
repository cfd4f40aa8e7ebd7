"""Trinity (AfMoE): gated attention output, and a norm before and after attention and MLP. HyperCLOVA X."""

from torch import Tensor

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.linear import ColumnLinear
from quire.layers.norm import norm_of
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.models import llama
from quire.models.decoder import Decoder, LayerFactory


class Attention(llama.Attention):
    """Llama attention with an elementwise gate on its output."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        self.ops = scope.ops
        self.gate = ColumnLinear(facts.hidden, facts.heads * facts.head_dim, scope / "gate_proj")

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        gate: Tensor = self.gate(x)
        out: Tensor = self.out(self.ops.weigh(self.mix(x, self.qkv, batch), gate))
        return out


class Layer(llama.Layer):
    """Attention, then MLP or experts, each with a norm before and after and a residual."""

    Mixer: LayerFactory = Attention
    norm_names = ("input_layernorm", "pre_mlp_layernorm")
    after_names = ("post_attention_layernorm", "post_mlp_layernorm")

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        self.attended_norm, self.fed_norm = (norm_of(facts, scope / name) for name in self.after_names)

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_norm(x, residual)
        x = self._scaled(self.attended_norm.alone(self.attention(x, batch)))
        x, residual = self.mlp_norm(x, residual)
        return self._scaled(self.fed_norm.alone(self.mlp(x))), residual


class Afmoe(Decoder):
    """AfMoE decoder."""

    Layer = Layer


class HyperCLOVAXLayer(Layer):
    """AfMoE layer without attention gates, with HyperCLOVA X's names."""

    Mixer: LayerFactory = llama.Attention
    norm_names = llama.Layer.norm_names
    after_names = ("post_norm1", "post_norm2")


class HyperCLOVAX(Decoder):
    """HyperCLOVA X decoder with post-norms."""

    Layer = HyperCLOVAXLayer
