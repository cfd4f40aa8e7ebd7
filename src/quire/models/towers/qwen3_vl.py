"""Qwen3-VL's tower, and Qwen3.5's: learned positions stretched over the grid, vectors of several depths."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.qwen import GridFacts
from quire.layers.norm import LayerNorm
from quire.layers.scope import Scope
from quire.layers.vision import Learned, VisionMLP
from quire.models.towers import qwen2_vl
from quire.models.towers.grid import GridTower, PatchGrid, Placed, stretched

_MLP = ("linear_fc1", "linear_fc2")


class Layer(qwen2_vl.Layer):
    """Qwen2-VL's, under other names."""

    def feed(self, facts: GridFacts, scope: Scope) -> VisionMLP:
        return VisionMLP(facts.hidden, facts.intermediate, scope, names=_MLP, activation=facts.activation)


class Qwen3VLMerger(nn.Module):
    """Squares of patches become vectors of the decoder's size; the norm is of patches, or of `squares`."""

    norm_name, inner, names = "norm", "", _MLP

    def __init__(self, facts: GridFacts, scope: Scope, *, squares: bool = False) -> None:
        super().__init__()
        self.size = facts.hidden * facts.merge**2
        self.normed = self.size if squares else facts.hidden
        self.norm = LayerNorm(self.normed, facts.norm_eps, scope / self.norm_name)
        mlp = scope / self.inner if self.inner else scope
        self.mlp = VisionMLP(self.size, self.size, mlp, size_out=facts.size_out, names=self.names)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.norm.alone(x.view(-1, self.normed)).view(-1, self.size))
        return out


class Qwen3VL(GridTower):
    """The tower."""

    merger_class, deep_name = Qwen3VLMerger, "deepstack_merger_list"

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope, patch_bias=True)
        tower, scope = self.facts, self.scope
        self.learned = Learned(scope / "pos_embed" / "weight", tower.positions**2, tower.hidden)
        self.layers = nn.ModuleList(Layer(tower, scope / "blocks" / i) for i in range(tower.depth))
        self.merger = self.merger_class(tower, scope / "merger")
        numbers = range(len(tower.aux_layers))
        self.deep = nn.ModuleList(
            self.merger_class(tower, scope / self.deep_name / i, squares=True) for i in numbers
        )

    def layout(self, grids: Sequence[PatchGrid]) -> Placed:
        places = self.places(grids)
        positions = stretched(self.learned.vectors, places, self.sizes(grids))
        return Placed(self.images(grids), self.angles(places), positions)

    def forward(self, x: Tensor, layout: Placed) -> Tensor:
        """[T, hidden] patches of all items -> [T / merge^2, size_out * (1 + taps)]."""
        images, angles, positions = layout
        x, deep = x + positions, []
        for number, layer in enumerate(self.layers):
            x = layer(x, images, angles)
            deep += [self.deep[i](x) for i, tap in enumerate(self.facts.aux_layers) if tap == number]
        return torch.cat([self.merger(x), *deep], 1)
