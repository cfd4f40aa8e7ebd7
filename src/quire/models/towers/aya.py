"""The tower of Aya Vision and Command A Vision: SigLIP over tiles, whose patches are gathered."""

from torch import Tensor
from torch.nn import functional as F

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.aya import AyaFacts
from quire.layers.linear import WholeLinear
from quire.layers.norm import LayerNorm
from quire.layers.scope import Scope
from quire.models.towers.clip import ViT
from quire.models.towers.squares import FixedSizeTower, gathered


class Aya(FixedSizeTower):
    """The tiles of an image."""

    facts: AyaFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        own = self.facts
        depth = max(own.depths, default=own.vit.layers)
        self.vit = ViT(own.vit, depth, scope, is_normed=not own.depths)
        projector = scope / "model" / "multi_modal_projector"
        self.norm: LayerNorm | None = None
        if own.norm_eps:
            self.norm = LayerNorm(own.size_in, own.norm_eps, projector / "layernorm")
        self.up = WholeLinear(own.size_in, own.intermediate, projector / "linear_1", bias=True)
        self.down = WholeLinear(own.intermediate // 2, own.size_out, projector / "linear_2", bias=True)

    def forward(self, pixels: Tensor) -> Tensor:
        states = self.vit(pixels, self.facts.depths)[:, self.facts.first :]
        x = gathered(states, self.facts.gather)
        flat = x.flatten(0, 1)
        up, gate = self.up(flat if self.norm is None else self.norm.alone(flat)).chunk(2, -1)
        vectors: Tensor = self.down(F.silu(gate) * up)
        return vectors.view(*x.shape[:2], -1)
