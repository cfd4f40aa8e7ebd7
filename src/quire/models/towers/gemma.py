"""Gemma 3's tower: SigLIP, whose patches are averaged to soft tokens."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from quire.config.facts import MediaFacts
from quire.config.media.gemma import GemmaFacts
from quire.layers.norm import RMSNorm
from quire.layers.scope import Scope
from quire.layers.vision import Learned
from quire.models.towers.clip import ViT


class Projector(nn.Module):
    """The mean of each square of patches, normed, in the decoder's size."""

    def __init__(self, facts: GemmaFacts, scope: Scope) -> None:
        super().__init__()
        self.side, self.square = facts.side, facts.vit.side // facts.side
        norm = scope / "mm_soft_emb_norm"
        self.norm = RMSNorm(facts.vit.hidden, facts.vit.norm_eps, norm, plus_one=True)
        weight = scope / "mm_input_projection_weight"
        self.weight = Learned(weight, facts.vit.hidden, facts.size_out)

    def forward(self, x: Tensor) -> Tensor:
        """[N, patches, hidden] -> [N, side * side, size_out]"""
        grid = x.view(len(x), self.side, self.square, self.side, self.square, -1)
        means = grid.mean((2, 4)).flatten(0, 2)
        return (self.norm.alone(means) @ self.weight.vectors).view(len(x), self.side**2, -1)


class Gemma3(nn.Module):
    """An image and its crops, if there are any, one after the other."""

    def __init__(self, facts: MediaFacts, scope: Scope) -> None:
        super().__init__()
        self.facts: GemmaFacts = facts.tower
        self.vit = ViT(self.facts.vit, self.facts.vit.layers, scope, is_normed=True)
        self.projector = Projector(self.facts, scope / "model" / "multi_modal_projector")
        self.device = scope.device

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        pixels = [item["pixels"] for item in items]
        vectors = self.projector(self.vit(torch.cat(pixels)))
        return [each.flatten(0, 1) for each in vectors.split([len(each) for each in pixels])]

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        side, count = self.facts.vit.image, max(1, num_vectors // self.facts.tokens)
        return {"pixels": torch.zeros(count, 3, side, side, device=self.device)}

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        return item["pixels"][0] * self.facts.vit.tokens
