"""Vision encoder of LLaVA: CLIP or SigLIP, and a two-layer projector."""

from torch import Tensor

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.llava import LlavaFacts
from quire.layers.scope import Scope
from quire.layers.vision import VisionMLP
from quire.models.towers.clip import ViT
from quire.models.towers.squares import FixedSizeTower


class Llava(FixedSizeTower):
    """LLaVA encoder: the states of some layers, projected to the decoder's size."""

    facts: LlavaFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        tower = self.facts
        self.vit = ViT(tower.vit, max(tower.depths), scope)
        self.projector = VisionMLP(
            tower.vit.hidden * len(tower.depths),
            tower.size_out,
            scope / "model" / "multi_modal_projector",
            names=("linear_1", "linear_2"),
            size_out=tower.size_out,
            activation=tower.activation,
            bias=tower.bias,
        )

    def forward(self, pixels: Tensor) -> Tensor:
        states = self.vit(pixels, self.facts.depths)[:, self.facts.first :]
        vectors: Tensor = self.projector(states.flatten(0, 1))
        return vectors.view(len(pixels), -1, self.facts.size_out)
