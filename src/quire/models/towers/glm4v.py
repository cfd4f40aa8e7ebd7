"""Vision encoder of GLM-4.1V, 4.5V and GLM-OCR: Qwen2.5-VL layers and a downsampling convolution."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.qwen import GridFacts
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.scope import Scope
from quire.layers.vision import Learned, PatchEmbedding, VisionAttention, VisionMLP
from quire.models.towers import qwen2_5_vl
from quire.models.towers.grid import GridTower, PatchGrid, PatchLayout

_MLP = ("gate_proj", "up_proj", "down_proj")


class Layer(qwen2_5_vl.Layer):
    """Qwen2.5-VL layer without biases, except optionally of QKV."""

    def mixer(self, facts: GridFacts, scope: Scope, **options: Any) -> VisionAttention:
        defaults: dict[str, Any] = {
            "names": ("qkv",),
            "out": "proj",
            "bias": facts.qkv_bias,
            "out_bias": False,
        }
        return VisionAttention(facts.hidden, facts.heads, scope, **defaults | options)

    def feed(self, facts: GridFacts, scope: Scope, bias: bool = False) -> VisionMLP:
        inner, activation = facts.intermediate, facts.activation
        return VisionMLP(facts.hidden, inner, scope, names=_MLP, activation=activation, bias=bias)


class OcrLayer(Layer):
    """GLM-OCR layer: QK norms, and biases of all projections or of none."""

    def mixer(self, facts: GridFacts, scope: Scope, **options: Any) -> VisionAttention:
        norms: dict[str, Any] = {"head_norms": ("q_norm", "k_norm"), "eps": facts.norm_eps}
        return super().mixer(facts, scope, out_bias=facts.qkv_bias, **norms)

    def feed(self, facts: GridFacts, scope: Scope, bias: bool = False) -> VisionMLP:
        return super().feed(facts, scope, bias=facts.qkv_bias)


class Glm4vMerger(nn.Module):
    """Projection, norm, GELU and gated MLP of merged patches."""

    def __init__(self, facts: GridFacts, scope: Scope) -> None:
        super().__init__()
        size = facts.size_out
        self.first = PatchEmbedding((size,), size, scope / "proj", bias=False)
        self.norm = LayerNorm(size, 1e-5, scope / "post_projection_norm")
        self.mlp = VisionMLP(size, facts.merger, scope, names=_MLP, activation=facts.activation, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(F.gelu(self.norm.alone(self.first(x))))
        return out


class Glm4v(GridTower):
    """GLM-V encoder: patch embedding, learned positions, layers, downsampling, merger."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope, patch_bias=True)
        tower, scope = self.facts, self.scope
        self.first_norm: RMSNorm | None = None
        if tower.positions:
            self.first_norm = RMSNorm(tower.hidden, tower.norm_eps, scope / "post_conv_layernorm")
            places = scope / "embeddings" / "position_embedding" / "weight"
            self.learned = Learned(places, tower.positions**2, tower.hidden)
        kind = OcrLayer if tower.head_norms else Layer
        self.layers = nn.ModuleList(kind(tower, scope / "blocks" / i) for i in range(tower.depth))
        self.last_norm = RMSNorm(tower.hidden, tower.norm_eps, scope / "post_layernorm")
        kernel = (tower.hidden, tower.merge, tower.merge)
        self.squares = PatchEmbedding(kernel, tower.size_out, scope / "downsample")
        self.merger = Glm4vMerger(tower, scope / "merger")

    def layout(self, grids: Sequence[PatchGrid]) -> PatchLayout:
        places = self.places(grids)
        empty = torch.empty(0, device=self.device)
        positions = self.positions(places, grids) if self.facts.positions else empty
        return PatchLayout(self.images(grids), self.angles(places), positions)

    def forward(self, x: Tensor, layout: PatchLayout) -> Tensor:
        """Encode patches [T, hidden] of all items to [T / merge^2, size_out]."""
        images, angles, positions = layout
        if self.first_norm is not None:
            x = self.first_norm.alone(x) + positions
        for layer in self.layers:
            x = layer(x, images, angles)
        x = self.last_norm.alone(x).view(-1, self.facts.merge**2, self.facts.hidden)
        out: Tensor = self.merger(self.squares(x.transpose(1, 2).flatten(1)))
        return out

    def positions(self, places: Tensor, grids: Sequence[PatchGrid]) -> Tensor:
        """Return the learned position at the center of each patch, by bicubic interpolation."""
        side = self.facts.positions
        at = (places + 0.5) / self.sizes(grids) * 2 - 1
        table = self.learned.vectors.float().view(1, side, side, -1).permute(0, 3, 1, 2)
        sampled = F.grid_sample(
            table, at.flip(1)[None, :, None], mode="bicubic", padding_mode="border", align_corners=False
        )
        return sampled[0, :, :, 0].t().to(self.learned.vectors.dtype)
