"""Vision encoder of PaddleOCR-VL: SigLIP with 2D RoPE over grids of any shape."""

from collections.abc import Sequence

from torch import Tensor, nn

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.qwen import GridFacts
from quire.kernels.reference.encoder import Spans
from quire.layers.norm import LayerNorm
from quire.layers.scope import Scope
from quire.layers.vision import Angles, Learned, VisionAttention, VisionMLP
from quire.models.towers.grid import GridTower, PatchGrid, PatchLayout, interpolate

_PROJECTOR_EPS = 1e-5


class Layer(nn.Module):
    """Pre-norm layer: attention, then MLP, each with a residual."""

    def __init__(self, facts: GridFacts, scope: Scope) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(facts.hidden, facts.norm_eps, scope / "layer_norm1")
        self.attention = VisionAttention(facts.hidden, facts.heads, scope / "self_attn")
        self.mlp_norm = LayerNorm(facts.hidden, facts.norm_eps, scope / "layer_norm2")
        self.mlp = VisionMLP(facts.hidden, facts.intermediate, scope / "mlp", activation=facts.activation)

    def forward(self, x: Tensor, images: Spans, angles: Angles) -> Tensor:
        x = x + self.attention(self.attention_norm.alone(x), images, angles)
        out: Tensor = x + self.mlp(self.mlp_norm.alone(x))
        return out


class PaddleProjector(nn.Module):
    """Norm and MLP that project squares of patches to the decoder's size."""

    def __init__(self, facts: GridFacts, scope: Scope) -> None:
        super().__init__()
        self.size = facts.hidden * facts.merge**2
        self.norm = LayerNorm(facts.hidden, _PROJECTOR_EPS, scope / "pre_norm")
        names = ("linear_1", "linear_2")
        self.mlp = VisionMLP(self.size, self.size, scope, size_out=facts.size_out, names=names)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.norm.alone(x).view(-1, self.size))
        return out


class PaddleOCRVL(GridTower):
    """PaddleOCR-VL encoder: patch and position embeddings, layers, final norm, projector."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(
            facts,
            scope,
            patch_bias=True,
            root="model.visual.vision_model",
            embed="embeddings.patch_embedding",
            is_flat=True,
        )
        tower, vision = self.facts, self.scope
        table = vision / "embeddings" / "position_embedding" / "weight"
        self.learned = Learned(table, tower.positions**2, tower.hidden)
        layers = vision / "encoder" / "layers"
        self.layers = nn.ModuleList(Layer(tower, layers / i) for i in range(tower.depth))
        self.last_norm = LayerNorm(tower.hidden, tower.norm_eps, vision / "post_layernorm")
        # The original checkpoints have another name than the ones transformers saves.
        is_first = scope.is_stored("mlp_AR.linear_1.weight")
        self.projector = PaddleProjector(tower, scope / ("mlp_AR" if is_first else "model.projector"))

    def layout(self, grids: Sequence[PatchGrid]) -> PatchLayout:
        places = self.places(grids)
        positions = interpolate(self.learned.vectors, places, self.sizes(grids), align_corners=False)
        return PatchLayout(self.images(grids), self.angles(places), positions)

    def forward(self, x: Tensor, layout: PatchLayout) -> Tensor:
        """Encode patches [T, hidden] of all items to [T / merge^2, size_out]."""
        images, angles, positions = layout
        x = x + positions
        for layer in self.layers:
            x = layer(x, images, angles)
        out: Tensor = self.projector(self.last_norm.alone(x))
        return out
