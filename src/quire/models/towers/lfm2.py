"""Vision encoder of LFM2-VL: SigLIP 2 over images of any shape, and a projector of squares of patches."""

import math
from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.lfm2 import Lfm2VLFacts
from quire.kernels.reference.encoder import spans_of
from quire.layers.norm import LayerNorm
from quire.layers.scope import Scope
from quire.layers.vision import Learned, PatchEmbedding, VisionMLP, patches_of, vision_layers
from quire.models.towers import Tower

_NAMES = ("model.vision_tower.vision_model", "model.vision_tower")
_EPS = 1e-5
_TILE = 16
"""Squares on a side of the tiles of a blank item."""
Grid = tuple[int, int]
"""Rows and columns of patches."""


class Lfm2VL(Tower):
    """LFM2-VL encoder. `tiles` of an image is [tiles, 3, side, side], and `pixels`, the whole image after
    them, is [3, height, width]; either may be missing."""

    facts: Lfm2VLFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        tower, vit = self.facts, self.facts.vit
        stored = (name for name in _NAMES if scope.is_stored(f"{name}.embeddings.patch_embedding.weight"))
        vision = scope / next(stored, _NAMES[0])
        embeddings = vision / "embeddings"
        self.patches = PatchEmbedding((3 * vit.patch**2,), vit.hidden, embeddings / "patch_embedding")
        self.table = Learned(embeddings / "position_embedding" / "weight", vit.side**2, vit.hidden)
        self.layers = vision_layers(vit, vit.layers, vision / "encoder" / "layers")
        self.last_norm = LayerNorm(vit.hidden, vit.norm_eps, vision / "post_layernorm")
        projector, size = scope / "model" / "multi_modal_projector", vit.hidden * tower.merge**2
        self.norm = LayerNorm(size, _EPS, projector / "layer_norm") if tower.is_normed else None
        self.projector = VisionMLP(
            size,
            tower.inner,
            projector,
            names=("linear_1", "linear_2"),
            size_out=tower.size_out,
            activation=tower.activation,
            bias=tower.bias,
        )

    @staticmethod
    def heads(facts: Lfm2VLFacts) -> tuple[int, ...]:
        return (facts.vit.heads,)

    def forward(self, flat: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Encode flat patches of all images, with their grids, to [T / merge^2, size_out]."""
        x = self.patches(flat) + torch.cat([self._positions(grid) for grid in grids])
        images = spans_of(np.array([math.prod(grid) for grid in grids], np.int32), self.device)
        for layer in self.layers:
            x = layer(x, images)
        squares = self._merge(self.last_norm.alone(x), grids)
        return self.projector(squares if self.norm is None else self.norm.alone(squares))

    def _positions(self, grid: Grid) -> Tensor:
        """Return the position embeddings of a grid, resized from the square table."""
        side = self.facts.vit.side
        table = self.table.vectors.float().view(1, side, side, -1).permute(0, 3, 1, 2)
        resized = F.interpolate(table, size=grid, mode="bilinear", align_corners=False, antialias=True)
        return resized.flatten(2)[0].T.to(self.table.vectors.dtype)

    def _merge(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Concatenate the patches of each square: [T, hidden] to [T / merge^2, hidden * merge^2]."""
        merge = self.facts.merge
        parts = x.split([math.prod(grid) for grid in grids])
        return torch.cat(
            [
                part.view(rows // merge, merge, columns // merge, merge, -1)
                .transpose(1, 2)
                .flatten(2)
                .flatten(0, 1)
                for part, (rows, columns) in zip(parts, grids, strict=True)
            ]
        )

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        patch, merge = self.facts.vit.patch, self.facts.merge
        stacks = [_stacks_of(item) for item in items]
        flat = [_flat_patches(images, patch) for stack in stacks for images in stack]
        grids = [
            [(x.shape[2] // patch, x.shape[3] // patch) for x in stack for _ in range(len(x))]
            for stack in stacks
        ]
        every = [grid for item in grids for grid in item]
        vectors = self(torch.cat(flat), every)
        counts = iter([math.prod(grid) // merge**2 for grid in every])
        return list(vectors.split([sum(islice(counts, len(item))) for item in grids]))

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        unit = self.facts.vit.patch * self.facts.merge
        count, rest = divmod(num_vectors - 1, _TILE**2)
        whole = torch.zeros(3, unit, unit * (rest + 1), device=self.device)
        tiles = torch.zeros(count, 3, unit * _TILE, unit * _TILE, device=self.device)
        return {"pixels": whole} | ({"tiles": tiles} if count else {})

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        cost = 0
        for *many, _, height, width in (item[name] for name in ("pixels", "tiles") if name in item):
            count = height * width // self.facts.vit.patch**2
            cost += math.prod(many) * count * (6 * self.facts.vit.hidden + count)
        return cost


def _stacks_of(item: Mapping[str, Tensor]) -> list[Tensor]:
    """Return stacks of images of one shape, [images, 3, height, width]."""
    stacks = [item["tiles"]] if "tiles" in item else []
    return [*stacks, item["pixels"][None]] if "pixels" in item else stacks


def _flat_patches(images: Tensor, patch: int) -> Tensor:
    """Return the patches of a stack of images, [patches, patch * patch * 3] with the channel last."""
    patches = patches_of(images, patch).flatten(0, 1).unflatten(1, (3, patch**2))
    return patches.transpose(1, 2).flatten(1)
