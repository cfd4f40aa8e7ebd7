"""LLaVA's tower: CLIP or SigLIP, and two products."""

from torch import Tensor

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.llava import LlavaFacts
from quire.layers.scope import Scope
from quire.layers.vision import VisionMLP
from quire.models.towers.clip import ViT
from quire.models.towers.squares import FixedSizeTower


class Llava(FixedSizeTower):
    """The states of some layers, in the decoder's size."""

    facts: LlavaFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        own = self.facts
        self.vit = ViT(own.vit, max(own.depths), scope)
        self.projector = VisionMLP(
            own.vit.hidden * len(own.depths),
            own.size_out,
            scope / "model" / "multi_modal_projector",
            names=("linear_1", "linear_2"),
            size_out=own.size_out,
            activation=own.activation,
            bias=own.bias,
        )

    def forward(self, pixels: Tensor) -> Tensor:
        states = self.vit(pixels, self.facts.depths)[:, self.facts.first :]
        vectors: Tensor = self.projector(states.flatten(0, 1))
        return vectors.view(len(pixels), -1, self.facts.size_out)
