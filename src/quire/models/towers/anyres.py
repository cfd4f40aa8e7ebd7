"""LLaVA-Next's and LLaVA-OneVision's towers: the whole image, then its tiles row by row, each row ended."""

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
    """A processor says of each place which vectors stand there, by number: those of all squares, and behind
    them the one that ends a row. Where it names four they are mixed by weight."""

    facts: AnyresFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        self.newline = Learned(scope / "model" / "image_newline", self.facts.size_out)

    def packed(self, modality: str, vectors: Tensor, item: Mapping[str, Tensor]) -> Tensor:
        newline = self.newline.vectors[None]
        if modality == "video":
            return torch.cat((self._halved(vectors).flatten(0, 1), newline))
        every = torch.cat((vectors.flatten(0, 1), newline))
        places = item["places"].long()
        if places.shape[1] == 1:
            return every[places[:, 0]]
        return torch.einsum("nkh,nk->nh", every[places], item["weights"].to(every.dtype))

    def _halved(self, vectors: Tensor) -> Tensor:
        """[frames, patches, hidden], half as many a side."""
        side = self.facts.vit.side
        grid = vectors.view(len(vectors), side, side, -1).permute(0, 3, 1, 2)
        half = F.interpolate(grid, size=(ceil(side / 2), ceil(side / 2)), mode="bilinear")
        return half.permute(0, 2, 3, 1).flatten(1, 2)

    def blank(self, modality: str, num_vectors: int) -> dict[str, Tensor]:
        if modality == "video":
            each = ceil(self.facts.vit.side / 2) ** 2
            return super().blank(modality, num_vectors // each * self.facts.tokens)
        count = -(-num_vectors // self.facts.tokens)
        item = super().blank(modality, count * self.facts.tokens)
        places = torch.arange(num_vectors, device=self.device)[:, None]
        return item | {"places": places.clamp(max=count * self.facts.tokens)}
