"""Vision encoder of Idefics 3 and SmolVLM: SigLIP over tiles, pixel shuffle, one projection."""

import torch
from torch import Tensor

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.idefics import IdeficsFacts
from quire.layers.linear import WholeLinear
from quire.layers.scope import Scope
from quire.models.towers.clip import ViT
from quire.models.towers.squares import FixedSizeTower, pixel_shuffle


class Idefics3(FixedSizeTower):
    """Idefics 3 encoder over the tiles of an image and the whole image."""

    facts: IdeficsFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        tower, vit = self.facts, self.facts.vit
        self.vit = ViT(vit, vit.layers, scope, is_normed=True)
        self.vit.order = compute_position_ids(vit.side).to(scope.device)
        projector = scope / "model" / "connector" / "modality_projection" / "proj"
        self.projector = WholeLinear(vit.hidden * tower.gather**2, tower.size_out, projector)

    def forward(self, pixels: Tensor) -> Tensor:
        x = pixel_shuffle(self.vit(pixels), self.facts.gather)
        vectors: Tensor = self.projector(x.flatten(0, 1))
        return vectors.view(*x.shape[:2], -1)


def compute_position_ids(side: int) -> Tensor:
    """Return the position id of each patch by its start as a fraction of the side in float32. Rounding gives
    some patches the id of an adjacent one; the models were trained that way."""
    borders = torch.arange(1 / side, 1.0, 1 / side)
    begins = (torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))).clamp(max=1.0 - 1e-6)
    along = torch.bucketize(begins, borders, right=True)
    return (along[:, None] * side + along).flatten()
