"""Vision encoder of Pixtral, Mistral 3 and LightOnOCR: images of any size with 2D RoPE."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.multimodal.pixtral import PixtralFacts
from quire.layers.linear import WholeLinear
from quire.layers.norm import RMSNorm
from quire.layers.patch_positions import axial_rope, grid_places
from quire.layers.scope import Scope
from quire.layers.vision import Angles, PatchEmbedding, VisionMLP, VisionStyle, patches_of, vision_layers
from quire.models.towers.any_size import AnySizeTower, Grid, grid_of

_EPS = 1e-5
_STYLE = VisionStyle(
    norms=("attention_norm", "ffn_norm"),
    attention="attention",
    out="o_proj",
    mlp="feed_forward",
    mlp_names=("gate_proj", "up_proj", "down_proj"),
    norm=RMSNorm,
    eps=_EPS,
    bias=False,
    out_bias=False,
    mlp_bias=False,
)


class PixtralViT(nn.Module):
    """ViT of Pixtral: patch embedding, norm, layers with 2D RoPE."""

    def __init__(self, facts: PixtralFacts, scope: Scope) -> None:
        super().__init__()
        self.facts = facts
        kernel = (3, facts.patch, facts.patch)
        self.patches = PatchEmbedding(kernel, facts.hidden, scope / "patch_conv", bias=False)
        self.norm = RMSNorm(facts.hidden, _EPS, scope / "ln_pre")
        self.layers = vision_layers(facts, facts.layers, scope / "transformer" / "layers", _STYLE)
        dim = facts.head_dim
        powers = torch.arange(0, dim, 2, device=scope.device, dtype=torch.float32) / dim
        self.frequencies = (1 / facts.theta**powers).view(-1, 2).t()
        """[2, head_dim / 4] RoPE frequencies: even ones for rows, odd ones for columns."""

    def forward(self, images: Sequence[Tensor]) -> Tensor:
        """Encode images [3, height, width] to the hidden states of the patches of all images, [T, hidden]."""
        patch = self.facts.patch
        grids = [grid_of(image, patch) for image in images]
        flat = torch.cat([patches_of(image[None], patch)[0] for image in images])
        x = self.norm.normalize(self.patches(flat))
        return self.layers(x, [rows * columns for rows, columns in grids], self.angles(grids))

    def angles(self, grids: Sequence[Grid]) -> Angles:
        places = torch.cat([grid_places(grid, self.frequencies.device) for grid in grids])
        return axial_rope(places, self.frequencies)


class MistralMerger(nn.Module):
    """Patch merger of Mistral 3: norm and projection of each square of concatenated patches. Rows and columns
    beyond the last full square are dropped."""

    def __init__(self, facts: PixtralFacts, scope: Scope) -> None:
        super().__init__()
        self.square = facts.merge
        self.norm = RMSNorm(facts.hidden, facts.norm_eps, scope / "norm")
        merging = scope / "patch_merger" / "merging_layer"
        self.product = WholeLinear(facts.hidden * facts.merge**2, facts.hidden, merging)

    def forward(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        parts = self.norm.normalize(x).split([rows * columns for rows, columns in grids])
        square = self.square
        merged = [
            part.view(rows, columns, -1)[: rows // square * square, : columns // square * square]
            .unflatten(1, (-1, square))
            .unflatten(0, (-1, square))
            .permute(0, 2, 4, 1, 3)
            .flatten(2)
            .flatten(0, 1)
            for part, (rows, columns) in zip(parts, grids, strict=True)
        ]
        return self.product(torch.cat(merged))


class Pixtral(AnySizeTower):
    """Pixtral encoder. An item is one image of any size, [3, height, width]."""

    facts: PixtralFacts

    def __init__(self, facts: ArchFacts, scope: Scope) -> None:
        super().__init__(facts, scope)
        vit, projector = (scope / "model" / name for name in self.facts.names)
        self.vit = PixtralViT(self.facts, vit)
        self.merger = MistralMerger(self.facts, projector) if self.facts.is_merged else None
        self.projector = VisionMLP(
            self.facts.hidden,
            self.facts.size_out,
            projector,
            names=("linear_1", "linear_2"),
            size_out=self.facts.size_out,
            activation=self.facts.projector_activation,
            bias=self.facts.bias,
        )

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        images = [item["pixels"] for item in items]
        patch, merge = self.facts.patch, self.facts.merge
        grids = [grid_of(image, patch) for image in images]
        x = self.vit(images)
        x = x if self.merger is None else self.merger(x, grids)
        return list(self.projector(x).split([rows // merge * (columns // merge) for rows, columns in grids]))

    def cost(self, modality: str, item: Mapping[str, tuple[int, ...]]) -> int:
        _, height, width = item["pixels"]
        patches = height * width // self.facts.patch**2
        return patches * (12 * self.facts.hidden + patches)
