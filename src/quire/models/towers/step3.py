"""Vision encoders of Step3, Step3-VL-10B and Step-3.7: square images, downsampled by two convolutions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.step3 import Step3Facts, StepFacts
from quire.layers.linear import WholeLinear
from quire.layers.norm import LayerNorm
from quire.layers.patch_positions import axial_frequencies, axial_rope, grid_places, resize_positions
from quire.layers.scope import Scope
from quire.layers.vision import (
    Angles,
    DownsamplingConv,
    Learned,
    PatchEmbedding,
    VisionStyle,
    patches_of,
    vision_layers,
)
from quire.models.towers import Tower

_THETA = 10000.0
_STYLE = VisionStyle(
    norms=("ln_1", "ln_2"), attention="attn", qkv=("in_proj",), mlp_names=("c_fc", "c_proj"), pairs=True
)
_SCALES = ("ls_1.gamma", "ls_2.gamma")
_STEP3_STYLE = VisionStyle(qkv=("qkv_proj",), norms_outputs=True)
_NUM_COPIES = 4
"""Number of class embeddings before the patches of Step3."""


class WindowTower(Tower):
    """Base of encoders over a square image and its windows (crops). `pixels` of an item is [3, side, side];
    `windows`, if any, is [windows, 3, s, s]."""

    facts: StepFacts | Step3Facts
    reduce: nn.Module
    """Convolutions that downsample the patches."""
    projector: nn.Module

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode [N, 3, side, side] to [N, vectors, size_out]."""
        raise NotImplementedError

    def project(self, x: Tensor, side: int) -> Tensor:
        """Reduce patches [N, side * side, hidden] to [N, vectors, size_out]."""
        x = self.reduce(x.unflatten(1, (side, side)).permute(0, 3, 1, 2)).flatten(2).transpose(1, 2)
        vectors: Tensor = self.projector(x.flatten(0, 1))
        return vectors.view(len(x), -1, vectors.shape[1])

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Encode the items; the vectors of an item's windows come before those of its whole image."""
        wholes = self(torch.stack([item["pixels"] for item in items]))
        counts = [len(item["windows"]) if "windows" in item else 0 for item in items]
        windows = [item["windows"] for item in items if "windows" in item]
        inner = self(torch.cat(windows)).split(counts) if windows else [wholes[:0, :0]] * len(items)
        return [torch.cat((parts.flatten(0, 1), whole)) for parts, whole in zip(inner, wholes, strict=True)]

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        side, window = self.facts.vit.image, self.facts.vit.image * 9 // 13
        count = (num_vectors - self.facts.tokens(side)) // self.facts.tokens(window)
        whole = torch.zeros(3, side, side, device=self.device)
        window -= window % self.facts.vit.patch
        windows = torch.zeros(max(count, 0), 3, window, window, device=self.device)
        return {"pixels": whole} | ({"windows": windows} if count > 0 else {})

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        count, side = (item["windows"][0], item["windows"][2]) if "windows" in item else (0, 0)
        return item["pixels"][1] ** 2 + count * side**2


class StepVL(WindowTower):
    """Step3-VL-10B encoder with 2D RoPE."""

    facts: StepFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        step, vit, tower = self.facts, self.facts.vit, scope / "vision_model"
        self.patches = PatchEmbedding((3, vit.patch, vit.patch), vit.hidden, tower / "conv1", bias=False)
        self.places = Learned(tower / "positional_embedding", vit.side**2, vit.hidden)
        self.first_norm, self.last_norm = (
            LayerNorm(vit.hidden, vit.norm_eps, tower / name) if is_there else None
            for name, is_there in (("ln_pre", step.first_norm), ("ln_post", step.last_norm))
        )
        style = replace(_STYLE, scales=_SCALES) if step.scales else _STYLE
        self.layers = vision_layers(vit, vit.layers, tower / "transformer" / "resblocks", style)
        sizes = {"vit_downsampler1": vit.hidden, "vit_downsampler2": 2 * vit.hidden}
        self.reduce = nn.Sequential(
            *(DownsamplingConv(size, 2 * size, tower / name) for name, size in sizes.items())
        )
        projector = scope / "vit_large_projector"
        self.projector = WholeLinear(4 * vit.hidden, step.size_out, projector, bias=step.bias)

    def forward(self, pixels: Tensor) -> Tensor:
        side, count = pixels.shape[2] // self.facts.vit.patch, len(pixels)
        x = self.patches(patches_of(pixels, self.facts.vit.patch)) + self.positions(side)
        x = x.flatten(0, 1)
        x = x if self.first_norm is None else self.first_norm.normalize(x)
        x = self.layers(x, [side**2] * count, self.angles(side, count))
        x = x if self.last_norm is None else self.last_norm.normalize(x)
        return self.project(x.unflatten(0, (count, -1)), side)

    def positions(self, side: int) -> Tensor:
        """Return the learned positions, interpolated to a square: [patches, hidden]."""
        table = self.places.vectors.unflatten(0, (self.facts.vit.side, -1))
        return resize_positions(table, (side, side), mode="bilinear")

    def angles(self, side: int, count: int) -> Angles:
        """Return 2D RoPE angles: one half of each head rotates by the column, the other by the row."""
        places = grid_places((side, side), self.device).flip(1).repeat(count, 1)
        head_dim = self.facts.vit.hidden // self.facts.vit.heads
        return axial_rope(places, axial_frequencies(head_dim, _THETA, self.device))


class Step3(WindowTower):
    """Step3 encoder: CLIP with norms of outputs, and with four copies of the class embedding."""

    facts: Step3Facts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        step, vit, embeddings = self.facts, self.facts.vit, scope / "vision_model" / "embeddings"
        self.patches = PatchEmbedding((3, vit.patch, vit.patch), vit.hidden, embeddings / "patch_embedding")
        self.places = Learned(embeddings / "position_embedding" / "weight", vit.tokens, vit.hidden)
        self.class_vector = Learned(embeddings / "class_embedding", 1, vit.hidden)
        layers = scope / "vision_model" / "transformer" / "layers"
        self.layers = vision_layers(vit, vit.layers, layers, _STEP3_STYLE)
        middle = step.size_mid
        self.reduce = nn.Sequential(
            DownsamplingConv(vit.hidden, middle, scope / "vit_downsampler", kernel=2, stride=step.stride),
            DownsamplingConv(middle, 2 * middle, scope / "vit_downsampler2"),
        )
        self.projector = WholeLinear(2 * middle, step.size_out, scope / "vit_large_projector", bias=step.bias)

    def forward(self, pixels: Tensor) -> Tensor:
        side, count = pixels.shape[2] // self.facts.vit.patch, len(pixels)
        first = self.class_vector.vectors + self.places.vectors[:1]
        patches = self.patches(patches_of(pixels, self.facts.vit.patch)) + self.positions(side)
        x = self.layers.on_squares(torch.cat((first.expand(count, _NUM_COPIES, -1), patches), 1))
        return self.project(x[:, _NUM_COPIES:], side)

    def positions(self, side: int) -> Tensor:
        """Return the learned positions of patches, interpolated to a square: [patches, hidden]."""
        table = self.places.vectors[1:].unflatten(0, (self.facts.vit.side, -1))
        return resize_positions(table, (side, side), mode="bicubic", antialias=True)
