"""Vision encoder of Llama 4: ViT with 2D RoPE over tiles, pixel shuffle, adapter and projector."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.llama4 import Llama4Facts
from quire.layers.linear import WholeLinear
from quire.layers.norm import LayerNorm
from quire.layers.patch_positions import axial_frequencies, axial_rope, grid_places
from quire.layers.scope import Scope
from quire.layers.vision import Learned, PatchEmbedding, VisionMLP, VisionStyle, patches_of, vision_layers
from quire.models.towers.fixed_size import FixedSizeTower, pixel_shuffle

_STYLE = VisionStyle(norms=("input_layernorm", "post_attention_layernorm"), out="o_proj", pairs=True)


class Llama4ViT(nn.Module):
    """ViT of Llama 4: patch embeddings, then a class embedding, which RoPE does not rotate, and layers."""

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
        self.layers = vision_layers(vit, vit.layers, scope / "model" / "layers", _STYLE)
        places = grid_places((vit.side, vit.side), scope.device).flip(1) + 1
        frequencies = axial_frequencies(vit.hidden // vit.heads, facts.theta, scope.device)
        self.cos, self.sin = axial_rope(F.pad(places, (0, 0, 0, 1)), frequencies)

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode [N, 3, side, side] to [N, patches, hidden]."""
        patches = self.patches(patches_of(pixels, self.patch))
        whole = torch.cat((patches, self.all.vectors.expand(len(patches), 1, -1)), 1) + self.places.vectors
        angles = self.cos.repeat(len(pixels), 1), self.sin.repeat(len(pixels), 1)
        x = self.first_norm.normalize(whole.flatten(0, 1))
        x = self.layers(x, [whole.shape[1]] * len(pixels), angles)
        return self.last_norm.normalize(x).view_as(whole)[:, :-1]


class Llama4Tower(FixedSizeTower):
    """Llama 4 encoder over the tiles of an image and the whole image."""

    facts: Llama4Facts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        tower, vision = self.facts, scope / "model" / "vision_model"
        self.vit = Llama4ViT(tower, vision)
        self.adapter = VisionMLP(
            tower.vit.hidden * tower.gather**2,
            tower.inner,
            vision / "vision_adapter" / "mlp",
            size_out=tower.adapted,
            bias=False,
        )
        projector = scope / "model" / "multi_modal_projector" / "linear_1"
        self.projector = WholeLinear(tower.adapted, tower.size_out, projector)

    def forward(self, pixels: Tensor) -> Tensor:
        x = pixel_shuffle(self.vit(pixels), self.facts.gather)
        vectors: Tensor = self.projector(F.gelu(self.adapter(x.flatten(0, 1))))
        return vectors.view(*x.shape[:2], -1)
