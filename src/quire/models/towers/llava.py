"""LLaVA's tower: CLIP or SigLIP, and two products."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from quire.config.facts import MediaFacts
from quire.config.media.llava import LlavaFacts
from quire.layers.scope import Scope
from quire.layers.vision import VisionMLP
from quire.models.towers.clip import ViT


class Seen(nn.Module):
    """What all LLaVAs share: images or tiles of one size become vectors of the decoder."""

    def __init__(self, facts: LlavaFacts, scope: Scope) -> None:
        super().__init__()
        self.facts = facts
        self.vit = ViT(facts.vit, max(facts.depths), scope)
        self.projector = VisionMLP(
            facts.vit.hidden * len(facts.depths),
            facts.size_out,
            scope / "model" / "multi_modal_projector",
            names=("linear_1", "linear_2"),
            size_out=facts.size_out,
            activation=facts.activation,
            bias=facts.bias,
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """[N, 3, side, side] -> [N, vectors, size_out]"""
        states = self.vit(pixels, self.facts.depths)[:, self.facts.first :]
        vectors: Tensor = self.projector(states.flatten(0, 1))
        return vectors.view(len(pixels), -1, self.facts.size_out)


class Llava(nn.Module):
    """One image, one square."""

    def __init__(self, facts: MediaFacts, scope: Scope) -> None:
        super().__init__()
        self.facts: LlavaFacts = facts.tower
        self.seen = Seen(self.facts, scope)
        self.device = scope.device

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        pixels = torch.stack([item["pixels"] for item in items])
        return list(self.seen(pixels))

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        side = self.facts.vit.image
        return {"pixels": torch.zeros(3, side, side, device=self.device)}

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        return self.facts.vit.tokens
