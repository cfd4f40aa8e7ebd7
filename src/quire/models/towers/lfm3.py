"""Vision encoder of LFM3-VL: gated convolutions, and attention, over grids of patches."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.lfm2 import Lfm3VLFacts
from quire.kernels.reference.encoder import Spans
from quire.layers.linear import WholeLinear
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.patch_positions import axial_frequencies, axial_rope
from quire.layers.scope import Scope
from quire.layers.vision import Angles, Learned, PatchEmbedding, VisionAttention, VisionMLP, VisionStyle
from quire.models.towers.grid import GridTower, PatchGrid

_MERGER_EPS = 1e-6
_STYLE = VisionStyle(head_norms=("q_layernorm", "k_layernorm"), bias=False, out_bias=False)


class GridConvolution(nn.Module):
    """Gated depthwise convolution over the rows and columns of patches."""

    def __init__(self, facts: Lfm3VLFacts, scope: Scope) -> None:
        super().__init__()
        size, self.merge = facts.hidden, facts.merge
        self.into = WholeLinear(size, 3 * size, scope / "in_proj")
        self.kernel = Learned(scope / "spatial_conv" / "weight", size, 1, facts.kernel, facts.kernel)
        self.out = WholeLinear(size, size, scope / "out_proj")

    def forward(self, x: Tensor, grids: Sequence[PatchGrid]) -> Tensor:
        """Return the output for the patches x [T, hidden] of all grids, square by square."""
        gate, out_gate, inner = self.into(x).chunk(3, -1)
        counts = [grid.steps * grid.height * grid.width for grid in grids]
        parts = [
            self._one(part, grid) for part, grid in zip((gate * inner).split(counts), grids, strict=True)
        ]
        return self.out(out_gate * torch.cat(parts))

    def _one(self, x: Tensor, grid: PatchGrid) -> Tensor:
        merge, size = self.merge, x.shape[1]
        high, wide = grid.height // merge, grid.width // merge
        squares = x.view(grid.steps, high, wide, merge, merge, size).permute(0, 5, 1, 3, 2, 4)
        pixels = squares.reshape(grid.steps, size, grid.height, grid.width)
        weight = self.kernel.vectors
        mixed = F.conv2d(pixels, weight, padding=weight.shape[-1] // 2, groups=size)
        back = mixed.view(grid.steps, size, high, merge, wide, merge).permute(0, 2, 4, 3, 5, 1)
        return back.reshape(x.shape)


class GridLayer(nn.Module):
    """Pre-norm layer: convolution or attention, then MLP, each with a residual."""

    def __init__(self, facts: Lfm3VLFacts, scope: Scope, *, attends: bool) -> None:
        super().__init__()
        size, eps = facts.hidden, facts.norm_eps
        self.before, self.between = (
            RMSNorm(size, eps, scope / name) for name in ("operator_norm", "ffn_norm")
        )
        self.convolution: GridConvolution | None = None
        self.attention: VisionAttention | None = None
        if attends:
            style = replace(_STYLE, qk_eps=eps)
            self.attention = VisionAttention(size, facts.heads, scope / "self_attn", style, facts.kv_heads)
        else:
            self.convolution = GridConvolution(facts, scope / "conv")
        names = ("w1", "w3", "w2")
        self.mlp = VisionMLP(
            size, facts.intermediate, scope / "feed_forward", names=names, activation="silu", bias=False
        )

    def forward(self, x: Tensor, spans: Spans, angles: Angles, grids: Sequence[PatchGrid]) -> Tensor:
        normed = self.before.normalize(x)
        if self.attention is not None:
            x = x + self.attention(normed, spans, angles)
        elif self.convolution is not None:
            x = x + self.convolution(normed, grids)
        return x + self.mlp(self.between.normalize(x))


class Lfm3VL(GridTower):
    """LFM3-VL encoder: patch embedding with a norm, layers, projector of squares of patches."""

    facts: Lfm3VLFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope, patch_bias=False, root="model.vision_tower")
        tower, inner = self.facts, self.scope
        flat = tower.channels * tower.frames * tower.patch**2
        self.patches = PatchEmbedding((flat,), tower.hidden, inner / "patchifier", bias=False)
        self.first_norm = RMSNorm(tower.hidden, tower.norm_eps, inner / "embedding_norm")
        self.layers = nn.ModuleList(
            GridLayer(tower, inner / "layers" / i, attends=attends) for i, attends in enumerate(tower.attends)
        )
        projector, size = scope / "model" / "multi_modal_projector", tower.hidden * tower.merge**2
        self.norm = LayerNorm(tower.hidden, _MERGER_EPS, projector / "layer_norm")
        self.merger = VisionMLP(
            size,
            tower.inner,
            projector,
            size_out=tower.size_out,
            names=("linear_1", "linear_2"),
            activation=tower.activation,
            bias=tower.bias,
        )

    def layout(self, grids: Sequence[PatchGrid]) -> Any:
        return self.images(grids), self.angles(self.places(grids)), grids

    def angles(self, places: Tensor) -> Angles:
        head_dim = self.facts.hidden // self.facts.heads
        return axial_rope(places, axial_frequencies(head_dim, self.facts.theta, self.device))

    def forward(self, x: Tensor, layout: Any) -> Tensor:
        """Encode patches [T, hidden] of all items to [T / merge^2, size_out]."""
        images, angles, grids = layout
        assert self.first_norm is not None
        x = self.first_norm.normalize(x)
        for layer in self.layers:
            x = layer(x, images, angles, grids)
        return self.merger(self.norm.normalize(x).view(-1, self.facts.hidden * self.facts.merge**2))
