"""InternVL's tower: InternViT over tiles, whose patches are gathered four by four."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.intern import InternFacts
from quire.kernels.reference.encoder import Spans, spans_of
from quire.layers.norm import LayerNorm, Norm, RMSNorm
from quire.layers.scope import Scope
from quire.layers.vision import Learned, PatchEmbedding, VisionAttention, VisionMLP, patches_of
from quire.models.towers.squares import FixedSizeTower, gathered


class InternNames(NamedTuple):
    """What a checkpoint calls the parts."""

    tower: str
    patches: str
    first: str
    places: str
    layers: str
    norms: tuple[str, str]
    attention: str
    qkv: tuple[str, ...]
    out: str
    scales: tuple[str, str]
    last_norm: str
    projector: str
    products: tuple[str, str, str]


OURS = InternNames(
    tower="vision_model",
    patches="embeddings.patch_embedding",
    first="embeddings.class_embedding",
    places="embeddings.position_embedding",
    layers="encoder.layers",
    norms=("norm1", "norm2"),
    attention="attn",
    qkv=("qkv",),
    out="proj",
    scales=("ls1", "ls2"),
    last_norm="layernorm",
    projector="mlp1",
    products=("0", "1", "3"),
)
"""Those of its makers."""
THEIRS = InternNames(
    tower="model.vision_tower",
    patches="embeddings.patch_embeddings.projection",
    first="embeddings.cls_token",
    places="embeddings.position_embeddings",
    layers="encoder.layer",
    norms=("layernorm_before", "layernorm_after"),
    attention="attention",
    qkv=("q_proj", "k_proj", "v_proj"),
    out="projection_layer",
    scales=("lambda_1", "lambda_2"),
    last_norm="layernorm",
    projector="model.multi_modal_projector",
    products=("layer_norm", "linear_1", "linear_2"),
)
"""Those of transformers."""


def _norm(facts: InternFacts, scope: Scope) -> Norm:
    kind = RMSNorm if facts.is_rms else LayerNorm
    return kind(facts.vit.hidden, facts.vit.norm_eps, scope)


class Layer(nn.Module):
    """Attention, then feed-forward, each behind a norm and scaled number by number."""

    def __init__(self, facts: InternFacts, names: InternNames, scope: Scope) -> None:
        super().__init__()
        vit = facts.vit
        self.attention_norm, self.mlp_norm = (_norm(facts, scope / name) for name in names.norms)
        self.attention_scale, self.mlp_scale = (Learned(scope / name, vit.hidden) for name in names.scales)
        self.attention = VisionAttention(
            vit.hidden,
            vit.heads,
            scope / names.attention,
            names=names.qkv,
            out=names.out,
            bias=facts.qkv_bias,
            norms=("q_norm", "k_norm") if facts.qk_norm else (),
            eps=facts.qk_eps,
        )
        self.mlp = VisionMLP(vit.hidden, vit.intermediate, scope / "mlp", activation=vit.activation)

    def forward(self, x: Tensor, tiles: Spans) -> Tensor:
        x = x + self.attention_scale.vectors * self.attention(self.attention_norm.alone(x), tiles)
        out: Tensor = x + self.mlp_scale.vectors * self.mlp(self.mlp_norm.alone(x))
        return out


class InternViT(nn.Module):
    """Patches, their places, and layers."""

    def __init__(self, facts: InternFacts, names: InternNames, scope: Scope) -> None:
        super().__init__()
        vit, scope = facts.vit, scope / names.tower
        self.patch = vit.patch
        self.patches = PatchEmbedding((3, vit.patch, vit.patch), vit.hidden, scope / names.patches)
        self.first = Learned(scope / names.first, 1, 1, vit.hidden)
        self.places = Learned(scope / names.places, 1, vit.tokens, vit.hidden)
        layers = scope / names.layers
        self.layers = nn.ModuleList(Layer(facts, names, layers / i) for i in range(facts.depth))
        self.last_norm = None
        if facts.is_normed:
            self.last_norm = LayerNorm(vit.hidden, vit.norm_eps, scope / names.last_norm)

    def forward(self, pixels: Tensor) -> Tensor:
        """[N, 3, side, side] -> [N, tokens, hidden]"""
        patches = self.patches(patches_of(pixels, self.patch))
        whole = torch.cat((self.first.vectors.expand(len(patches), 1, -1), patches), 1) + self.places.vectors
        x, count = whole.flatten(0, 1), whole.shape[1]
        tiles = spans_of(np.full(len(pixels), count, np.int32), x.device)
        for layer in self.layers:
            x = layer(x, tiles)
        x = x if self.last_norm is None else self.last_norm.alone(x)
        return x.view(len(pixels), count, -1)


class InternVL(FixedSizeTower):
    """The tiles of an image, or the frames of a video."""

    facts: InternFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        own = self.facts
        names = THEIRS if scope.is_stored(f"{THEIRS.tower}.{THEIRS.patches}.weight") else OURS
        self.vit = InternViT(own, names, scope)
        size_in = own.vit.hidden * own.gather**2
        norm, *products = names.products
        projector = scope / names.projector
        self.norm = LayerNorm(size_in, 1e-5, projector / norm)
        self.projector = VisionMLP(
            size_in,
            own.size_out,
            projector,
            names=tuple(products),
            size_out=own.size_out,
            activation=own.activation,
        )

    def forward(self, pixels: Tensor) -> Tensor:
        x = gathered(self.vit(pixels)[:, self.facts.first :], self.facts.gather)
        vectors: Tensor = self.projector(self.norm.alone(x.flatten(0, 1)))
        return vectors.view(*x.shape[:2], -1)
