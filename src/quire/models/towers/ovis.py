"""Vision encoder of Ovis 2: AIMv2, and patches as mixtures of a visual vocabulary."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.ovis import OvisFacts
from quire.layers.linear import WholeLinear
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.scope import Scope
from quire.layers.vision import Learned, PatchEmbedding, VisionStyle, patches_of, vision_layers
from quire.models.towers.fixed_size import FixedSizeTower, pixel_shuffle

_STYLE = VisionStyle(
    norms=("rms_norm1", "rms_norm2"),
    attention="attention",
    mlp="ffn",
    mlp_names=("gate_proj", "up_proj", "down_proj"),
    norm=RMSNorm,
)
_EPS = 1e-5


class Ovis2(FixedSizeTower):
    """Ovis 2 encoder. The vectors of tiles are mixtures of visual vocabulary entries; the vectors of
    separators between tiles are the last entries. The shape of an item's `grid` is the rows and columns of
    its tiles, or (1, 1) without tiles."""

    facts: OvisFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        ovis, vit = self.facts, self.facts.vit
        tower = scope / "model" / "vision_tower"
        inner = tower / "transformer"
        first = inner / "embeddings"
        self.patches = PatchEmbedding((3, vit.patch, vit.patch), vit.hidden, first / "patch_embedding")
        self.first_norm = RMSNorm(vit.hidden, vit.norm_eps, first / "rms_norm")
        self.places = Learned(first / "position_embedding" / "weight", vit.tokens, vit.hidden)
        style = replace(_STYLE, bias=ovis.bias, out_bias=ovis.bias, mlp_bias=ovis.mlp_bias)
        self.layers = vision_layers(vit, vit.layers, inner / "encoder" / "layers", style)
        self.last_norm = RMSNorm(vit.hidden, vit.norm_eps, inner / "rms_norm")
        self.head = WholeLinear(vit.hidden * ovis.gather**2, ovis.vocab, tower / "head_linear")
        self.head_norm = LayerNorm(ovis.vocab, _EPS, tower / "head_norm")
        table = scope / "model" / "visual_embeddings_table" / "weight"
        self.words = Learned(table, ovis.vocab + len(ovis.mark_ids), ovis.size_out)

    def forward(self, pixels: Tensor) -> Tensor:
        vit, words = self.facts.vit, self.words.vectors[: self.facts.vocab]
        x = self.patches(patches_of(pixels, vit.patch)).flatten(0, 1)
        x = self.first_norm.normalize(x).view(len(pixels), -1, vit.hidden) + self.places.vectors
        x = self.layers(x.flatten(0, 1), [vit.tokens] * len(pixels))
        squares = pixel_shuffle(
            self.last_norm.normalize(x).view(len(pixels), -1, vit.hidden), self.facts.gather
        )
        logits = self.head_norm.normalize(self.head(squares.flatten(0, 1)))
        mixed = words[logits.argmax(-1)] if self.facts.hard else logits.softmax(-1) @ words
        return mixed.view(len(pixels), -1, self.facts.size_out)

    def packed(self, modality: str, vectors: Tensor, item: Mapping[str, Tensor]) -> Tensor:
        begin, whole, column, row, end = self.words.vectors[self.facts.vocab :].split(1)
        parts: list[Tensor] = [begin, vectors[0], whole]
        rows, columns = item["grid"].shape
        for number, tile in enumerate(vectors[1:], start=1):
            parts += [tile] if number == rows * columns else [tile, column if number % columns else row]
        return torch.cat([*parts, end])

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        tiles = max(1, (num_vectors - 1) // (self.facts.tokens + 1))
        item = super().blank(modality, tiles * self.facts.tokens)
        return item | {"grid": torch.zeros(1, max(1, tiles - 1), device=self.device)}
