"""Vision encoder of LLaVA-Next and LLaVA-OneVision: the whole image, then its tiles with row separators."""

from collections.abc import Mapping
from math import ceil

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.anyres import AnyresFacts
from quire.layers.scope import Scope
from quire.layers.vision import Learned
from quire.models.towers.llava import Llava


class Anyres(Llava):
    """The processor gives, for each output vector, its index among the vectors of all squares; the last index
    is the newline vector. With four indices each, the vectors are averaged by weight."""

    facts: AnyresFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        self.newline = Learned(scope / "model" / "image_newline", self.facts.size_out)

    def packed(self, modality: str, vectors: Tensor, item: Mapping[str, Tensor]) -> Tensor:
        newline = self.newline.vectors[None]
        if modality == "video":
            return torch.cat((self._downsample(vectors).flatten(0, 1), newline))
        all_vectors = torch.cat((vectors.flatten(0, 1), newline))
        index = item["places"].long()
        if index.shape[1] == 1:
            return all_vectors[index[:, 0]]
        return torch.einsum("nkh,nk->nh", all_vectors[index], item["weights"].to(all_vectors.dtype))

    def _downsample(self, vectors: Tensor) -> Tensor:
        """Return [frames, patches, hidden] with the side of each frame halved by bilinear interpolation."""
        side = self.facts.vit.side
        grid = vectors.view(len(vectors), side, side, -1).permute(0, 3, 1, 2)
        half = F.interpolate(grid, size=(ceil(side / 2), ceil(side / 2)), mode="bilinear")
        return half.permute(0, 2, 3, 1).flatten(1, 2)

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        if modality == "video":
            per_frame = ceil(self.facts.vit.side / 2) ** 2
            return super().blank(modality, num_vectors // per_frame * self.facts.tokens)
        count = -(-num_vectors // self.facts.tokens)
        item = super().blank(modality, count * self.facts.tokens)
        places = torch.arange(num_vectors, device=self.device)[:, None]
        return item | {"places": places.clamp(max=count * self.facts.tokens)}
