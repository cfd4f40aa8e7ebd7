"""Vision encoder of LFM2-VL: SigLIP 2 over images of any shape, and a projector of squares of patches."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.lfm2 import Lfm2VLFacts
from quire.layers.norm import LayerNorm
from quire.layers.patch_positions import resize_positions
from quire.layers.scope import Scope
from quire.layers.vision import Learned, PatchEmbedding, VisionMLP, vision_layers
from quire.models.towers.any_size import AnySizeTower, Grid, channel_last_patches, squares_of

_NAMES = ("model.vision_tower.vision_model", "model.vision_tower")
_EPS = 1e-5
_TILE = 16
"""Squares of patches along a side of a tile of a blank item."""


class Lfm2VL(AnySizeTower):
    """LFM2-VL encoder. `tiles` of an image is [tiles, 3, side, side], and `pixels`, the whole image
    after the tiles, is [3, height, width]; either array may be missing."""

    facts: Lfm2VLFacts
    arrays = ("pixels", "tiles")

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

    def forward(self, flat: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Encode flat patches of all images, with their grids, to [T / merge^2, size_out]."""
        x = self.patches(flat) + torch.cat([self._positions(grid) for grid in grids])
        x = self.layers(x, [math.prod(grid) for grid in grids])
        squares = squares_of(self.last_norm.normalize(x), grids, self.facts.merge).flatten(1)
        return self.projector(squares if self.norm is None else self.norm.normalize(squares))

    def _positions(self, grid: Grid) -> Tensor:
        side = self.facts.vit.side
        table = self.table.vectors.view(side, side, -1)
        return resize_positions(table, grid, mode="bilinear", antialias=True)

    def stacks(self, item: Mapping[str, Tensor]) -> list[Tensor]:
        tiles = [item["tiles"]] if "tiles" in item else []
        return [*tiles, item["pixels"][None]] if "pixels" in item else tiles

    def encode_images(self, stacks: list[Tensor], grids: list[Grid]) -> tuple[Tensor, list[int]]:
        flat = [channel_last_patches(images, self.facts.vit.patch) for images in stacks]
        return self(torch.cat(flat), grids), [math.prod(grid) // self.facts.merge**2 for grid in grids]

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        unit = self.facts.vit.patch * self.facts.merge
        count, rest = divmod(num_vectors - 1, _TILE**2)
        whole = torch.zeros(3, unit, unit * (rest + 1), device=self.device)
        tiles = torch.zeros(count, 3, unit * _TILE, unit * _TILE, device=self.device)
        return {"pixels": whole} | ({"tiles": tiles} if count else {})
