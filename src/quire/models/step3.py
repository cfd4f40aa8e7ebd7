"""Step-3.5, and the decoder of Step-3.7: attention with a gate for each head."""

from torch import Tensor

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.linear import ColumnLinear
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.models import llama
from quire.models.decoder import Decoder, LayerFactory


class GatedHeads(llama.Attention):
    """Llama attention with a scalar gate on the output of each head."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__(facts, layer, rope, scope)
        self.ops, self.head_dim = scope.ops, facts.head_dim
        self.gate = ColumnLinear(facts.hidden, facts.heads, scope / "g_proj")

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        gate: Tensor = self.gate(x)
        mixed = self.mix(x, self.qkv, batch)
        self.ops.weigh(mixed.view(-1, self.head_dim), gate.view(-1, 1))
        out: Tensor = self.out(mixed)
        return out


class Layer(llama.Layer):
    """Llama layer with gated attention heads."""

    Mixer: LayerFactory = GatedHeads


class Step35(Decoder):
    """Step-3.5 decoder."""

    Layer = Layer
