"""Vision encoder of Gemma 3: SigLIP with patches averaged to soft tokens."""

from torch import Tensor, nn

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.gemma import GemmaFacts
from quire.layers.norm import RMSNorm
from quire.layers.scope import Scope
from quire.layers.vision import Learned
from quire.models.towers.clip import ViT
from quire.models.towers.squares import FixedSizeTower


class GemmaProjector(nn.Module):
    """Mean of each square of patches, norm, projection to the decoder's size."""

    def __init__(self, facts: GemmaFacts, scope: Scope) -> None:
        super().__init__()
        self.side, self.square = facts.side, facts.vit.side // facts.side
        norm = scope / "mm_soft_emb_norm"
        self.norm = RMSNorm(facts.vit.hidden, facts.vit.norm_eps, norm, plus_one=True)
        weight = scope / "mm_input_projection_weight"
        self.weight = Learned(weight, facts.vit.hidden, facts.size_out)

    def forward(self, x: Tensor) -> Tensor:
        """Project [N, patches, hidden] to [N, side * side, size_out]."""
        grid = x.view(len(x), self.side, self.square, self.side, self.square, -1)
        means = grid.mean((2, 4)).flatten(0, 2)
        return (self.norm.alone(means) @ self.weight.vectors).view(len(x), self.side**2, -1)


class Gemma3(FixedSizeTower):
    """Gemma 3 encoder over an image and its optional crops."""

    facts: GemmaFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        self.vit = ViT(self.facts.vit, self.facts.vit.layers, scope, is_normed=True)
        self.projector = GemmaProjector(self.facts, scope / "model" / "multi_modal_projector")

    def forward(self, pixels: Tensor) -> Tensor:
        vectors: Tensor = self.projector(self.vit(pixels))
        return vectors
