"""The tower of Idefics 3 and SmolVLM: SigLIP over tiles, patches gathered square by square, one product."""

import torch
from torch import Tensor

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.idefics import IdeficsFacts
from quire.layers.linear import WholeLinear
from quire.layers.scope import Scope
from quire.models.towers.clip import ViT
from quire.models.towers.squares import FixedSizeTower, gathered


class Idefics3(FixedSizeTower):
    """The tiles of an image, and the image as a whole."""

    facts: IdeficsFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        own = self.facts
        self.vit = ViT(own.vit, own.vit.layers, scope, is_normed=True)
        self.vit.order = places_of(own.vit.side).to(scope.device)
        product = scope / "model" / "connector" / "modality_projection" / "proj"
        self.projector = WholeLinear(own.vit.hidden * own.gather**2, own.size_out, product)

    def forward(self, pixels: Tensor) -> Tensor:
        x = gathered(self.vit(pixels), self.facts.gather)
        vectors: Tensor = self.projector(x.flatten(0, 1))
        return vectors.view(*x.shape[:2], -1)


def places_of(side: int) -> Tensor:
    """The learned place of each patch. A patch is put into that by where it begins, as a fraction of the side
    in float32, so that some are in the place of their neighbour; they have been trained so."""
    borders = torch.arange(1 / side, 1.0, 1 / side)
    begins = (torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))).clamp(max=1.0 - 1e-6)
    along = torch.bucketize(begins, borders, right=True)
    return (along[:, None] * side + along).flatten()
