"""MoonViT, the vision encoder of Kimi-VL and Kimi-K2.5: images and video clips of any size, with 2D RoPE.

The frames of a clip are averaged over time.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.kimi import MoonFacts
from quire.layers.norm import LayerNorm
from quire.layers.patch_positions import axial_frequencies, grid_places, resize_positions
from quire.layers.scope import Scope
from quire.layers.vision import Learned, PatchEmbedding, VisionStyle, patches_of, vision_layers
from quire.models.towers.any_size import AnySizeTower, Grid, grid_of, split_by_item
from quire.models.towers.grid import PatchMerger

_EPS = 1e-5
_THETA = 10000.0
_STYLE = VisionStyle(
    norms=("norm0", "norm1"),
    attention="",
    qkv=("wqkv",),
    out="wo",
    mlp_names=("fc0", "fc1"),
    eps=_EPS,
    pairs=True,
)
Clip = tuple[int, int, int]
"""Size of a video clip or image: number of frames, and rows and columns of patches of a frame."""


class MoonViT(nn.Module):
    """Patch embedding with learned positions, layers, final norm."""

    def __init__(self, facts: MoonFacts, scope: Scope) -> None:
        super().__init__()
        self.facts = facts
        embed, encoder = scope / "patch_embed", scope / "encoder"
        self.patches = PatchEmbedding((3, facts.patch, facts.patch), facts.hidden, embed / "proj")
        self.places = Learned(embed / "pos_emb" / "weight", facts.rows, facts.columns, facts.hidden)
        self.layers = vision_layers(facts, facts.layers, encoder / "blocks", _STYLE)
        self.last_norm = LayerNorm(facts.hidden, _EPS, encoder / "final_layernorm")
        self.frequencies = axial_frequencies(facts.hidden // facts.heads, _THETA, scope.device)
        """RoPE frequencies: even pairs rotate by the column, odd pairs by the row."""

    def forward(self, images: Sequence[Tensor], clips: Sequence[Clip]) -> Tensor:
        """Encode clips [frames, 3, height, width] to the hidden states of all their patches, [T, hidden];
        patches attend within their clip."""
        flat = torch.cat([patches_of(frames, self.facts.patch).flatten(0, 1) for frames in images])
        x = self.patches(flat) + torch.cat([self.clip_positions(clip) for clip in clips])
        angles = torch.cat(
            [self.angles((rows, columns)).repeat(frames, 1) for frames, rows, columns in clips]
        )
        x = self.layers(x, [math.prod(clip) for clip in clips], (angles.cos(), angles.sin()))
        return self.last_norm.normalize(x)

    def clip_positions(self, clip: Clip) -> Tensor:
        """Return position embeddings [frames * patches, hidden]; several frames add a sinusoid of time."""
        frames, *grid = clip
        spatial = self.positions((grid[0], grid[1]))
        if frames == 1:
            return spatial
        half = self.facts.hidden // 2
        frequencies = _THETA ** -(torch.arange(half, device=spatial.device, dtype=torch.float32) / half)
        angles = torch.arange(frames, device=spatial.device)[:, None] * frequencies
        temporal = torch.cat((angles.sin(), angles.cos()), 1).to(spatial.dtype)
        return (spatial + temporal[:, None]).flatten(0, 1)

    def positions(self, grid: Grid) -> Tensor:
        """Return the learned positions, interpolated to a grid: [patches, hidden]."""
        return resize_positions(self.places.vectors, grid, mode="bicubic")

    def angles(self, grid: Grid) -> Tensor:
        """Return the 2D RoPE angles of a grid's patches, [patches, head_dim / 2]."""
        places = grid_places(grid, self.frequencies.device).flip(1)
        return (places[:, None] * self.frequencies[:, None]).flatten(1)


class KimiVL(AnySizeTower):
    """Kimi-VL encoder. An item is an image [3, height, width] or a video [frames, 3, height, width]."""

    facts: MoonFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        self.vit = MoonViT(self.facts, scope / "model" / "vision_tower")
        projector = scope / "model" / self.facts.projector
        norm = LayerNorm(self.facts.hidden, self.facts.norm_eps, projector / "pre_norm")
        self.merger = PatchMerger(self.facts, norm, projector, self.facts.products)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        patch, merge = self.facts.patch, self.facts.merge
        pixels = [item["pixels"] for item in items]
        videos = [x if x.ndim == 4 else x[None] for x in pixels]
        parts = [video.split(self.facts.frames) for video in videos]
        images = [part for video in parts for part in video]
        clips = [(len(part), *grid_of(part, patch)) for part in images]
        states = self.vit(images, clips).split([math.prod(clip) for clip in clips])
        squares = [
            state.view(frames, rows // merge, merge, columns // merge, merge, -1)
            .mean(0)
            .transpose(1, 2)
            .flatten(0, 1)
            for state, (frames, rows, columns) in zip(states, clips, strict=True)
        ]
        counts = [rows * columns // merge**2 for _, rows, columns in clips]
        return split_by_item(self.merger(torch.cat(squares)), counts, map(len, parts))

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        *many, _, height, width = item["pixels"]
        frames, patches = math.prod(many), height * width // self.facts.patch**2
        return frames * patches * (6 * self.facts.hidden + min(frames, self.facts.frames) * patches)
