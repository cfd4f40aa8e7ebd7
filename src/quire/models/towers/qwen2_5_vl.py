"""Vision encoder of Qwen2.5-VL: window attention in most layers, with patches ordered by window."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.qwen import GridFacts
from quire.kernels.reference.encoder import Spans, spans_of
from quire.layers.norm import Norm, RMSNorm
from quire.layers.scope import Scope
from quire.layers.vision import Angles, VisionMLP
from quire.models.towers import qwen2_vl
from quire.models.towers.grid import GridTower, PatchGrid
from quire.models.towers.qwen2_vl import Qwen2VLMerger

_MLP = ("gate_proj", "up_proj", "down_proj")


class Layer(qwen2_vl.Layer):
    """Qwen2-VL layer with RMS norms and a gated MLP."""

    def norm(self, facts: GridFacts, scope: Scope) -> Norm:
        return RMSNorm(facts.hidden, facts.norm_eps, scope)

    def feed(self, facts: GridFacts, scope: Scope) -> VisionMLP:
        return VisionMLP(facts.hidden, facts.intermediate, scope, names=_MLP, activation=facts.activation)


def windows_of(grid: PatchGrid, merge: int, side: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the order of a grid's squares by windows of `side` x `side`, and the size of each window."""
    rows, columns = grid.height // merge, grid.width // merge
    step, row, column = np.indices((grid.steps, rows, columns)).reshape(3, -1)
    down, across = -(-rows // side), -(-columns // side)
    window = (step * down + row // side) * across + column // side
    return np.argsort(window, kind="stable"), np.bincount(window)


class Windows(NamedTuple):
    """Layout of patches in window order."""

    order: Tensor
    """Index of the square at each position."""
    near: Spans
    """Attention spans of windows."""
    far: Spans
    """Attention spans of images."""
    angles: Angles


class Qwen2_5VL(GridTower):
    """Qwen2.5-VL encoder: patch embedding, layers with window or full attention, merger."""

    Layer = Layer

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope, patch_bias=False)
        tower, scope = self.facts, self.scope
        self.side = tower.window // tower.merge // tower.patch
        self.layers = nn.ModuleList(self.Layer(tower, scope / "blocks" / i) for i in range(tower.depth))
        merger = scope / "merger"
        self.merger = Qwen2VLMerger(tower, RMSNorm(tower.hidden, tower.norm_eps, merger / "ln_q"), merger)

    def layout(self, grids: Sequence[PatchGrid]) -> Windows:
        square = self.facts.merge**2
        parts = [windows_of(grid, self.facts.merge, self.side) for grid in grids]
        starts = np.cumsum([0, *(len(order) for order, _ in parts[:-1])])
        by_window = np.concatenate([order + start for (order, _), start in zip(parts, starts, strict=True)])
        order = torch.from_numpy(by_window).to(self.device)
        near = spans_of(np.concatenate([lens for _, lens in parts]).astype(np.int32) * square, self.device)
        angles = self.angles(self.places(grids).view(-1, square, 2)[order].view(-1, 2))
        return Windows(order, near, self.images(grids), angles)

    def forward(self, x: Tensor, layout: Windows) -> Tensor:
        """Encode patches [T, hidden] of all items to [T / merge^2, size_out]."""
        order, near, far, angles = layout
        x = x.view(-1, self.facts.merge**2, x.shape[1])[order].view(x.shape)
        for number, layer in enumerate(self.layers):
            x = layer(x, far if number in self.facts.far else near, angles)
        vectors = self.merger(x)
        return torch.empty_like(vectors).index_copy_(0, order, vectors)
