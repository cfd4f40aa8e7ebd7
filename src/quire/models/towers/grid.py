"""GridTower: the base of vision encoders over grids of patches (Qwen-VL, GLM-V)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.qwen import GridFacts
from quire.kernels.reference.encoder import Spans, spans_of
from quire.layers.norm import Norm, RMSNorm
from quire.layers.patch_positions import axial_frequencies, axial_rope
from quire.layers.scope import Scope
from quire.layers.vision import Angles, PatchEmbedding, VisionMLP, VisionStyle
from quire.models.towers import Tower

_THETA = 10000.0
QWEN2 = VisionStyle(norms=("norm1", "norm2"), attention="attn", qkv=("qkv",), out="proj")
QWEN2_5 = replace(QWEN2, norm=RMSNorm, mlp_names=("gate_proj", "up_proj", "down_proj"))


class PatchGrid(NamedTuple):
    """Number of patches in time, height and width."""

    steps: int
    height: int
    width: int


def patch_positions(grid: PatchGrid, merge: int) -> NDArray[np.int64]:
    """Return row and column of each patch, [patches, 2]. Patches that are merged to one vector, in squares of
    `merge` x `merge`, are adjacent."""
    rows, columns = np.meshgrid(np.arange(grid.height), np.arange(grid.width), indexing="ij")
    shape = (grid.height // merge, merge, grid.width // merge, merge)
    squares = [axis.reshape(shape).swapaxes(1, 2).reshape(-1) for axis in (rows, columns)]
    return np.tile(np.stack(squares, 1), (grid.steps, 1))


def _grids_of(items: Sequence[Mapping[str, Tensor]]) -> list[PatchGrid]:
    return [PatchGrid(*item["pixels"].shape[:3]) for item in items]


class PatchLayout(NamedTuple):
    """Inputs of an encoder that depend only on the shapes of items: attention spans, RoPE angles,
    positions."""

    images: Spans
    angles: Angles
    positions: Tensor | None
    """[T, hidden] position embeddings, added to the patches; None if there are none."""


def interpolate(table: Tensor, places: Tensor, sizes: Tensor, *, align_corners: bool = True) -> Tensor:
    """Return the learned position of each patch, [T, hidden], interpolated bilinearly from a square `table`
    [side^2, hidden]. `places` [T, 2] are the row and column of each patch, `sizes` [T, 2] the height and
    width of its grid."""
    side = math.isqrt(len(table))
    if align_corners:
        at = places.float() * (side - 1) / (sizes - 1).clamp(min=1)
    else:
        at = ((places + 0.5) * side / sizes - 0.5).clamp(0, side - 1)
    first = at.floor()
    fraction = at - first
    first = first.long()
    out = torch.zeros(len(places), table.shape[1], dtype=torch.float32, device=table.device)
    for down in (0, 1):
        for across in (0, 1):
            near = (first + first.new_tensor([down, across])).clamp(max=side - 1)
            row, column = (fraction if step else 1 - fraction for step in (down, across))
            out += table[near[:, 0] * side + near[:, 1]] * (row[:, :1] * column[:, 1:])
    return out.to(table.dtype)


class PatchMerger(nn.Module):
    """Norm and MLP that merge squares of patches to vectors of the decoder's size. The norm is over single
    patches, or over merged squares if `norm` has their size."""

    def __init__(self, facts: Any, norm: Norm, scope: Scope, names: tuple[str, ...]) -> None:
        super().__init__()
        self.norm = norm
        self.size = facts.hidden * facts.merge**2
        self.mlp = VisionMLP(self.size, self.size, scope, size_out=facts.size_out, names=names)

    def forward(self, x: Tensor) -> Tensor:
        """Merge [T, hidden] to [T / merge^2, size_out]."""
        return self.mlp(self.norm.normalize(x.view(-1, self.norm.run.size)).view(-1, self.size))


class GridTower(Tower):
    """Vision encoder over grids of patches; `merge` x `merge` patches become one vector. Each time step of a
    video attends to itself only. `root` and `embed` are checkpoint names; with `is_flat` the patch kernel has
    no time axis."""

    facts: GridFacts
    layers: nn.ModuleList
    merger: nn.Module

    def __init__(
        self,
        facts: ArchFacts,
        scope: Scope,
        *,
        patch_bias: bool,
        root: str = "model.visual",
        embed: str = "patch_embed.proj",
        is_flat: bool = False,
    ) -> None:
        super().__init__(facts, scope)
        self.scope = scope / root
        self.first_norm: Norm | None = None
        """Norm of the patch embeddings, before positions are added."""
        self.last_norm: Norm | None = None
        depth = () if is_flat else (self.facts.frames,)
        kernel = (self.facts.channels, *depth, self.facts.patch, self.facts.patch)
        self.patches = PatchEmbedding(kernel, self.facts.hidden, self.scope / embed, bias=patch_bias)

    def forward(self, x: Tensor, layout: Any) -> Tensor:
        """Encode patches [T, hidden] of all items to [T / merge^2, size_out]."""
        images, angles, positions = layout
        x = x if self.first_norm is None else self.first_norm.normalize(x)
        x = x if positions is None else x + positions
        for layer in self.layers:
            x = layer(x, images, angles)
        return self.merger(x if self.last_norm is None else self.last_norm.normalize(x))

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        return self.compute(modality, items, self.lay_out(modality, items))

    def lay_out(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Any:
        return self.layout(_grids_of(items))

    def compute(self, modality: str, items: Sequence[Mapping[str, Tensor]], layout: Any) -> list[Tensor]:
        vectors = self(self.patches(torch.cat([self._flat(item["pixels"]) for item in items])), layout)
        return list(vectors.split([math.prod(grid) // self.facts.merge**2 for grid in _grids_of(items)]))

    def layout(self, grids: Sequence[PatchGrid]) -> Any:
        """Return the inputs of `forward` that depend only on the grids of patches: attention spans, RoPE
        angles, positions."""
        places = self.places(grids)
        return PatchLayout(self.images(grids), self.angles(places), self.positions(places, grids))

    def positions(self, places: Tensor, grids: Sequence[PatchGrid]) -> Tensor | None:
        """Return the learned position embedding of each patch, [T, hidden]; None if there are none."""
        return None

    def _flat(self, pixels: Tensor) -> Tensor:
        """Flatten the patches of an item [steps, height, width, *patch] to [patches, size of a patch]. The
        frame of an image is repeated to fill the patch's time axis."""
        flat: Tensor = pixels.flatten(0, 2).flatten(1).unflatten(1, (self.facts.channels, -1))
        return flat.repeat(1, 1, self.facts.frames * self.facts.patch**2 // flat.shape[2]).flatten(1)

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        rows, merge = math.isqrt(num_vectors), self.facts.merge
        shape = (1, rows * merge, num_vectors // rows * merge, self.patches.weight.shape[1])
        return {"pixels": torch.zeros(shape, device=self.device)}

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        steps, height, width = item["pixels"][:3]
        return steps * height * width * (6 * self.facts.hidden + height * width)

    def places(self, grids: Sequence[PatchGrid]) -> Tensor:
        """Return row and column of each patch, [T, 2]."""
        places = np.concatenate([patch_positions(grid, self.facts.merge) for grid in grids])
        return torch.from_numpy(places).to(self.device, non_blocking=True)

    def sizes(self, grids: Sequence[PatchGrid]) -> Tensor:
        """Return height and width of the grid of each patch, [T, 2]."""
        counts = [grid.steps * grid.height * grid.width for grid in grids]
        sizes = np.repeat([grid[1:] for grid in grids], counts, axis=0)
        return torch.from_numpy(sizes).to(self.device, non_blocking=True)

    def angles(self, places: Tensor) -> Angles:
        """Return the 2D RoPE angles of patches at `places` [T, 2] (row, column): half of each head rotates by
        the row, half by the column."""
        head_dim = self.facts.hidden // self.facts.heads
        return axial_rope(places, axial_frequencies(head_dim, _THETA, self.device))

    def images(self, grids: Sequence[PatchGrid]) -> Spans:
        """Return the token ranges within which patches attend to each other: one image, or one time step of a
        video."""
        lens = [grid.height * grid.width for grid in grids for _ in range(grid.steps)]
        return spans_of(np.array(lens, np.int32), self.device)
