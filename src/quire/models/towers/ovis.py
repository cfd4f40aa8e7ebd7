"""Ovis 2's tower: AIMv2, whose patches become mixes of the words of a visual vocabulary."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.ovis import OvisFacts
from quire.kernels.reference.encoder import Spans, spans_of
from quire.layers.linear import WholeLinear
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.scope import Scope
from quire.layers.vision import Learned, PatchEmbedding, VisionAttention, VisionMLP, patches_of
from quire.models.towers.squares import FixedSizeTower, gathered

_MLP = ("gate_proj", "up_proj", "down_proj")
_EPS = 1e-5


class Layer(nn.Module):
    """Attention, then a gated feed-forward half, each behind a norm."""

    def __init__(self, facts: OvisFacts, scope: Scope) -> None:
        super().__init__()
        vit, bias = facts.vit, facts.bias
        attention = scope / "attention"
        self.attention_norm = RMSNorm(vit.hidden, vit.norm_eps, scope / "rms_norm1")
        self.attention = VisionAttention(vit.hidden, vit.heads, attention, bias=bias, out_bias=bias)
        self.mlp_norm = RMSNorm(vit.hidden, vit.norm_eps, scope / "rms_norm2")
        sizes = (vit.hidden, vit.intermediate)
        self.mlp = VisionMLP(
            *sizes, scope / "ffn", names=_MLP, activation=vit.activation, bias=facts.mlp_bias
        )

    def forward(self, x: Tensor, images: Spans) -> Tensor:
        x = x + self.attention(self.attention_norm.alone(x), images)
        out: Tensor = x + self.mlp(self.mlp_norm.alone(x))
        return out


class Ovis2(FixedSizeTower):
    """All that stands for an image has a word: its tiles, and the marks around them. `grid` of an item has as
    many rows and columns as it has tiles beside the whole, or one of each if there are none."""

    facts: OvisFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        own, vit = self.facts, self.facts.vit
        tower = scope / "model" / "vision_tower"
        inner = tower / "transformer"
        first = inner / "embeddings"
        self.patches = PatchEmbedding((3, vit.patch, vit.patch), vit.hidden, first / "patch_embedding")
        self.first_norm = RMSNorm(vit.hidden, vit.norm_eps, first / "rms_norm")
        self.places = Learned(first / "position_embedding" / "weight", vit.tokens, vit.hidden)
        layers = inner / "encoder" / "layers"
        self.layers = nn.ModuleList(Layer(own, layers / i) for i in range(vit.layers))
        self.last_norm = RMSNorm(vit.hidden, vit.norm_eps, inner / "rms_norm")
        self.head = WholeLinear(vit.hidden * own.gather**2, own.vocab, tower / "head_linear")
        self.head_norm = LayerNorm(own.vocab, _EPS, tower / "head_norm")
        table = scope / "model" / "visual_embeddings_table" / "weight"
        self.words = Learned(table, own.vocab + len(own.mark_ids), own.size_out)

    def forward(self, pixels: Tensor) -> Tensor:
        vit, words = self.facts.vit, self.words.vectors[: self.facts.vocab]
        x = self.patches(patches_of(pixels, vit.patch)).flatten(0, 1)
        x = self.first_norm.alone(x).view(len(pixels), -1, vit.hidden) + self.places.vectors
        images = spans_of(np.full(len(pixels), vit.tokens, np.int32), x.device)
        x = x.flatten(0, 1)
        for layer in self.layers:
            x = layer(x, images)
        squares = gathered(self.last_norm.alone(x).view(len(pixels), -1, vit.hidden), self.facts.gather)
        logits = self.head_norm.alone(self.head(squares.flatten(0, 1)))
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
        found = super().blank(modality, tiles * self.facts.tokens)
        return found | {"grid": torch.zeros(1, max(1, tiles - 1), device=self.device)}
