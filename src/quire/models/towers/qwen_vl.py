"""Vision encoders of Qwen2-VL to Qwen3.5, EXAONE 4.5 and HyperCLOVA X: 2D RoPE over grids of patches."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quire.checkpoint.facts import ArchFacts
from quire.kernels.reference.encoder import Spans, spans_of
from quire.layers.linear import WholeLinear
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.scope import Scope
from quire.layers.vision import Angles, Learned, vision_layers
from quire.models.towers.grid import (
    QWEN2,
    QWEN2_5,
    GridTower,
    PatchGrid,
    PatchLayout,
    PatchMerger,
    interpolate,
)

_MLP = ("linear_fc1", "linear_fc2")
"""Names of the MLPs of Qwen3-VL."""


class Qwen2VL(GridTower):
    """Qwen2-VL encoder: patch embedding, layers, merger."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope, patch_bias=False)
        tower, scope = self.facts, self.scope
        self.layers = vision_layers(tower, tower.depth, scope / "blocks", QWEN2)
        norm = LayerNorm(tower.hidden, tower.norm_eps, scope / "merger" / "ln_q")
        self.merger = PatchMerger(tower, norm, scope / "merger" / "mlp", ("0", "2"))


def windows_of(grid: PatchGrid, merge: int, side: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of a grid's squares (`merge` x `merge` patches), ordered by windows of `side` x
    `side` squares, and the number of squares of each window."""
    rows, columns = grid.height // merge, grid.width // merge
    step, row, column = np.indices((grid.steps, rows, columns)).reshape(3, -1)
    down, across = -(-rows // side), -(-columns // side)
    window = (step * down + row // side) * across + column // side
    return np.argsort(window, kind="stable"), np.bincount(window)


class Windows(NamedTuple):
    """Inputs of the encoder that depend only on shapes. Squares of merged patches are ordered by attention
    window."""

    order: Tensor
    """Original index of the square at each position in window order, [squares]."""
    window_spans: Spans
    """Attention spans of layers with window attention: the patches of each window."""
    image_spans: Spans
    """Attention spans of layers with full attention: the patches of an image or of one time step of a
    video."""
    angles: Angles


class Qwen2_5VL(GridTower):
    """Qwen2.5-VL encoder: patches ordered by window, layers with window or full attention, merger."""

    style = QWEN2_5
    root = "model.visual"

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope, patch_bias=False, root=self.root)
        tower, scope = self.facts, self.scope
        self.side = tower.window // tower.merge // tower.patch
        self.layers = vision_layers(tower, tower.depth, scope / "blocks", self.style)
        norm = RMSNorm(tower.hidden, tower.norm_eps, scope / "merger" / "ln_q")
        merged = replace(tower, size_out=tower.merged or tower.size_out)
        self.merger = PatchMerger(merged, norm, scope / "merger" / "mlp", ("0", "2"))

    def layout(self, grids: Sequence[PatchGrid]) -> Windows:
        square = self.facts.merge**2
        parts = [windows_of(grid, self.facts.merge, self.side) for grid in grids]
        starts = np.cumsum([0, *(len(order) for order, _ in parts[:-1])])
        by_window = np.concatenate([order + start for (order, _), start in zip(parts, starts, strict=True)])
        order = torch.from_numpy(by_window).to(self.device)
        lens = np.concatenate([lens for _, lens in parts]).astype(np.int32) * square
        angles = self.angles(self.places(grids).view(-1, square, 2)[order].view(-1, 2))
        return Windows(order, spans_of(lens, self.device), self.images(grids), angles)

    def forward(self, x: Tensor, layout: Any) -> Tensor:
        """Encode patches [T, hidden] of all items to [T / merge^2, size_out]."""
        order, window_spans, image_spans, angles = layout  # Windows
        x = x.view(-1, self.facts.merge**2, x.shape[1])[order].view(x.shape)
        for number, layer in enumerate(self.layers):
            x = layer(x, image_spans if number in self.facts.far else window_spans, angles)
        vectors = self.merger(x)
        return torch.empty_like(vectors).index_copy_(0, order, vectors)


class HyperCLOVAX(Qwen2_5VL):
    """Encoder of HyperCLOVA X SEED Think: that of Qwen2.5-VL, then a projection."""

    root = "model.vision_model"

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        tower, model = self.facts, scope / "model"
        name = "vision_projector" if scope.is_stored("model.vision_projector.weight") else "projector"
        self.project = WholeLinear(tower.merged, tower.size_out, model / name, bias=True)

    def forward(self, x: Tensor, layout: Any) -> Tensor:
        vectors: Tensor = self.project(super().forward(x, layout))
        return vectors


class Qwen3VL(GridTower):
    """Qwen3-VL encoder: patch and interpolated position embeddings, layers, merger and deepstack mergers."""

    norm_name, mlp_name, mlp_names = "norm", "", _MLP
    """Names within a merger."""
    deep_name = "deepstack_merger_list"

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope, patch_bias=True)
        tower, scope = self.facts, self.scope
        self.learned = Learned(scope / "pos_embed" / "weight", tower.positions**2, tower.hidden)
        style = replace(QWEN2, mlp_names=_MLP)
        self.layers = vision_layers(tower, tower.depth, scope / "blocks", style)
        self.merger = self._merger(tower.hidden, scope / "merger")
        numbers, square = range(len(tower.aux_layers)), tower.hidden * tower.merge**2
        self.deep = nn.ModuleList(self._merger(square, scope / self.deep_name / i) for i in numbers)

    def _merger(self, size: int, scope: Scope) -> PatchMerger:
        norm = LayerNorm(size, self.facts.norm_eps, scope / self.norm_name)
        return PatchMerger(self.facts, norm, scope / self.mlp_name, self.mlp_names)

    def positions(self, places: Tensor, grids: Sequence[PatchGrid]) -> Tensor:
        return interpolate(self.learned.vectors, places, self.sizes(grids))

    def forward(self, x: Tensor, layout: PatchLayout) -> Tensor:
        """Encode patches [T, hidden] of all items to [T / merge^2, size_out * (1 + deepstack levels)]."""
        images, angles, positions = layout
        assert positions is not None
        x, deep = x + positions, []
        for number, layer in enumerate(self.layers):
            x = layer(x, images, angles)
            deep += [self.deep[i](x) for i, aux in enumerate(self.facts.aux_layers) if aux == number]
        return torch.cat([self.merger(x), *deep], 1)
