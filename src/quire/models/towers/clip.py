"""CLIP and SigLIP vision encoders over square images: alone, or with a small projector to a decoder.

Models with a projector: LLaVA (NeXT, its Video model, OneVision), PaliGemma, Aya Vision, Idefics 3, Gemma 3.
"""

from collections.abc import Mapping, Sequence
from math import ceil

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.anyres import AnyresFacts
from quire.checkpoint.multimodal.aya import AyaFacts
from quire.checkpoint.multimodal.clip import DualFacts
from quire.checkpoint.multimodal.common import ShuffledFacts, TowerFacts, ViTFacts
from quire.checkpoint.multimodal.gemma import GemmaFacts
from quire.checkpoint.multimodal.llava import LlavaFacts
from quire.kernels.reference.encoder import spans_of
from quire.layers.linear import WholeLinear
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.patch_positions import position_ids
from quire.layers.scope import Scope
from quire.layers.vision import FusedAttention, Learned, PatchEmbedding, VisionMLP, patches_of, vision_layers
from quire.models.towers.fixed_size import FixedSizeTower, pixel_shuffle

_NAMES = ("model.vision_tower.vision_model", "model.vision_tower", "model.vision_model")
"""Names of the encoder in checkpoints."""


class ViT(nn.Module):
    """ViT of CLIP and SigLIP: patch and position embeddings, the first `depth` layers, and with `is_normed`
    the final norm.

    CLIP also has a class embedding at the front, a norm before the layers, and no bias of patch
    embeddings."""

    def __init__(self, facts: ViTFacts, depth: int, scope: Scope, *, is_normed: bool = False) -> None:
        super().__init__()
        stored = (name for name in _NAMES if scope.is_stored(f"{name}.embeddings.patch_embedding.weight"))
        scope = scope / next(stored, _NAMES[0])
        self.facts = facts
        embeddings = scope / "embeddings"
        kernel = (3, facts.patch, facts.patch)
        self.patches = PatchEmbedding(
            kernel, facts.hidden, embeddings / "patch_embedding", bias=not facts.has_class
        )
        places = embeddings / "position_embedding" / "weight"
        self.places = Learned(places, facts.tokens, facts.hidden)
        self.order: Tensor | None = None
        """Position id of each patch; None for consecutive ids."""
        self.all: Learned | None = None
        self.first_norm: LayerNorm | None = None
        if facts.has_class:
            self.all = Learned(embeddings / "class_embedding", facts.hidden)
            self.first_norm = LayerNorm(facts.hidden, facts.norm_eps, scope / "pre_layrnorm")
        self.layers = vision_layers(facts, depth, scope / "encoder" / "layers")
        self.last_norm: LayerNorm | None = None
        if is_normed:
            self.last_norm = LayerNorm(facts.hidden, facts.norm_eps, scope / "post_layernorm")

    def forward(self, pixels: Tensor, depths: Sequence[int] = ()) -> Tensor:
        """Encode [N, 3, side, side] to [N, tokens, hidden]; with `depths`, concatenate the outputs of these
        layers."""
        x = self.patches(patches_of(pixels, self.facts.patch))
        if self.all is not None:
            x = torch.cat((self.all.vectors.expand(len(x), 1, -1), x), 1)
        count = x.shape[1]
        places = self.places.vectors
        x = (x + (places if self.order is None else places[self.order])).flatten(0, 1)
        x = x if self.first_norm is None else self.first_norm.normalize(x)
        images = spans_of(np.full(len(pixels), count, np.int32), x.device)
        states = [x]
        for layer in self.layers:
            x = layer(x, images)
            if depths:
                states.append(x)
        x = x if self.last_norm is None else self.last_norm.normalize(x)
        out = torch.cat([states[depth] for depth in depths], -1) if depths else x
        return out.view(len(pixels), count, -1)


class ClipEmbedding(FixedSizeTower):
    """CLIP's embedding of an image: the projected state of the class token."""

    facts: DualFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        vit = self.facts.vit
        self.vit = ViT(vit, vit.layers, scope, is_normed=True)
        self.project = WholeLinear(vit.hidden, self.facts.size_out, scope / "visual_projection")

    def forward(self, pixels: Tensor) -> Tensor:
        vectors: Tensor = self.project(self.vit(pixels)[:, 0].contiguous())
        return vectors[:, None]


class SiglipEmbedding(FixedSizeTower):
    """SigLIP's embedding of an image: attention of a learned query to all patches, then an MLP."""

    facts: DualFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        vit, head = self.facts.vit, scope / "model" / "vision_model" / "head"
        self.vit = ViT(vit, vit.layers, scope, is_normed=True)
        self.probe = Learned(head / "probe", 1, 1, vit.hidden)
        self.attention = FusedAttention(vit.hidden, vit.heads, head / "attention")
        self.norm = LayerNorm(vit.hidden, vit.norm_eps, head / "layernorm")
        self.mlp = VisionMLP(vit.hidden, vit.intermediate, head / "mlp", activation=vit.activation)

    def forward(self, pixels: Tensor) -> Tensor:
        states, probe = self.vit(pixels), self.probe.vectors.expand(len(pixels), -1, -1)
        q, k, v = self.attention.project(probe, states, states)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = self.attention.out(mixed.transpose(1, 2).flatten(1))
        vectors: Tensor = x + self.mlp(self.norm.normalize(x))
        return vectors[:, None]


class Llava(FixedSizeTower):
    """LLaVA encoder: the states of some layers, projected to the decoder's size."""

    facts: LlavaFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        tower = self.facts
        self.vit = ViT(tower.vit, max(tower.depths), scope)
        self.projector = VisionMLP(
            tower.vit.hidden * len(tower.depths),
            tower.size_out,
            scope / "model" / "multi_modal_projector",
            names=("linear_1", "linear_2"),
            size_out=tower.size_out,
            activation=tower.activation,
            bias=tower.bias,
        )

    def forward(self, pixels: Tensor) -> Tensor:
        states = self.vit(pixels, self.facts.depths)[:, self.facts.first :]
        vectors: Tensor = self.projector(states.flatten(0, 1))
        return vectors.view(len(pixels), -1, self.facts.size_out)


class Anyres(Llava):
    """LLaVA-NeXT and LLaVA-OneVision encoder. For each output vector, the processor provides an index among
    the vectors of the whole image and all tiles; the last index is the newline vector. With four indices per
    output vector, the four vectors are averaged by weight."""

    facts: AnyresFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        self.newline = Learned(scope / "model" / "image_newline", self.facts.size_out)

    def packed(self, modality: str, vectors: Tensor, item: Mapping[str, Tensor]) -> Tensor:
        newline = self.newline.vectors[None]
        if modality == "video":
            return torch.cat((self._downsample(vectors).flatten(0, 1), newline))
        all_vectors = torch.cat((vectors.flatten(0, 1), newline))
        index = item["places"].long()
        if index.shape[1] == 1:
            return all_vectors[index[:, 0]]
        return torch.einsum("nkh,nk->nh", all_vectors[index], item["weights"].to(all_vectors.dtype))

    def _downsample(self, vectors: Tensor) -> Tensor:
        """Return [frames, patches, hidden] with the side of each frame halved by bilinear interpolation."""
        side = self.facts.vit.side
        grid = vectors.view(len(vectors), side, side, -1).permute(0, 3, 1, 2)
        half = F.interpolate(grid, size=(ceil(side / 2), ceil(side / 2)), mode="bilinear")
        return half.permute(0, 2, 3, 1).flatten(1, 2)

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        if modality == "video":
            per_frame = ceil(self.facts.vit.side / 2) ** 2
            return super().blank(modality, num_vectors // per_frame * self.facts.tokens)
        count = -(-num_vectors // self.facts.tokens)
        item = super().blank(modality, count * self.facts.tokens)
        places = torch.arange(num_vectors, device=self.device)[:, None]
        return item | {"places": places.clamp(max=count * self.facts.tokens)}


class PooledVideo(Anyres):
    """LLaVA-Next-Video encoder: squares of 2 x 2 patches of a frame are averaged before the projector."""

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        if modality != "video":
            return super().encode(modality, items)
        frames, side = [item["pixels"] for item in items], self.facts.vit.side
        states = self.vit(torch.cat(frames), self.facts.depths)[:, self.facts.first :]
        grid = states.transpose(1, 2).unflatten(2, (side, side))
        pooled = F.avg_pool2d(grid, 2).flatten(2).transpose(1, 2)
        vectors = self.projector(pooled.flatten(0, 1)).view(*pooled.shape[:2], -1)
        return [part.flatten(0, 1) for part in vectors.split([len(part) for part in frames])]


class PaliGemma(FixedSizeTower):
    """PaliGemma encoder: every patch becomes one vector."""

    facts: TowerFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        tower = self.facts
        self.vit = ViT(tower.vit, tower.vit.layers, scope, is_normed=True)
        projector = scope / "model" / "multi_modal_projector" / "linear"
        self.projector = WholeLinear(tower.vit.hidden, tower.size_out, projector, bias=True)

    def forward(self, pixels: Tensor) -> Tensor:
        vectors: Tensor = self.projector(self.vit(pixels).flatten(0, 1))
        return vectors.view(len(pixels), -1, self.facts.size_out)


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
        up, gate = self.up(flat if self.norm is None else self.norm.normalize(flat)).chunk(2, -1)
        vectors: Tensor = self.down(F.silu(gate) * up)
        return vectors.view(*x.shape[:2], -1)


class Idefics3(FixedSizeTower):
    """Idefics 3 encoder over the tiles of an image and the whole image."""

    facts: ShuffledFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        tower, vit = self.facts, self.facts.vit
        self.vit = ViT(vit, vit.layers, scope, is_normed=True)
        self.vit.order = compute_position_ids(vit.side).to(scope.device)
        projector = scope / "model" / "connector" / "modality_projection" / "proj"
        self.projector = WholeLinear(vit.hidden * tower.gather**2, tower.size_out, projector)

    def forward(self, pixels: Tensor) -> Tensor:
        x = pixel_shuffle(self.vit(pixels), self.facts.gather)
        vectors: Tensor = self.projector(x.flatten(0, 1))
        return vectors.view(*x.shape[:2], -1)


def compute_position_ids(side: int) -> Tensor:
    """Return the position id of each patch, from its start as a fraction of the image's side in float32.
    Rounding gives some patches the id of an adjacent one; the models were trained that way."""
    starts = (torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))).clamp(max=1.0 - 1e-6)
    return position_ids((starts, starts), side)


class GemmaProjector(nn.Module):
    """Projector of Gemma 3: mean of each square of patches, norm, projection to the decoder's size."""

    def __init__(self, facts: GemmaFacts, scope: Scope) -> None:
        super().__init__()
        self.side, self.square = facts.side, facts.vit.side // facts.side
        norm = scope / "mm_soft_emb_norm"
        self.norm = RMSNorm(facts.vit.hidden, facts.vit.norm_eps, norm, plus_one=True)
        weight = scope / "mm_input_projection_weight"
        self.weight = Learned(weight, facts.vit.hidden, facts.size_out)

    def forward(self, x: Tensor) -> Tensor:
        """Project [N, patches, hidden] to [N, side * side, size_out]."""
        grid = x.view(len(x), self.side, self.square, self.side, self.square, -1)
        means = grid.mean((2, 4)).flatten(0, 2)
        return (self.norm.normalize(means) @ self.weight.vectors).view(len(x), self.side**2, -1)


class Gemma3(FixedSizeTower):
    """Gemma 3 encoder over an image and its optional crops."""

    facts: GemmaFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        self.vit = ViT(self.facts.vit, self.facts.vit.layers, scope, is_normed=True)
        self.projector = GemmaProjector(self.facts, scope / "model" / "multi_modal_projector")

    def forward(self, pixels: Tensor) -> Tensor:
        return self.projector(self.vit(pixels))
