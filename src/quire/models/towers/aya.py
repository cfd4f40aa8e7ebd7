"""Vision encoder of Aya Vision and Command A Vision: SigLIP over tiles, pixel shuffle, gated projector."""

from torch import Tensor
from torch.nn import functional as F

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.aya import AyaFacts
from quire.layers.linear import WholeLinear
from quire.layers.norm import LayerNorm
from quire.layers.scope import Scope
from quire.models.towers.clip import ViT
from quire.models.towers.squares import FixedSizeTower, pixel_shuffle


class Aya(FixedSizeTower):
    """Aya Vision encoder over the tiles of an image."""

    facts: AyaFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        tower = self.facts
        depth = max(tower.depths, default=tower.vit.layers)
        self.vit = ViT(tower.vit, depth, scope, is_normed=not tower.depths)
        projector = scope / "model" / "multi_modal_projector"
        self.norm: LayerNorm | None = None
        if tower.norm_eps:
            self.norm = LayerNorm(tower.size_in, tower.norm_eps, projector / "layernorm")
        self.up = WholeLinear(tower.size_in, tower.intermediate, projector / "linear_1", bias=True)
        self.down = WholeLinear(tower.intermediate // 2, tower.size_out, projector / "linear_2", bias=True)

    def forward(self, pixels: Tensor) -> Tensor:
        states = self.vit(pixels, self.facts.depths)[:, self.facts.first :]
        x = pixel_shuffle(states, self.facts.gather)
        flat = x.flatten(0, 1)
        up, gate = self.up(flat if self.norm is None else self.norm.alone(flat)).chunk(2, -1)
        vectors: Tensor = self.down(F.silu(gate) * up)
        return vectors.view(*x.shape[:2], -1)
