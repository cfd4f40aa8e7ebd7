"""Mamba, Falcon-Mamba and Mamba-2: SSM layers only."""

from torch import Tensor, nn

from quire.attention.batch import Batch
from quire.checkpoint.facts import ArchFacts, LayerFacts
from quire.layers.norm import norm_of
from quire.layers.rope import Rope
from quire.layers.scope import Scope
from quire.layers.ssm import mixer_of
from quire.models.decoder import Decoder


class Layer(nn.Module):
    """Pre-norm layer: SSM mixer with a residual."""

    def __init__(self, facts: ArchFacts, layer: LayerFacts, rope: Rope, scope: Scope) -> None:
        super().__init__()
        self.norm = norm_of(facts, scope / "norm")
        self.mixer = mixer_of(facts, layer, scope / "mixer")

    def forward(self, x: Tensor, residual: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        x, residual = self.norm(x, residual)
        return self.mixer(x, batch), residual


class MambaModel(Decoder):
    """Mamba decoder."""

    Layer = Layer
    body, embedding, last = "backbone", "embeddings", "norm_f"
