"""Vision encoder of PaliGemma: SigLIP and one projection."""

from torch import Tensor

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.paligemma import PaliGemmaFacts
from quire.layers.linear import WholeLinear
from quire.layers.scope import Scope
from quire.models.towers.clip import ViT
from quire.models.towers.squares import FixedSizeTower


class PaliGemma(FixedSizeTower):
    """PaliGemma encoder: every patch becomes one vector."""

    facts: PaliGemmaFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        tower = self.facts
        self.vit = ViT(tower.vit, tower.vit.layers, scope, is_normed=True)
        projector = scope / "model" / "multi_modal_projector" / "linear"
        self.projector = WholeLinear(tower.vit.hidden, tower.size_out, projector, bias=True)

    def forward(self, pixels: Tensor) -> Tensor:
        vectors: Tensor = self.projector(self.vit(pixels).flatten(0, 1))
        return vectors.view(len(pixels), -1, self.facts.size_out)
