"""Nemotron-H and Nemotron 3: each layer is either Mamba-2, attention, experts or a plain MLP."""

from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.mlp import PlainMLP
from quire.layers.moe import MoE
from quire.layers.norm import norm_of
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.layers.ssm import Mamba2Mixer
from quire.models.decoder import Decoder
from quire.models.llama import Attention


class Layer(nn.Module):
    """Pre-norm layer with one mixer and a residual."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__()
        self.norm = norm_of(facts, scope / "norm")
        self.takes_batch = layer.mixer != "none"
        self.mixer: nn.Module
        if layer.mixer == "mamba":
            assert facts.state is not None
            self.mixer = Mamba2Mixer(facts.hidden, facts.state, facts.norm_eps, scope / "mixer")
        elif layer.mixer == "attention":
            self.mixer = Attention(facts, layer, rope, scope / "mixer")
        elif layer.moe:
            self.mixer = MoE(facts, scope)
        else:
            self.mixer = PlainMLP(facts, scope / "mixer", names=("up_proj", "down_proj"))

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.norm(x, residual)
        return self.mixer(x, batch) if self.takes_batch else self.mixer(x), residual


class NemotronH(Decoder):
    """Nemotron-H decoder."""

    Layer = Layer
    body, embedding, last = "backbone", "embeddings", "norm_f"
