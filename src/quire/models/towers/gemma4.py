"""Vision encoder of Gemma 4: patches with learned positions and 2D RoPE, averaged by squares."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.gemma4 import Gemma4VisionFacts
from quire.kernels.reference.encoder import Spans, spans_of
from quire.kernels.reference.ops import rotate
from quire.layers.encoder_attention import attend_on
from quire.layers.linear import WholeLinear
from quire.layers.norm import RMSNorm
from quire.layers.patch_positions import axial_frequencies, grid_places
from quire.layers.scope import Scope
from quire.layers.vision import Learned
from quire.models.towers.any_size import (
    AnySizeTower,
    channel_last_patches,
    grid_of,
    split_by_item,
    squares_of,
)

_BOUNDS = ("input_min", "input_max", "output_min", "output_max")
Axes = list[tuple[Tensor, Tensor]]
"""RoPE angles of patches: cosines and sines of the columns, then of the rows, [T, 1, head_dim / 4] each."""


class ClippedLinear(nn.Module):
    """Linear layer, with inputs and outputs clipped to the stored bounds if `is_clipped`."""

    def __init__(self, size_in: int, size_out: int, scope: Scope, *, is_clipped: bool) -> None:
        super().__init__()
        self.product = WholeLinear(size_in, size_out, scope / "linear")
        names = _BOUNDS if is_clipped else ()
        self.bounds = nn.ModuleList(Learned(scope / name) for name in names)

    def forward(self, x: Tensor) -> Tensor:
        if not len(self.bounds):
            return self.product(x)
        least_in, most_in, least, most = (bound.get_parameter("vectors") for bound in self.bounds)
        return torch.clamp(self.product(torch.clamp(x, least_in, most_in)), least, most)


class Gemma4VisionLayer(nn.Module):
    """Attention with normed queries, keys and values, then a gated MLP, each with a norm before and after."""

    def __init__(self, facts: Gemma4VisionFacts, scope: Scope) -> None:
        super().__init__()
        hidden, inner, eps = facts.hidden, facts.intermediate, facts.norm_eps
        self.facts, width = facts, facts.heads * facts.head_dim
        self.attend = attend_on(scope.device)
        attention, mlp = scope / "self_attn", scope / "mlp"

        def linear(size_in: int, size_out: int, at: Scope) -> ClippedLinear:
            return ClippedLinear(size_in, size_out, at, is_clipped=facts.is_clipped)

        self.q, self.k, self.v = (linear(hidden, width, attention / f"{name}_proj") for name in "qkv")
        self.out = linear(width, hidden, attention / "o_proj")
        self.q_norm, self.k_norm = (RMSNorm(facts.head_dim, eps, attention / f"{name}_norm") for name in "qk")
        self.gate, self.up = (linear(hidden, inner, mlp / f"{name}_proj") for name in ("gate", "up"))
        self.down = linear(inner, hidden, mlp / "down_proj")
        names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        self.norms = nn.ModuleList(RMSNorm(hidden, eps, scope / f"{name}_layernorm") for name in names)

    def forward(self, x: Tensor, images: Spans, axes: Axes) -> Tensor:
        before, after, before_mlp, after_mlp = (norm.normalize for norm in self.norms)
        x = x + after(self._attention(before(x), images, axes))  # type: ignore[operator]
        y = before_mlp(x)  # type: ignore[operator]
        return x + after_mlp(self.down(F.gelu(self.gate(y), approximate="tanh") * self.up(y)))  # type: ignore[operator]

    def _attention(self, x: Tensor, images: Spans, axes: Axes) -> Tensor:
        shape, size = (len(x), self.facts.heads, self.facts.head_dim), self.facts.head_dim
        q, k = (
            _rotate_axes(norm.normalize(part(x).view(-1, size)).view(shape), axes)
            for part, norm in ((self.q, self.q_norm), (self.k, self.k_norm))
        )
        v = unit_norm(self.v(x).view(shape), self.facts.norm_eps)
        mixed = self.attend(q * math.sqrt(size), k, v, images, None)  # scores are not scaled
        return self.out(mixed.flatten(1))


def _rotate_axes(x: Tensor, axes: Axes) -> Tensor:
    """Apply 2D RoPE to x: rotate the first half of each head by the column of the patch, the second by its
    row."""
    parts = zip(x.chunk(2, -1), axes, strict=True)
    return torch.cat([rotate(part, cos, sin) for part, (cos, sin) in parts], -1)


def unit_norm(x: Tensor, eps: float) -> Tensor:
    """Return x divided by its root mean square, in float32."""
    return F.rms_norm(x.float(), (x.shape[-1],), eps=eps).to(x.dtype)


class Gemma4VisionTower(AnySizeTower):
    """Vision encoder of Gemma 4; `pixels` of an image is [3, height, width], of a video [frames, 3, height,
    width]."""

    facts: Gemma4VisionFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        tower, vision = self.facts, scope / "model" / "vision_tower"
        embedder = vision / "patch_embedder"
        self.patches = WholeLinear(3 * tower.patch**2, tower.hidden, embedder / "input_proj")
        self.table = Learned(embedder / "position_embedding_table", 2, tower.positions, tower.hidden)
        layers = vision / "encoder" / "layers"
        self.layers = nn.ModuleList(Gemma4VisionLayer(tower, layers / i) for i in range(tower.layers))
        self.standard: nn.ModuleList | None = None
        if tower.is_standardized:
            names = ("std_bias", "std_scale")
            self.standard = nn.ModuleList(Learned(vision / name, tower.hidden) for name in names)
        projection = scope / "model" / "embed_vision" / "embedding_projection"
        self.project = WholeLinear(tower.hidden, tower.size_out, projection)

    @staticmethod
    def heads(facts: Gemma4VisionFacts) -> tuple[int, ...]:
        return ()

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        patch = self.facts.patch
        stacks = [item["pixels"].view(-1, *item["pixels"].shape[-3:]) for item in items]
        grids = [grid_of(stack, patch) for stack in stacks for _ in range(len(stack))]
        flat = torch.cat([channel_last_patches(stack, patch) for stack in stacks])
        rows, columns = torch.cat([grid_places(grid, self.device) for grid in grids]).unbind(1)
        table = self.table.vectors
        x = self.patches((2 * flat - 1).to(table.dtype)) + table[0][columns] + table[1][rows]
        axes = [self._angles(columns), self._angles(rows)]
        images = spans_of(np.array([math.prod(grid) for grid in grids], np.int32), self.device)
        for layer in self.layers:
            x = layer(x, images, axes)
        means = self._standardize(squares_of(x.float(), grids, self.facts.merge).mean(1)).to(x.dtype)
        vectors: Tensor = self.project(unit_norm(means, self.facts.norm_eps))
        counts = [math.prod(grid) // self.facts.merge**2 for grid in grids]
        return split_by_item(vectors, counts, map(len, stacks))

    def _angles(self, places: Tensor) -> tuple[Tensor, Tensor]:
        frequencies = axial_frequencies(self.facts.head_dim, self.facts.theta, self.device)
        angles = (places[:, None] * frequencies)[:, None]
        dtype = self.table.vectors.dtype
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def _standardize(self, means: Tensor) -> Tensor:
        scaled = means * self.facts.hidden**0.5
        if self.standard is None:
            return scaled
        bias, scale = (part.get_parameter("vectors").float() for part in self.standard)
        return (scaled - bias) * scale

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        unit = self.facts.patch * self.facts.merge
        return {"pixels": torch.zeros(3, unit, num_vectors * unit, device=self.device)}
