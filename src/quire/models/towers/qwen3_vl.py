"""Vision encoder of Qwen3-VL and Qwen3.5: interpolated learned positions, and deepstack outputs."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.qwen import GridFacts
from quire.layers.norm import LayerNorm
from quire.layers.scope import Scope
from quire.layers.vision import Learned, VisionMLP
from quire.models.towers import qwen2_vl
from quire.models.towers.grid import GridTower, PatchGrid, PatchLayout, interpolate

_MLP = ("linear_fc1", "linear_fc2")


class Layer(qwen2_vl.Layer):
    """Qwen2-VL layer with other checkpoint names."""

    def feed(self, facts: GridFacts, scope: Scope) -> VisionMLP:
        return VisionMLP(facts.hidden, facts.intermediate, scope, names=_MLP, activation=facts.activation)


class Qwen3VLMerger(nn.Module):
    """Norm and MLP that merge squares of patches to vectors of the decoder's size. The norm is over patches,
    or over `squares`."""

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
    """Qwen3-VL encoder: patch and position embeddings, layers, merger and deepstack mergers."""

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

    def layout(self, grids: Sequence[PatchGrid]) -> PatchLayout:
        places = self.places(grids)
        positions = interpolate(self.learned.vectors, places, self.sizes(grids))
        return PatchLayout(self.images(grids), self.angles(places), positions)

    def forward(self, x: Tensor, layout: PatchLayout) -> Tensor:
        """Encode patches [T, hidden] of all items to [T / merge^2, size_out * (1 + deepstack levels)]."""
        images, angles, positions = layout
        x, deep = x + positions, []
        for number, layer in enumerate(self.layers):
            x = layer(x, images, angles)
            deep += [self.deep[i](x) for i, aux in enumerate(self.facts.aux_layers) if aux == number]
        return torch.cat([self.merger(x), *deep], 1)
