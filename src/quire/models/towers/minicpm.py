"""Vision encoder of MiniCPM-V: SigLIP over an image and its slices of any shape, then resampler or merger."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.minicpm import MiniCPMFacts
from quire.kernels.reference.encoder import Spans, spans_of
from quire.layers.linear import WholeLinear
from quire.layers.norm import LayerNorm
from quire.layers.patch_positions import axial_frequencies, grid_places, position_ids
from quire.layers.scope import Scope
from quire.layers.vision import (
    FusedAttention,
    Learned,
    PatchEmbedding,
    VisionAttention,
    VisionMLP,
    patches_of,
    vision_layers,
)
from quire.models.towers.any_size import AnySizeTower, Grid, squares_of

_EPS = 1e-6
_THETA = 10000.0
_HEAD = 128
"""Head size of the resampler."""
_SQUARE = 64
"""Number of vectors of a slice of usual size, for models without a resampler."""


class MiniCPMMerger(nn.Module):
    """Merger of MiniCPM-V: norm and MLP that merge 2 x 2 patches to one vector."""

    def __init__(self, hidden: int, inner: int, size_out: int, activation: str, scope: Scope) -> None:
        super().__init__()
        self.norm = LayerNorm(4 * hidden, _EPS, scope / "pre_norm")
        self.mlp = VisionMLP(
            4 * hidden, inner, scope, size_out=size_out, names=("linear_1", "linear_2"), activation=activation
        )

    def forward(self, squares: Tensor) -> Tensor:
        """Merge [N, 4, hidden] to [N, size_out]."""
        return self.mlp(self.norm.normalize(squares.flatten(1)))


class InnerMerger(MiniCPMMerger):
    """Merger within the encoder: attention among the four patches, then the MLP plus their mean."""

    def __init__(self, facts: MiniCPMFacts, scope: Scope) -> None:
        vit = facts.vit
        super().__init__(vit.hidden, 4 * vit.intermediate, vit.hidden, "gelu_pytorch_tanh", scope)
        self.attention_norm = LayerNorm(vit.hidden, vit.norm_eps, scope / "layer_norm1")
        self.attention = VisionAttention(vit.hidden, vit.heads, scope / "self_attn")

    def forward(self, squares: Tensor) -> Tensor:
        x = squares.flatten(0, 1)
        spans = spans_of(np.full(len(squares), 4, np.int32), x.device)
        x = x + self.attention(self.attention_norm.normalize(x), spans)
        attended = x.view_as(squares)
        return super().forward(attended) + attended.mean(1)


def halved(grids: Sequence[Grid]) -> list[Grid]:
    return [(rows // 2, columns // 2) for rows, columns in grids]


class NaViT(nn.Module):
    """SigLIP over images of any shape: a patch has the learned position nearest to its relative position."""

    def __init__(self, facts: MiniCPMFacts, scope: Scope) -> None:
        super().__init__()
        vit = facts.vit
        self.facts, self.device = facts, scope.device
        embeddings, layers = scope / "embeddings", scope / "encoder" / "layers"
        kernel = (3, vit.patch, vit.patch)
        self.patches = PatchEmbedding(kernel, vit.hidden, embeddings / "patch_embedding")
        self.places = Learned(embeddings / "position_embedding" / "weight", vit.side**2, vit.hidden)
        self.layers = vision_layers(vit, facts.depth, layers)
        self.inner = None if facts.merged is None else InnerMerger(facts, scope / "vit_merger")
        self.last_norm = LayerNorm(vit.hidden, vit.norm_eps, scope / "post_layernorm")

    def forward(self, flat: Tensor, grids: Sequence[Grid]) -> tuple[Tensor, Sequence[Grid]]:
        """Encode the flat patches of all images. Return hidden states [T, hidden] and, for each image, its
        rows and columns of patches, which the inner merger may have reduced."""
        position_ids = torch.cat([self.position_ids(grid) for grid in grids])
        x = self.patches(flat) + self.places.vectors[position_ids.to(self.device, non_blocking=True)]
        spans = self.spans(grids)
        for i, layer in enumerate(self.layers):
            x = layer(x, spans)
            if self.inner is not None and i == self.facts.merged:
                x, grids = self.inner(squares_of(x, grids, 2)), halved(grids)
                spans = self.spans(grids)
        return self.last_norm.normalize(x), grids

    def spans(self, grids: Sequence[Grid]) -> Spans:
        return spans_of(np.array([math.prod(grid) for grid in grids], np.int32), self.device)

    def position_ids(self, grid: Grid) -> Tensor:
        """Return the position id of each patch of a grid: the learned position nearest to the start of the
        patch as a fraction of the image's sides."""
        side = self.facts.vit.side
        grid = (1, math.prod(grid)) if self.facts.in_one_row else grid
        starts = [
            torch.arange(0, 1 - 1e-6, 1 / count) if self.facts.queries else torch.arange(count) / count
            for count in grid
        ]
        return position_ids(starts, side)


class Resampler(nn.Module):
    """Resampler: learned queries attend to all patches of an image or slice."""

    def __init__(self, facts: MiniCPMFacts, scope: Scope) -> None:
        super().__init__()
        size = facts.size_out
        self.facts, self.size, self.device = facts, size, scope.device
        self.query = Learned(scope / "query", facts.queries, size)
        self.widen = WholeLinear(facts.vit.hidden, size, scope / "kv_proj")
        self.query_norm, self.norm, self.last_norm = (
            LayerNorm(size, _EPS, scope / name) for name in ("ln_q", "ln_kv", "ln_post")
        )
        self.attention = FusedAttention(size, max(1, size // _HEAD), scope / "attn")
        self.product = Learned(scope / "proj", size, size)

    def forward(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Return the vectors of all images and slices, [images * queries, size_out]. `x` [T, hidden] are
        their patches, `grids` the rows and columns of patches of each."""
        values = self.norm.normalize(self.widen(x))
        placed = values + torch.cat([self.positions(grid) for grid in grids]).to(values.dtype)
        keys, values = (values, placed) if self.facts.is_valued else (placed, values)
        q, k, v = self.attention.project(self.query_norm.normalize(self.query.vectors), keys, values)
        counts = [math.prod(grid) for grid in grids]
        attended = [
            F.scaled_dot_product_attention(q, *kv)
            for kv in zip(k.split(counts, 1), v.split(counts, 1), strict=True)
        ]
        mixed = self.attention.out(torch.cat(attended, 1).transpose(0, 1).flatten(1))
        return self.last_norm.normalize(mixed) @ self.product.vectors

    def positions(self, grid: Grid) -> Tensor:
        """Return sinusoidal embeddings [patches, size_out] of the column, then of the row."""
        places = grid_places(grid, self.device).flip(1)
        angles = places[:, :, None] * axial_frequencies(self.size, _THETA, self.device)
        return torch.cat((angles.sin(), angles.cos()), 2).flatten(1)


class MiniCPMV(AnySizeTower):
    """MiniCPM-V encoder. `pixels` of an image is [3, height, width]; `slices`, if any, is
    [slices, 3, height, width]. A video has its frames as an additional first axis."""

    facts: MiniCPMFacts
    arrays = ("pixels", "slices")

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        tower = self.facts
        self.resampler = Resampler(tower, scope / "resampler") if tower.queries else None
        name, size = ("vpm" if tower.queries else "model.vision_tower"), tower.vit.hidden
        self.vit = NaViT(tower, scope / name)
        self.merger: MiniCPMMerger | None = None
        if not tower.queries:
            self.merger = MiniCPMMerger(size, 4 * size, tower.size_out, "gelu", scope / "model.merger.mlp.0")

    def stacks(self, item: Mapping[str, Tensor]) -> list[Tensor]:
        """Return stacks of images of one shape, in prompt order: of each image or video frame the whole, then
        slices."""
        wholes, slices = item["pixels"], item.get("slices")
        if wholes.ndim == 3:
            wholes, slices = wholes[None], None if slices is None else slices[None]
        if slices is None:
            return [wholes]
        return [stack for whole, parts in zip(wholes, slices, strict=True) for stack in (whole[None], parts)]

    def encode_images(self, stacks: list[Tensor], grids: list[Grid]) -> tuple[Tensor, list[int]]:
        flat = [patches_of(images, self.facts.vit.patch).flatten(0, 1) for images in stacks]
        x, merged = self.vit(torch.cat(flat), grids)
        if self.resampler is not None:
            return self.resampler(x, merged), [self.facts.queries] * len(merged)
        assert self.merger is not None
        return self.merger(squares_of(x, merged, 2)), [math.prod(grid) // 4 for grid in merged]

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        """Return the arrays of a blank image of about `num_vectors` vectors: as many slices as fit, and a
        whole image for the remaining vectors."""
        per_slice, unit = self.facts.queries or _SQUARE, self.facts.vit.patch * self.facts.unit
        count = (num_vectors - 1) // per_slice
        side = unit * (32 if self.facts.queries else 8)
        width = side if self.facts.queries else unit * (num_vectors - count * per_slice)
        whole = torch.zeros(3, side if self.facts.queries else unit, width, device=self.device)
        slices = torch.zeros(count, 3, side, side, device=self.device)
        return {"pixels": whole} | ({"slices": slices} if count else {})
