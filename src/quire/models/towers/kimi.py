"""MoonViT, the tower of Kimi-VL and Kimi-K2.5: images of any size, whose patches turn by column and row, and
some frames of a video at once, which become one."""

import math
from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quire.checkpoint.facts import ArchFacts, MediaFacts
from quire.checkpoint.multimodal.kimi import MoonFacts
from quire.kernels.reference.encoder import Spans, spans_of
from quire.layers.norm import LayerNorm
from quire.layers.scope import Scope
from quire.layers.vision import Angles, Learned, PatchEmbedding, VisionAttention, VisionMLP, patches_of

_EPS = 1e-5
_THETA = 10000.0
Grid = tuple[int, int]
"""Rows and columns of patches."""
Clip = tuple[int, int, int]
"""Frames, rows and columns."""


class Layer(nn.Module):
    """Attention, then feed-forward, each behind a norm."""

    def __init__(self, facts: MoonFacts, scope: Scope) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(facts.hidden, _EPS, scope / "norm0")
        self.attention = VisionAttention(
            facts.hidden, facts.heads, scope, names=("wqkv",), out="wo", pairs=True
        )
        self.mlp_norm = LayerNorm(facts.hidden, _EPS, scope / "norm1")
        self.mlp = VisionMLP(
            facts.hidden,
            facts.intermediate,
            scope / "mlp",
            names=("fc0", "fc1"),
            activation="gelu_pytorch_tanh",
        )

    def forward(self, x: Tensor, images: Spans, angles: Angles) -> Tensor:
        x = x + self.attention(self.attention_norm.alone(x), images, angles)
        out: Tensor = x + self.mlp(self.mlp_norm.alone(x))
        return out


class MoonViT(nn.Module):
    """Patches with learned places, layers, and a norm."""

    def __init__(self, facts: MoonFacts, scope: Scope) -> None:
        super().__init__()
        self.facts = facts
        embed, encoder = scope / "patch_embed", scope / "encoder"
        self.patches = PatchEmbedding((3, facts.patch, facts.patch), facts.hidden, embed / "proj")
        self.places = Learned(embed / "pos_emb" / "weight", facts.rows, facts.columns, facts.hidden)
        self.layers = nn.ModuleList(Layer(facts, encoder / "blocks" / i) for i in range(facts.layers))
        self.last_norm = LayerNorm(facts.hidden, _EPS, encoder / "final_layernorm")
        dim = facts.hidden // facts.heads
        powers = torch.arange(0, dim, 4, device=scope.device, dtype=torch.float32) / dim
        self.steps = _THETA**-powers
        """How far each column turns a pair, and each row the pair behind it."""

    def forward(self, images: Sequence[Tensor], clips: Sequence[Clip]) -> Tensor:
        """[frames, 3, height, width] each -> [patches of all, hidden]; those of a clip see each other."""
        flat = torch.cat([patches_of(each, self.facts.patch).flatten(0, 1) for each in images])
        x = self.patches(flat) + torch.cat([self.placed_in_time(clip) for clip in clips])
        spans = spans_of(np.array([math.prod(clip) for clip in clips], np.int32), x.device)
        turns = torch.cat([self.turns((rows, columns)).repeat(frames, 1) for frames, rows, columns in clips])
        for layer in self.layers:
            x = layer(x, spans, (turns.cos(), turns.sin()))
        return self.last_norm.alone(x)

    def placed_in_time(self, clip: Clip) -> Tensor:
        """[frames * patches, hidden]: where each patch is, and when, if there is more than one frame."""
        frames, *grid = clip
        where = self.placed((grid[0], grid[1]))
        if frames == 1:
            return where
        half = self.facts.hidden // 2
        speeds = _THETA ** -(torch.arange(half, device=where.device, dtype=torch.float32) / half)
        angles = torch.arange(frames, device=where.device)[:, None] * speeds
        when = torch.cat((angles.sin(), angles.cos()), 1).to(where.dtype)
        return (where + when[:, None]).flatten(0, 1)

    def placed(self, grid: Grid) -> Tensor:
        """The table of places, stretched over a grid: [patches, hidden]"""
        table: Tensor = self.places.vectors
        if grid != table.shape[:2]:
            wide = table.float().permute(2, 0, 1)[None]
            table = F.interpolate(wide, grid, mode="bicubic")[0].permute(1, 2, 0).to(table.dtype)
        return table.flatten(0, 1)

    def turns(self, grid: Grid) -> Tensor:
        """[patches, head_dim / 2]"""
        down, along = (torch.arange(size, device=self.steps.device)[:, None] * self.steps for size in grid)
        by_column, by_row = along[None].expand(grid[0], -1, -1), down[:, None].expand(-1, grid[1], -1)
        return torch.stack((by_column, by_row), -1).flatten(2).flatten(0, 1)


class KimiVL(nn.Module):
    """One image of any size an item, [3, height, width], or one video, with its frames in front."""

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__()
        assert facts.media is not None
        self.facts: MoonFacts = facts.media.tower
        self.device = scope.device
        self.vit = MoonViT(self.facts, scope / "model" / "vision_tower")
        projector = scope / "model" / self.facts.projector
        self.size = self.facts.hidden * self.facts.merge**2
        self.norm = LayerNorm(self.facts.hidden, self.facts.norm_eps, projector / "pre_norm")
        self.projector = VisionMLP(
            self.size, self.size, projector, size_out=self.facts.size_out, names=self.facts.products
        )

    @staticmethod
    def divides(media: MediaFacts, count: int) -> bool:
        """Whether so many devices can share its layers."""
        return bool(media.tower.heads % count == 0)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        patch, merge = self.facts.patch, self.facts.merge
        films = [each if each.ndim == 4 else each[None] for each in (item["pixels"] for item in items)]
        parts = [film.split(self.facts.frames) for film in films]
        images = [each for film in parts for each in film]
        clips = [(len(each), each.shape[2] // patch, each.shape[3] // patch) for each in images]
        states = self.vit(images, clips).split([math.prod(clip) for clip in clips])
        squares = [
            each.view(frames, rows // merge, merge, columns // merge, merge, -1)
            .mean(0)
            .transpose(1, 2)
            .flatten(0, 1)
            for each, (frames, rows, columns) in zip(states, clips, strict=True)
        ]
        counts = iter([rows * columns // merge**2 for _, rows, columns in clips])
        flat = self.norm.alone(torch.cat(squares).flatten(0, -2)).view(-1, self.size)
        return list(self.projector(flat).split([sum(islice(counts, len(film))) for film in parts]))

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        side = self.facts.patch * self.facts.merge
        rows = max(1, int(num_vectors**0.5))
        columns = -(-num_vectors // rows)
        return {"pixels": torch.zeros(3, rows * side, columns * side, device=self.device)}

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        *many, _, height, width = item["pixels"]
        frames, patches = math.prod(many), height * width // self.facts.patch**2
        return frames * patches * (6 * self.facts.hidden + min(frames, self.facts.frames) * patches)
