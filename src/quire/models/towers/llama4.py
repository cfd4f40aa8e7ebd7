"""Llama 4's tower: tiles whose patches turn by column and row, gathered, and two more products."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.llama4 import Llama4Facts
from quire.checkpoint.multimodal.parts import ViTFacts
from quire.kernels.reference.encoder import Spans, spans_of
from quire.layers.linear import WholeLinear
from quire.layers.norm import LayerNorm
from quire.layers.scope import Scope
from quire.layers.vision import Angles, Learned, PatchEmbedding, VisionAttention, VisionMLP, patches_of
from quire.models.towers.squares import FixedSizeTower, gathered


class Layer(nn.Module):
    """Attention, then feed-forward, each behind a norm."""

    def __init__(self, facts: ViTFacts, scope: Scope) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(facts.hidden, facts.norm_eps, scope / "input_layernorm")
        self.attention = VisionAttention(
            facts.hidden, facts.heads, scope / "self_attn", out="o_proj", pairs=True
        )
        self.mlp_norm = LayerNorm(facts.hidden, facts.norm_eps, scope / "post_attention_layernorm")
        self.mlp = VisionMLP(facts.hidden, facts.intermediate, scope / "mlp", activation=facts.activation)

    def forward(self, x: Tensor, tiles: Spans, angles: Angles) -> Tensor:
        x = x + self.attention(self.attention_norm.alone(x), tiles, angles)
        out: Tensor = x + self.mlp(self.mlp_norm.alone(x))
        return out


class Llama4ViT(nn.Module):
    """Patches, behind them a vector for the whole tile, which does not turn, and layers."""

    def __init__(self, facts: Llama4Facts, scope: Scope) -> None:
        super().__init__()
        vit = facts.vit
        self.patch = vit.patch
        patches = scope / "patch_embedding" / "linear"
        self.patches = PatchEmbedding((3 * vit.patch**2,), vit.hidden, patches, bias=False)
        self.all = Learned(scope / "class_embedding", vit.hidden)
        self.places = Learned(scope / "positional_embedding_vlm", vit.tokens, vit.hidden)
        self.first_norm = LayerNorm(vit.hidden, vit.norm_eps, scope / "layernorm_pre")
        self.last_norm = LayerNorm(vit.hidden, vit.norm_eps, scope / "layernorm_post")
        layers = scope / "model" / "layers"
        self.layers = nn.ModuleList(Layer(vit, layers / i) for i in range(vit.layers))
        self.turns = _turns(vit.side, vit.hidden // vit.heads // 2, facts.theta).to(scope.device)

    def forward(self, pixels: Tensor) -> Tensor:
        """[N, 3, side, side] -> [N, patches, hidden]"""
        patches = self.patches(patches_of(pixels, self.patch))
        whole = torch.cat((patches, self.all.vectors.expand(len(patches), 1, -1)), 1) + self.places.vectors
        x, count = self.first_norm.alone(whole.flatten(0, 1)), whole.shape[1]
        tiles = spans_of(np.full(len(pixels), count, np.int32), x.device)
        turns = self.turns.repeat(len(pixels), 1)
        angles = turns.cos(), turns.sin()
        for layer in self.layers:
            x = layer(x, tiles, angles)
        return self.last_norm.alone(x).view(len(pixels), count, -1)[:, :-1]


def _turns(side: int, dim: int, theta: float) -> Tensor:
    """[patches and one more, dim]: columns turn the first half of the pairs, rows the other."""
    steps = 1 / theta ** (torch.arange(0, dim, 2).float() / dim)
    lines = (torch.arange(side)[:, None] + 1) * steps
    grid = torch.cat((lines.repeat(side, 1), lines.repeat_interleave(side, 0)), 1)
    return torch.cat((grid, torch.zeros(1, dim)))


class Llama4Tower(FixedSizeTower):
    """The tiles of an image, and the image as a whole."""

    facts: Llama4Facts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        own = self.facts
        tower = scope / "model" / "vision_model"
        self.vit = Llama4ViT(own, tower)
        self.adapter = VisionMLP(
            own.vit.hidden * own.gather**2,
            own.inner,
            tower / "vision_adapter" / "mlp",
            size_out=own.adapted,
            bias=False,
        )
        product = scope / "model" / "multi_modal_projector" / "linear_1"
        self.projector = WholeLinear(own.adapted, own.size_out, product)

    def forward(self, pixels: Tensor) -> Tensor:
        x = gathered(self.vit(pixels), self.facts.gather)
        vectors: Tensor = self.projector(F.gelu(self.adapter(x.flatten(0, 1))))
        return vectors.view(*x.shape[:2], -1)
