"""Vision encoder of InternVL: InternViT over tiles, with pixel shuffle of 2 x 2 patches."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.intern import InternFacts
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.scope import Scope
from quire.layers.vision import Learned, PatchEmbedding, VisionMLP, VisionStyle, patches_of, vision_layers
from quire.models.towers.fixed_size import FixedSizeTower, pixel_shuffle


class InternNames(NamedTuple):
    """Checkpoint names of the parts of InternVL's vision encoder."""

    tower: str
    patches: str
    first: str
    places: str
    layers: str
    style: VisionStyle
    projector: str
    products: tuple[str, str, str]


ORIGINAL = InternNames(
    tower="vision_model",
    patches="embeddings.patch_embedding",
    first="embeddings.class_embedding",
    places="embeddings.position_embedding",
    layers="encoder.layers",
    style=VisionStyle(
        norms=("norm1", "norm2"), attention="attn", qkv=("qkv",), out="proj", scales=("ls1", "ls2")
    ),
    projector="mlp1",
    products=("0", "1", "3"),
)
"""Names of the original checkpoints."""
TRANSFORMERS = InternNames(
    tower="model.vision_tower",
    patches="embeddings.patch_embeddings.projection",
    first="embeddings.cls_token",
    places="embeddings.position_embeddings",
    layers="encoder.layer",
    style=VisionStyle(
        norms=("layernorm_before", "layernorm_after"),
        attention="attention",
        out="projection_layer",
        scales=("lambda_1", "lambda_2"),
    ),
    projector="model.multi_modal_projector",
    products=("layer_norm", "linear_1", "linear_2"),
)
"""Names of checkpoints saved by transformers."""


class InternViT(nn.Module):
    """ViT of InternVL: patch, class and position embeddings, layers, and an optional final norm."""

    def __init__(self, facts: InternFacts, names: InternNames, scope: Scope) -> None:
        super().__init__()
        vit, scope = facts.vit, scope / names.tower
        self.patch = vit.patch
        self.patches = PatchEmbedding((3, vit.patch, vit.patch), vit.hidden, scope / names.patches)
        self.first = Learned(scope / names.first, 1, 1, vit.hidden)
        self.places = Learned(scope / names.places, 1, vit.tokens, vit.hidden)
        style = replace(
            names.style,
            norm=RMSNorm if facts.is_rms else LayerNorm,
            bias=facts.qkv_bias,
            qk_norms=("q_norm", "k_norm") if facts.qk_norm else (),
            qk_eps=facts.qk_eps,
        )
        self.layers = vision_layers(vit, facts.depth, scope / names.layers, style)
        self.last_norm = None
        if facts.is_normed:
            self.last_norm = LayerNorm(vit.hidden, vit.norm_eps, scope / "layernorm")

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode [N, 3, side, side] to [N, tokens, hidden]."""
        patches = self.patches(patches_of(pixels, self.patch))
        tokens = torch.cat((self.first.vectors.expand(len(patches), 1, -1), patches), 1) + self.places.vectors
        x = self.layers.on_squares(tokens)
        return x if self.last_norm is None else self.last_norm.normalize(x.flatten(0, 1)).view_as(x)


class InternVL(FixedSizeTower):
    """InternVL encoder over the tiles of an image or the frames of a video."""

    facts: InternFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        tower = self.facts
        names = (
            TRANSFORMERS
            if scope.is_stored(f"{TRANSFORMERS.tower}.{TRANSFORMERS.patches}.weight")
            else ORIGINAL
        )
        self.vit = InternViT(tower, names, scope)
        size_in = tower.vit.hidden * tower.gather**2
        norm, *products = names.products
        projector = scope / names.projector
        self.norm = LayerNorm(size_in, 1e-5, projector / norm)
        self.projector = VisionMLP(
            size_in,
            tower.size_out,
            projector,
            names=tuple(products),
            size_out=tower.size_out,
            activation=tower.activation,
        )

    def forward(self, pixels: Tensor) -> Tensor:
        x = pixel_shuffle(self.vit(pixels)[:, self.facts.first :], self.facts.gather)
        vectors: Tensor = self.projector(self.norm.normalize(x.flatten(0, 1)))
        return vectors.view(*x.shape[:2], -1)
