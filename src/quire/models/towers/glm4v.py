"""Vision encoder of GLM-4.1V, 4.5V and GLM-OCR: Qwen2.5-VL layers and a downsampling convolution."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn
from torch.nn import functional as F

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.qwen import GridFacts
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.scope import Scope
from quire.layers.vision import Learned, PatchEmbedding, VisionMLP, VisionStyle, vision_layers
from quire.models.towers.grid import QWEN2_5, GridTower, PatchGrid


def _style(facts: GridFacts) -> VisionStyle:
    """Return the style of GLM-V: no biases, except optionally of QKV. GLM-OCR has QK norms, and biases of all
    projections or of none."""
    style = replace(QWEN2_5, bias=facts.qkv_bias, out_bias=False, mlp_bias=False)
    if not facts.head_norms:
        return style
    return replace(
        style,
        head_norms=("q_norm", "k_norm"),
        qk_eps=facts.norm_eps,
        out_bias=facts.qkv_bias,
        mlp_bias=facts.qkv_bias,
    )


class Glm4vMerger(nn.Module):
    """Merger of GLM-V: a convolution of each square of patches to a vector, projection, norm, GELU, gated
    MLP."""

    def __init__(self, facts: GridFacts, scope: Scope) -> None:
        super().__init__()
        self.shape, size, inner = (facts.merge**2, facts.hidden), facts.size_out, scope / "merger"
        kernel, names = (facts.hidden, facts.merge, facts.merge), QWEN2_5.mlp_names
        self.squares = PatchEmbedding(kernel, size, scope / "downsample")
        self.first = PatchEmbedding((size,), size, inner / "proj", bias=False)
        self.norm = LayerNorm(size, 1e-5, inner / "post_projection_norm")
        self.mlp = VisionMLP(size, facts.merger, inner, names=names, activation=facts.activation, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.squares(x.view(-1, *self.shape).transpose(1, 2).flatten(1))
        return self.mlp(F.gelu(self.norm.normalize(self.first(x))))


class Glm4v(GridTower):
    """GLM-V encoder: patch embedding, learned positions, layers, downsampling merger."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope, patch_bias=True)
        tower, scope = self.facts, self.scope
        if tower.positions:
            self.first_norm = RMSNorm(tower.hidden, tower.norm_eps, scope / "post_conv_layernorm")
            places = scope / "embeddings" / "position_embedding" / "weight"
            self.learned = Learned(places, tower.positions**2, tower.hidden)
        self.layers = vision_layers(tower, tower.depth, scope / "blocks", _style(tower))
        self.last_norm = RMSNorm(tower.hidden, tower.norm_eps, scope / "post_layernorm")
        self.merger = Glm4vMerger(tower, scope)

    def positions(self, places: Tensor, grids: Sequence[PatchGrid]) -> Tensor | None:
        """Return the learned position at the center of each patch, by bicubic interpolation."""
        if not self.facts.positions:
            return None
        side = self.facts.positions
        at = (places + 0.5) / self.sizes(grids) * 2 - 1
        table = self.learned.vectors.float().view(1, side, side, -1).permute(0, 3, 1, 2)
        sampled = F.grid_sample(
            table, at.flip(1)[None, :, None], mode="bicubic", padding_mode="border", align_corners=False
        )
        return sampled[0, :, :, 0].t().to(self.learned.vectors.dtype)
