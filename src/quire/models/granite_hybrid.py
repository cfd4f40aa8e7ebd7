"""Granite 4: layers of Mamba-2, and a few that attend; a shared MLP in each, experts beside it in some."""

from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.config.facts import ArchFacts, LayerFacts
from quire.layers.mlp import MLP
from quire.layers.moe import MoE
from quire.layers.norm import norm_of
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.layers.state import Mamba2
from quire.models.decoder import Decoder
from quire.models.llama import Attention


class Layer(nn.Module):
    """Mamba or attention, then feed-forward, each behind a norm and beside a residual."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__()
        self.ops = scope.ops
        self.scale = facts.residual_scale
        self.mixer_norm = norm_of(facts, scope / "input_layernorm")
        self.mixer: nn.Module
        if layer.mixer == "mamba":
            assert facts.state is not None
            self.mixer = Mamba2(facts.hidden, facts.state, facts.norm_eps, scope / "mamba")
        else:
            self.mixer = Attention(facts, layer, rope, scope / "self_attn")
        self.mlp_norm = norm_of(facts, scope / "post_attention_layernorm")
        self.mlp: nn.Module
        if layer.moe:
            self.mlp = MoE(facts, scope)
        else:
            self.mlp = MLP(facts, scope / "shared_mlp", names=("input_linear", "output_linear"))

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.mixer_norm(x, residual)
        x, residual = self.mlp_norm(self._scaled(self.mixer(x, batch)), residual)
        return self._scaled(self.mlp(x)), residual

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.scale == 1 else self.ops.scale(x, self.scale)


class GraniteHybrid(Decoder):
    """The model."""

    Layer = Layer
